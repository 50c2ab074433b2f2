"""Averages on GPUs: sums of divided contributions, because NVLS does not compute ncclAvg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.core.types import ReduceOp
from hvdlite.planes.nccl.collectives import MEAN, SUM
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.worlds import Gpus, allreduce
from tests.gpu_double.worlds import gpus as gpus

AVERAGE = ReduceOp.AVERAGE


def done(handle: Any) -> Any:
    """Wait for a result on the GPU, and return it."""
    result = handle.wait()
    for completion in handle.completions():
        completion.wait()
    return result


def averages(gpus: Gpus, runtime: Runtime) -> None:
    """Average tensors in each of the ways that the plane has."""
    rank, size = runtime.world.rank, runtime.world.size
    mean = (size + 1) / 2
    for dtype in (np.float16, np.float32, np.float64, np.complex64):
        name = np.dtype(dtype).name
        alone = np.full(5, rank + 1, dtype)
        done(allreduce(gpus, runtime, f"alone.{name}", alone, AVERAGE))
        assert (alone == mean).all(), name
        kept, out = np.full(5, rank + 1, dtype), np.zeros(5, dtype)
        done(runtime.allreduce(f"out.{name}", gpus.wrap(runtime, kept), gpus.wrap(runtime, out), AVERAGE))
        assert (kept == rank + 1).all() and (out == mean).all(), name
        fused = [np.full(n, rank + 1, dtype) for n in (2, 9)]
        arrays = [gpus.wrap(runtime, each) for each in fused]
        done(runtime.grouped_allreduce(f"fused.{name}", arrays, arrays, AVERAGE))
        assert all((each == mean).all() for each in fused), name
    part = done(runtime.reducescatter("rs", gpus.wrap(runtime, np.full(size, rank + 1.0)), AVERAGE))
    assert (part.owner == mean).all()
    place = np.zeros(3)
    done(runtime.reduce("r", gpus.wrap(runtime, np.full(3, rank + 1.0)), gpus.wrap(runtime, place) if rank == 0 else None,
                        0, AVERAGE))
    assert rank != 0 or (place == mean).all()


@pytest.mark.parametrize("size", [1, 2])
def test_nccl_sums_what_is_to_be_averaged(gpus: Gpus, size: int) -> None:
    worlds.threads(size, lambda runtime: averages(gpus, runtime))
    assert {op for gpu in gpus.made for op in gpu.nccl.reductions} == {SUM}


def test_one_rank_needs_no_kernel_for_an_average_in_place(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        allreduce(gpus, runtime, "first", np.ones(2), AVERAGE).wait()
        gpus.made[0].launches.clear()
        done(allreduce(gpus, runtime, "x", np.ones(9), AVERAGE))
    worlds.threads(1, step)
    assert "move" not in gpus.made[0].launches


def test_all_ranks_use_nccls_average_if_one_has_no_kernels(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        runtime.devices.record_event(0)
        gpus.made[runtime.world.rank].kernels = runtime.world.rank != 1
        averages(gpus, runtime)
    worlds.threads(3, step)
    assert all(MEAN in gpu.nccl.reductions for gpu in gpus.made)


def test_large_halves_do_not_overflow(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        values = np.full(3, 60000, np.float16)
        done(allreduce(gpus, runtime, "x", values, AVERAGE))
        assert (values == 60000).all()
    worlds.threads(2, step)


@pytest.mark.parametrize("op", [AVERAGE, ReduceOp.SUM])
def test_an_average_with_ranks_that_contribute_nothing(gpus: Gpus, op: ReduceOp) -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        if rank == 2:
            runtime.join().wait()
            return
        for count in (1, 2):
            fused = [np.full(n, rank + 1, np.float32) for n in (3, 77)[:count]]
            arrays = [gpus.wrap(runtime, each) for each in fused]
            done(runtime.grouped_allreduce(f"x{count}", arrays, arrays, op))
            assert all((each == (1 if op is AVERAGE else 3)).all() for each in fused), fused
        runtime.join().wait()
    worlds.threads(3, step)
