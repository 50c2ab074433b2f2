"""Memory of GPUs: what happens when there is none, which errors are told, and when a framework may reuse its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.types import ReduceOp
from hvdlite.planes.nccl.collectives import StagingBuffer
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.device_double import CudaErrorDouble, GpuDouble, Gpus
from tests.gpu_worlds import begun
from tests.gpu_worlds import gpus as gpus
from tests.planes.cuda_double import CudaDouble

SUM = ReduceOp.SUM


def fused(gpus: Gpus, runtime: Runtime, count: int = 1 << 14) -> Any:
    """Reduce two tensors that go through staging memory."""
    arrays = [gpus.wrap(runtime, np.ones(count)) for _ in range(2)]
    return runtime.grouped_allreduce("g", arrays, arrays, SUM).wait()


def test_no_memory_says_where(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        begun(gpus, runtime).memory = 1 << 16
        with pytest.raises(HorovodInternalError, match=r"rank \d: out of memory in allreduce of 'g'.* on GPU 0"):
            fused(gpus, runtime)
        assert gpus.made[runtime.world.rank].reclaimed <= 1
    worlds.threads(2, step)


def test_what_the_framework_keeps_unused_is_taken_back_first(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        gpu = begun(gpus, runtime)
        gpu.memory, gpu.cached = 1 << 16, 1 << 20
        fused(gpus, runtime)
        assert gpu.reclaimed == 1
    worlds.threads(2, step)


def test_other_errors_are_told_as_what_they_are(gpus: Gpus) -> None:
    def step(runtime: Runtime) -> None:
        begun(gpus, runtime).fault = CudaErrorDouble("cudaErrorIllegalAddress: an illegal memory access was encountered")
        with pytest.raises(HorovodInternalError, match=r"rank \d: CUDA failed in allreduce of 'g'.* on GPU 0: "
                                                       r"cudaErrorIllegalAddress") as caught:
            fused(gpus, runtime)
        assert "out of memory" not in str(caught.value) and "NCCL_DEBUG" not in str(caught.value)
        assert gpus.made[runtime.world.rank].reclaimed == 0
    worlds.threads(2, step)


def test_staging_memory_is_allocated_seldom() -> None:
    gpu = GpuDouble()
    staging = StagingBuffer(gpu, gpu.allocate)
    for nbytes in range(1000, 100_000, 1000):
        staging.get(nbytes)
    assert len(gpu.allocations) < 10
    assert all(later >= 2 * earlier for earlier, later in itertools.pairwise(gpu.allocations))
    staging.get(1 << 20)
    assert gpu.allocations[-1] == 1 << 20
    gpu.memory = (1 << 20) + 4096
    staging.get((1 << 20) + 1)
    assert gpu.allocations[-1] == (1 << 20) + 1, "there is no memory for more than what is needed"
    gpu.end()


@pytest.mark.parametrize(("status", "expected"), [(2, MemoryError), (700, RuntimeError)])
def test_only_cudas_own_status_is_out_of_memory(status: int, expected: type[Exception],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = CudaDouble()
    device = cuda.device(monkeypatch, 0)
    cuda.malloc_status = status
    with pytest.raises(expected, match=f"status {status}") as caught:
        device.allocate(100)
    assert isinstance(caught.value, MemoryError) == (status == 2)
