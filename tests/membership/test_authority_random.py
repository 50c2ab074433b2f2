"""Random faults in a model of an elastic job; `python -m tests.membership` plays more of them."""

from __future__ import annotations

import itertools

from tests.membership.model import play

EVENTS = 25_000


def test_random_faults_against_a_model_of_members() -> None:
    """What is asserted stands in `tests.membership.model`; a failure names the seed."""
    events = 0
    for seed in itertools.count():
        events += play(seed)
        if events > EVENTS:
            break
