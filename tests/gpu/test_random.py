"""Random trainings on GPUs, a few of them; the commands of tests/torch/trainings, tests/torch/fuzz and tests/tf/fuzz carry
out more, with `--device cuda`.
"""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("torch")

from tests.tf.fuzz.draws import draw
from tests.tf.fuzz.jobs import fuzz as fuzz_keras
from tests.torch.fuzz.jobs import SETTINGS, fuzz
from tests.torch.trainings.jobs import fuzz as fuzz_trainings

PATIENT = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "30", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "60"}
UNEVEN = [each.seed for each in (draw(seed, "torch") for seed in range(50)) if each.scoped and each.rows % each.batch % 2]
"""Seeds of trainings whose last batches give the two ranks different numbers of samples."""


def test_trainings_equal_one_process() -> None:
    failures = list(fuzz_trainings(range(24), device="cuda", stalled=PATIENT))
    assert not failures, "\n\n".join(map(str, failures))


def test_training_loops_match_plain_torch() -> None:
    failures = list(fuzz(range(6), 2, device="cuda", stalled=PATIENT, settings=SETTINGS[:1]))
    assert not failures, "\n\n".join(map(str, failures))


@pytest.mark.skipif(importlib.util.find_spec("keras") is None, reason="Keras is not installed")
def test_keras_weighs_uneven_batches_whichever_thread_computes_gradients() -> None:
    failures = list(fuzz_keras(UNEVEN[:4], "torch", device="cuda"))
    assert not failures, "\n\n".join(map(str, failures))
