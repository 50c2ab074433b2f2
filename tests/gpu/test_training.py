"""Training on GPUs: as many ranks as you like equal one; every way to keep gradients; beside torch's own NCCL."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.gpu.programs import training as programs
from tests.gpu.support import run

VARIANTS = ["plain", "kept", "channels last", "compiled", "fp16", "bf16", "clip", "groups", "accumulated"]


@pytest.mark.parametrize(("variants", "environment"), [
    (VARIANTS, {}), (["plain", "bf16"], {"HVDLITE_GRADIENT_AS_BUCKET_VIEW": "0"})], ids=["views", "copies"])
def test_two_ranks_equal_one(variants: list[str], environment: dict[str, str]) -> None:
    """Without batch normalisation, so that a mean over ranks is a mean over the whole batch."""
    run(2, programs.two_ranks_equal_one, variants, not environment, environment=environment)


def test_unused_parameters_and_loss_scaling() -> None:
    run(2, programs.unused_parameters_and_loss_scaling)


def test_beside_torchs_own_nccl() -> None:
    run(2, programs.beside_torchs_own_nccl)


def test_sparse_gradients_norms_and_parameters_on_both_sides() -> None:
    run(2, programs.sparse_gradients_norms_and_parameters_on_both_sides)


def test_nothing_waits_for_the_gpu_in_a_step() -> None:
    run(1, programs.nothing_waits_for_the_gpu_in_a_step)
