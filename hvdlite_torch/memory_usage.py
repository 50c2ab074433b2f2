"""What the memory of each rank is used for, with torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.device import DeviceArray
from hvdlite.training.memory_report import MemoryReport, gather_report
from hvdlite_torch.optimizer.sharded import Sharded
from hvdlite_torch.rows import tensors_in


def memory_report(model: torch.nn.Module | Iterable[torch.Tensor],
                  optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Return what each rank's memory is used for, in bytes; all ranks call this. `print` shows a table.

    Memory that several tensors share counts once; gradients that lie in hvdlite's buckets count as buckets.

    Args:
        model: its parameters and buffers count, and the gradients; or some tensors.
        optimizer: its state counts, and with `sharded=True` the parameters that each rank owns, from the first step on.

    Raises:
        HorovodInternalError: like every collective.
    """
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, torch.nn.Module) else list(model)
    buckets = [_span(memory) for memory in api.runtime().bucket_memory()]
    gradients = _stored(tensor.grad for tensor in tensors if tensor.grad is not None)
    outside = [each for each in gradients if not any(begin <= each.data_ptr() < end for begin, end in buckets)]
    state = _stored(tensors_in([] if optimizer is None else list(optimizer.state.values())))
    maybe_sharded: object = optimizer
    owned, note = maybe_sharded.ownership() if isinstance(maybe_sharded, Sharded) else (0, "")
    return gather_report(_bytes(_stored(tensors)), _bytes(outside), _bytes(state), owned, note)


def _stored(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the dense tensors in which the tensors' values lie on this rank."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):  # made of others: a DTensor of its shard
            parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            yield from _stored(part for part in parts if isinstance(part, torch.Tensor))  # else a mesh
        elif tensor.layout is torch.sparse_coo:
            yield from (tensor._indices(), tensor._values())  # the public ones refuse a tensor that is not coalesced
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        elif tensor.layout is torch.strided and tensor.device.type != "meta":
            yield tensor


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of dense tensors' memory; what they share counts once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr(), tensor.device] = storage.nbytes()
    return sum(storages.values())


def _span(memory: Array | DeviceArray) -> tuple[int, int]:
    begin = memory.pointer if isinstance(memory, DeviceArray) else memory.ctypes.data
    return begin, begin + memory.nbytes
