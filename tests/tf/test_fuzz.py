"""Random trainings of Keras models, a fixed number of them; `make fuzz` carries out more. What they are: tests/tf/fuzz."""

from __future__ import annotations

import dataclasses
import os

import pytest

from tests.tf.fuzz import draws
from tests.tf.fuzz.jobs import fuzz

DRAWS = int(os.environ.get("FUZZ_KERAS", "50"))
"""How many trainings there are in all. 0 is none."""
FIRST = {"jax": 4}
"""The first seed, if it is not 0. Of JAX's two, one trains in a scope and one does not."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", draws.BACKENDS)
def test_trainings_equal_one_process(backend: str) -> None:
    first = FIRST.get(backend, 0)
    failures = list(fuzz(range(first, first + round(DRAWS * draws.SHARES[backend])), backend))
    assert not failures, "\n\n".join(map(str, failures))


def test_everything_is_drawn() -> None:
    for backend in draws.BACKENDS:
        trainings = [draws.draw(seed, backend) for seed in range(400)]
        for name, values in (("model", draws.models_of(backend)), ("optimizer", draws.OPTIMIZERS), ("loss", draws.LOSSES),
                             ("data", draws.DATA[backend]), ("scoped", (True, False)), ("again", (True, False)),
                             ("sharded", (True, False))):
            assert {getattr(training, name) for training in trainings} == set(values)
        assert {setting for training in trainings for setting in training.settings} == set(draws.SETTINGS)
    assert len({dataclasses.replace(training, seed=0) for training in trainings}) > 390
