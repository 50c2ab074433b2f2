"""Programs of `tests/gpu` on the CPU, over doubles of GPUs: those that need nothing else of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from hvdlite.runtime.runtime import Runtime
from tests.gpu.programs import ranks, support, training
from tests.house import gpu_stand_in
from tests.worlds import threads

FEW = ["plain", "kept", "bf16"]


@pytest.mark.parametrize(("size", "program", "arguments"), [
    (2, ranks.every_reduction_and_dtype, ()), (4, ranks.every_other_collective, ()),
    (2, ranks.memory_of_dropped_tensors_is_not_reused_too_early, ()),
    (2, training.two_ranks_equal_one, (FEW, True)), (2, training.sparse_gradients_norms_and_parameters_on_both_sides, ()),
], ids=lambda value: getattr(value, "__name__", None))
def test_it_runs_over_doubles(size: int, program: Callable[..., None], arguments: tuple[Any, ...],
                              monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = gpu_stand_in.install(monkeypatch)
    monkeypatch.setattr(support, "GPU", "cpu")

    def step(runtime: Runtime) -> None:
        current.now = runtime
        program(*arguments)
    with gpu_stand_in.current_runtime(monkeypatch) as current:
        def begin() -> tuple[int, int, torch.device]:
            return current.now.world.rank, current.now.world.size, torch.device("cpu")
        for module in (ranks, training):
            monkeypatch.setattr(module, "begin", begin)
        threads(size, step)
    gpus.end()
