"""Random PyTorch trainings, a fixed number of them; `make fuzz` carries out more. What they are: tests/torch/trainings."""

from __future__ import annotations

import collections
import dataclasses
import os
import unittest.mock

import pytest

pytest.importorskip("torch")

from tests.torch.trainings import draws
from tests.torch.trainings.draws import COMING, FEATURES, LATER, draw, why_not
from tests.torch.trainings.jobs import SETTINGS, fuzz

DRAWS = int(os.environ.get("FUZZ_TRAININGS", "100"))
"""How many trainings there are in all. 0 is none."""
PATIENT = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "30", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "60"}


@pytest.mark.slow
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_trainings_equal_one_process(setting: int) -> None:
    seeds = range(setting, DRAWS, len(SETTINGS))
    failures = list(fuzz(seeds, stalled=PATIENT, settings=SETTINGS[setting:setting + 1]))
    assert not failures, "\n\n".join(map(str, failures))


def test_everything_is_drawn() -> None:
    trainings = [draw(seed) for seed in range(2000)]
    for name, values in FEATURES.items():
        times = collections.Counter(getattr(training, name) for training in trainings)
        waiting = {value for value in values if any(COMING[reason](_plain(name, value)) for reason in LATER)}
        assert {value for value in values if times[value] >= 2} == set(values) - waiting, (name, times)
    assert not any(why_not(training) for training in trainings)
    assert len({str(dataclasses.replace(training, seed=0)) for training in trainings}) > 1960


def test_what_comes_later_is_drawn_then() -> None:
    """So that a list of reasons which becomes shorter does not leave rules without a meaning."""
    assert set(LATER) <= set(COMING)
    missing = set(COMING)
    with unittest.mock.patch.object(draws, "LATER", ()):
        for training in map(draw, range(20_000)):
            missing -= {reason for reason in missing if COMING[reason](training)}
            if not missing:
                return
    assert not missing


def _plain(name: str, value: object) -> draws.Training:
    """Return a training with one feature only."""
    return dataclasses.replace(draws.Training(0), **{name: value})  # type: ignore[arg-type]
