"""Mailboxes: whatever the schedule, each call is answered once, with the same ranks' calls on all ranks."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.negotiation.mailbox_ranks import Call, Job, expected


def scripts(size: int, choice: random.Random) -> list[list[Call]]:
    """Return calls under a few names, mostly blocking, sometimes not on all ranks, or of another size on one rank."""
    names, numbers = ["x", "y", "z.1", "z.2"], dict.fromkeys(["x", "y", "z.1", "z.2"], 0)
    made: list[list[Call]] = [[] for _ in range(size)]
    for _ in range(60):
        name = choice.choice(names)
        number, numbers[name] = numbers[name], numbers[name] + 1
        differs, other = choice.random() < 0.05, choice.randrange(size)
        for rank, script in enumerate(made):
            script.append(Call(name, number, choice.random() < 0.95, 2 if differs and rank == other else 1,
                               abandoned=choice.random() < 0.1))
    return made


# docs/protocol.md#mailboxes
@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32))
def test_each_call_is_answered_once_and_alike_on_all_ranks(size: int, seed: int) -> None:
    choice = random.Random(seed)
    job = Job(scripts(size, choice), choice)
    job.play()
    for calls in zip(*(rank.script for rank in job.ranks), strict=True):
        want = expected(calls[0], size) if len({call.elements for call in calls}) == 1 else -1
        assert [call.result for call in calls] == [want] * size, calls
