"""Random training loops, a fixed number of them; `make fuzz` runs more. What they are: tests/torch/fuzz."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")

from tests.torch.fuzz.jobs import SETTINGS, fuzz
from tests.torch.fuzz.program import FEATURES, draw

SEEDS = int(os.environ.get("FUZZ_SEEDS", "32"))
"""How many programs run on two ranks; on four it is a third of them. 0 is none."""
PATIENT = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "30", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "60"}


@pytest.mark.slow
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
@pytest.mark.parametrize("size", [2, 4])
def test_training_loops_match_plain_torch(size: int, setting: int) -> None:
    seeds = range(setting, SEEDS if size == 2 else SEEDS // 3, len(SETTINGS))
    failures = list(fuzz(seeds, size, stalled=PATIENT, settings=SETTINGS[setting:setting + 1]))
    assert not failures, "\n\n".join(map(str, failures))


def test_a_feature_that_is_left_out_changes_no_other_draw() -> None:
    for seed in range(40):
        whole, part = draw(seed, 3), draw(seed, 3, [name for name in FEATURES if name not in ("keeps", "metrics")])
        assert part.optimizers == whole.optimizers and part.parameters == whole.parameters
        assert [step.clears for step in part.steps] == [step.clears for step in whole.steps]
        assert [turn and turn.backwards for step in part.steps for turn in step.turns] == [
            turn and turn.backwards for step in whole.steps for turn in step.turns]


def test_every_feature_is_drawn() -> None:
    programs = [draw(seed, 3) for seed in range(200)]
    for feature in FEATURES:
        without = [name for name in FEATURES if name != feature]
        assert any(draw(program.seed, 3, without) != program for program in programs), feature
