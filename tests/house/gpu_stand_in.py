"""What the checks of `benchmarks.gpu_check` need to run on the CPU, over the double of a GPU (`tests/gpu_double`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hvdlite_torch as hvd
from benchmarks import gpu_checks, gpu_training, gpu_two_ranks
from benchmarks.gpu_sheet import Setup, Work
from benchmarks.gpu_two_ranks import Kernel
from hvdlite import api
from hvdlite.planes.nccl import library
from hvdlite.runtime.runtime import Runtime
from tests.gpu_double import torch_cuda
from tests.gpu_double.cuda import view
from tests.gpu_double.gpu import GpuDouble
from tests.gpu_double.worlds import Gpus
from tests.worlds import threads


class HostSetup(Setup):
    """A rank whose GPU is a double."""

    def __init__(self, rank: int, size: int, work: Work, gpus: Gpus) -> None:
        super().__init__(rank, size, work)
        self._gpus = gpus
        self._memory: list[Any] = []

    def gpu(self) -> Any:
        return torch.device("cpu")

    def device(self, index: int) -> Any:
        self._gpus.made.append(GpuDouble())
        return self._gpus.made[-1].device

    def malloc(self, nbytes: int) -> int:
        self._memory.append(np.ones(nbytes, np.uint8))
        return int(self._memory[-1].ctypes.data)

    def read(self, pointer: int, nbytes: int) -> bytes:
        torch.cuda.synchronize()
        return view(pointer, nbytes, np.dtype(np.uint8)).tobytes()

    def join_torch(self, gpu: Any) -> None:
        if self.size == 1:  # torch has one rank a process
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def leave_torch(self) -> None:
        if self.size == 1:
            dist.destroy_process_group()

    def ddp(self, model: Any, **options: Any) -> Any:
        return super().ddp(model, **options) if self.size == 1 else model


def tiny() -> Any:
    """Return the model of the checks' trainings."""
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 1000))


WORK = Work(tiny, lambda: [(4, 3), (7,), (2, 2, 3)], divisor=1000, shrink=1 << 12, batch=2, pixels=8, small_batch=2,
            small_pixels=8, small_model=tiny)


def install(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> Gpus:
    """Put the stand-ins in their places, for one test.

    Args:
        count: of GPUs.
    """
    gpus = torch_cuda.install(monkeypatch)
    torch_cuda.install_torch(monkeypatch, gpus, count)
    for name in ("init", "shutdown"):
        monkeypatch.setattr(hvd, name, lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)
    monkeypatch.setattr(library, "load", lambda environment: gpus.made[0].cupy)
    real_names = gpu_training.names_within
    monkeypatch.setattr(gpu_training, "names_within", lambda events: [*real_names(events), "cudaLaunchKernel"])
    monkeypatch.setattr(gpu_two_ranks, "kernels_within", lambda events: [
        Kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 5.0, 6.0), Kernel("hvdlite_move", 3.0, 4.0),
        Kernel("gemm", 0.0, 5.5)])
    return gpus


@contextlib.contextmanager
def current_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.local]:
    """Yield where a rank's thread has its runtime, as `now`, for the public functions."""
    current = threading.local()
    with monkeypatch.context() as patched:
        patched.setattr(api.worlds(), "current", lambda: current.now)
        yield current


def run_check(name: str, size: int, gpus: Gpus, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a check on ranks that are threads; rank R's sheet is the file R."""
    with current_runtime(monkeypatch) as current:
        def step(runtime: Runtime) -> None:
            current.now = runtime
            rank = runtime.world.rank
            gpu_checks.run(name, path / str(rank), HostSetup(rank, size, WORK, gpus))
        threads(size, step)
