"""What the memory of each rank is used for, with torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.device import DeviceArray
from hvdlite.training.memory_report import MemoryReport, gather_report


def memory_report(model: torch.nn.Module | Iterable[torch.Tensor],
                  optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Return what each rank's memory is used for, in bytes; all ranks call this. `print` shows a table.

    Memory that several tensors share counts once; gradients that lie in hvdlite's buckets count as buckets.

    Args:
        model: its parameters and buffers count, and the gradients; or some tensors.
        optimizer: its state counts.

    Raises:
        HorovodInternalError: like every collective.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else list(model)
    buckets = [_span(memory) for memory in api.runtime().bucket_memory()]
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    outside = [each for each in gradients if not any(begin <= each.data_ptr() < end for begin, end in buckets)]
    state: dict[Any, Any] = {} if optimizer is None else dict(optimizer.state)
    kept = [value for values in state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    return gather_report(_bytes(tensors), _bytes(outside), _bytes(kept))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' memory; what they share counts once."""
    storages = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr(), tensor.device] = storage.nbytes()
        else:
            storages[id(tensor), tensor.device] = tensor._values().nbytes + tensor._indices().nbytes
    return sum(storages.values())


def _span(memory: Array | DeviceArray) -> tuple[int, int]:
    begin = memory.pointer if isinstance(memory, DeviceArray) else memory.ctypes.data
    return begin, begin + memory.nbytes
