"""Lets torch's CPU tensors pass for a GPU's, and stands for `torch.cuda`. See `tests/gpu_double/__init__.py`.

A function that stands for one of torch's takes the arguments that torch's would take, and no others.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hvdlite.core.device import DeviceArray
from hvdlite_torch.arrays import cuda
from tests.gpu_double.cuda import view
from tests.gpu_double.worlds import Gpus, install_gpus


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


def install(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Put doubles below hvdlite's adapter for torch and behind worlds of threads, for one test."""
    gpus = install_gpus(monkeypatch)

    def bytes_tensor(array: DeviceArray) -> torch.Tensor:
        tensor = torch.from_numpy(view(array.pointer, array.nbytes, np.dtype(np.uint8)))
        tensor.keeps = array.owner  # type: ignore[attr-defined]
        return tensor

    def to_host(tensor: torch.Tensor, why: str) -> torch.Tensor:
        copy = tensor.clone()
        copy.is_on_host = True  # type: ignore[attr-defined]
        return copy

    monkeypatch.setattr(cuda, "is_on_gpu", lambda tensor: not getattr(tensor, "is_on_host", False))
    monkeypatch.setattr(cuda, "cuda_index", lambda tensor: 0)
    monkeypatch.setattr(cuda, "current_stream", lambda index: 0)
    monkeypatch.setattr(cuda, "bytes_tensor", bytes_tensor)
    monkeypatch.setattr(cuda, "memory_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(cuda, "allocate", lambda devices, index, stream, nbytes: devices._opened(index).allocate(nbytes))
    monkeypatch.setattr(cuda, "allocating", lambda index, stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "to_host", to_host)
    monkeypatch.setattr(cuda, "empty_result_like", lambda copy: to_host(torch.empty_like(copy), ""))
    monkeypatch.setattr(cuda, "record_stream", lambda tensors: None)
    return gpus


def install_torch(monkeypatch: pytest.MonkeyPatch, gpus: Gpus, count: int) -> None:
    """Put a stand-in in the place of `torch.cuda`, for scripts that use it, too.

    Args:
        count: of GPUs.
    """
    def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        real = inspect.signature(getattr(owner, name))

        def call(*arguments: Any, **options: Any) -> Any:
            real.bind(*arguments, **options)
            return replacement(*arguments, **options)
        monkeypatch.setattr(owner, name, call)

    def synchronize() -> None:
        for gpu in gpus.made:
            gpu.deviceSynchronize()
    for owner, name, replacement in (
            (torch.cuda, "synchronize", synchronize), (torch.cuda, "_sleep", lambda cycles: None),
            (torch.cuda, "current_stream", Stream), (torch.cuda, "set_sync_debug_mode", lambda mode: None),
            (torch.cuda, "mem_get_info", lambda: (64 << 20, 128 << 20)), (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "reset_peak_memory_stats", lambda: None), (torch.cuda, "max_memory_allocated", lambda: 1 << 20),
            (torch.cuda, "get_device_properties", lambda gpu: types.SimpleNamespace(
                name="a double", multi_processor_count=1, major=9, minor=0)),
            (torch.cuda, "device_count", lambda: count), (torch.cuda.nccl, "version", lambda: (2, 28, 9))):
        replace(owner, name, replacement)
    for owner, name, replacement in (
            (torch.cuda, "stream", lambda stream: contextlib.nullcontext(stream)),
            (torch.cuda, "Stream", Stream), (torch.cuda, "Event", lambda enable_timing: Event()),
            (torch.cuda, "ExternalStream", lambda address, device: Stream()),
            (torch.futures, "Future", lambda devices, real=torch.futures.Future: real())):
        monkeypatch.setattr(owner, name, replacement)
