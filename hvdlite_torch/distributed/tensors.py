"""Tensors as the flat arrays that operations move: without a copy if the tensor is contiguous."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hvdlite.core.array import BFLOAT16, Array
from hvdlite_torch.distributed.errors import UnsupportedArgumentError

NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""Names of dtypes in messages."""
_KNOWN_TO_NUMPY = frozenset({
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128})


def check(tensor: torch.Tensor, what: str) -> None:
    """Check that a tensor is dense and in host memory.

    Raises:
        UnsupportedArgumentError: when it is not.
    """
    if not tensor.is_cpu:
        raise UnsupportedArgumentError(
            f"{what}: a tensor is on {tensor.device}, and this process group moves host memory; name a backend for the device "
            f'too, for example init_process_group("cpu:hvdlite,{tensor.device.type}:<backend>")')
    if tensor.layout is not torch.strided:
        raise UnsupportedArgumentError(f"{what}: a tensor has the layout {tensor.layout}; this operation needs a dense tensor")


def values(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor as a flat array of its dtype; `tensor` must have one that NumPy knows."""
    flat = tensor.detach().view(-1)
    if flat.dtype is torch.bfloat16:
        return flat.view(torch.int16).numpy().view(BFLOAT16)
    array: Array = flat.numpy()
    return array


def memory(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor of any dtype as bytes."""
    flat = tensor.detach().view(-1)
    if flat.dtype not in _KNOWN_TO_NUMPY:
        flat = (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).view(torch.uint8)
    array: Array = flat.numpy()
    return array.view(np.uint8)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the values: the tensor itself if possible."""
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.contiguous()


def room_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return contiguous memory for the values of an output: the tensor itself if possible."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def copy_to(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values of the same dtype to a tensor, on this thread alone if both are contiguous."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        np.copyto(memory(tensor), memory(source))
    else:
        tensor.detach().copy_(source.view(tensor.shape))


def adjoining(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a flat tensor over contiguous tensors that lie one after the other in memory; None if they do not."""
    present = [tensor for tensor in tensors if tensor.numel()]
    if not present:
        return tensors[0].detach().reshape(-1)
    first = present[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in present:
        if (tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != storage
                or tensor.is_conj() or tensor.is_neg()):
            return None
        end += tensor.numel() * tensor.element_size()
    return first.detach().as_strided((sum(tensor.numel() for tensor in present),), (1,), first.storage_offset())


def concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of tensors, one after the other, as a flat tensor: their own memory if possible."""
    whole = adjoining(tensors)
    return torch.cat([dense(tensor.detach()).view(-1) for tensor in tensors]) if whole is None else whole
