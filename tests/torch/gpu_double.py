"""Lets torch's CPU tensors pass for a GPU's, and a double for the GPU: the adapter's GPU paths run without one."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

from hvdlite.core.device import DeviceArray
from hvdlite_torch import cuda
from tests.device_double import Gpus, view
from tests.gpu_worlds import install_gpus


def install(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Put doubles behind the torch adapter and behind worlds of threads, for one test."""
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
    monkeypatch.setattr(cuda, "memory_device", lambda array: torch.device("cpu"))
    monkeypatch.setattr(cuda, "allocating", lambda index, stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "to_host", to_host)
    monkeypatch.setattr(cuda, "empty_result_like", lambda copy: to_host(torch.empty_like(copy), ""))
    monkeypatch.setattr(cuda, "record_stream", lambda tensors: None)
    return gpus
