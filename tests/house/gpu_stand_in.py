"""Stand-ins by which the checks of `benchmarks.gpu_check` run on the CPU: torch.cuda over the host, and doubles of GPUs.

A function that stands in for one of torch's takes the arguments that torch's would take, and no others.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import types
from collections.abc import Callable, Iterator
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
from tests.device_double import GpuDouble, Gpus, view
from tests.gpu_worlds import spin
from tests.torch import gpu_double
from tests.worlds import threads


class Stream:
    """Stands for torch's streams; work on it is done at once."""

    cuda_stream = 0

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Event:
    """Stands for torch's events."""

    _clock = itertools.count(1)

    def record(self, stream: Stream | None = None) -> None:
        self.time = next(self._clock)

    def elapsed_time(self, end: Event) -> float:
        return float(end.time - self.time)

    def synchronize(self) -> None:
        pass


class HostSetup(Setup):
    """A rank whose GPU is a double."""

    def __init__(self, rank: int, size: int, work: Work, gpus: Gpus) -> None:
        super().__init__(rank, size, work)
        self._gpus = gpus
        self._memory: list[Any] = []

    def gpu(self) -> Any:
        return torch.device("cpu")

    def device(self, index: int) -> GpuDouble:
        self._gpus.made.append(GpuDouble())
        return self._gpus.made[-1]

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
    gpus = gpu_double.install(monkeypatch)

    def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        real = inspect.signature(getattr(owner, name))

        def call(*arguments: Any, **options: Any) -> Any:
            real.bind(*arguments, **options)
            return replacement(*arguments, **options)
        monkeypatch.setattr(owner, name, call)

    def synchronize() -> None:
        for gpu in (each for each in gpus.made if not each.closed_streams):
            for stream in gpu._streams:
                event = gpu.make_event()
                gpu.record(event, stream)
                spin(lambda gpu=gpu, event=event: gpu.is_event_done(event))  # type: ignore[misc]
                gpu.destroy_event(event)
    for owner, name, replacement in (
            (torch.cuda, "synchronize", synchronize), (torch.cuda, "_sleep", lambda cycles: None),
            (torch.cuda, "current_stream", Stream), (torch.cuda, "set_sync_debug_mode", lambda mode: None),
            (torch.cuda, "mem_get_info", lambda: (64 << 20, 128 << 20)), (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "reset_peak_memory_stats", lambda: None), (torch.cuda, "max_memory_allocated", lambda: 1 << 20),
            (torch.cuda, "get_device_properties", lambda gpu: types.SimpleNamespace(
                name="a double", multi_processor_count=1, major=9, minor=0)),
            (torch.cuda, "device_count", lambda: count), (torch.cuda.nccl, "version", lambda: (2, 28, 9)),
            (dist, "all_reduce", lambda tensor, op: None)):
        replace(owner, name, replacement)
    for owner, name, replacement in (
            (torch.cuda, "stream", lambda stream: contextlib.nullcontext(stream)),
            (torch.cuda, "Stream", Stream), (torch.cuda, "Event", lambda enable_timing: Event()),
            (torch.cuda, "ExternalStream", lambda address, device: Stream()),
            (torch.futures, "Future", lambda devices, real=torch.futures.Future: real()),
            (hvd, "init", lambda: None), (hvd, "shutdown", lambda: None)):
        monkeypatch.setattr(owner, name, replacement)
    runtime = types.SimpleNamespace(streamGetPriority=lambda stream: -5)
    nccl = types.SimpleNamespace(get_version=lambda: 22809)
    monkeypatch.setattr(library, "load", lambda environment: types.SimpleNamespace(
        __version__="14.2.0", cuda=types.SimpleNamespace(runtime=runtime, nccl=nccl)))
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
