"""Tensors as the flat arrays that operations move, and calls of `torch.distributed` that are ready to start.

A contiguous tensor is moved without a copy; what is not one piece of memory is copied before and after the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from hvdlite.core.array import BFLOAT16, Array
from hvdlite.groups.operation import Operation
from hvdlite_torch.distributed.errors import UnsupportedArgumentError

NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""Names of dtypes in messages."""
_CODES = {
    torch.bool: "|b1", torch.int8: "|i1", torch.uint8: "|u1", torch.int16: "=i2", torch.uint16: "=u2", torch.int32: "=i4",
    torch.uint32: "=u4", torch.int64: "=i8", torch.uint64: "=u8", torch.float16: "=f2", torch.bfloat16: "=u2",
    torch.float32: "=f4", torch.float64: "=f8", torch.complex64: "=c8", torch.complex128: "=c16"}
"""Dtypes with arithmetic, in NumPy's array interface; bfloat16 as integers of its width."""
REDUCED = frozenset(_CODES)
"""Dtypes that can be reduced."""


class _ArrayInterface:
    """A tensor's memory for NumPy; the array keeps this, and so the tensor.

    Not `Tensor.numpy`, after which torch refuses to free or resize the memory, as FSDP does.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, count: int, code: str) -> None:
        self.tensor = tensor
        self.__array_interface__ = {"data": (tensor.data_ptr(), False), "shape": (count,), "typestr": code, "version": 3}


def check(tensor: torch.Tensor, what: str) -> None:
    """Check that a tensor is dense and in host memory.

    Raises:
        UnsupportedArgumentError: when it is not.
    """
    if not tensor.is_cpu:
        raise UnsupportedArgumentError(
            f"{what}: a tensor is on {tensor.device}, and this process group moves host memory; name a backend for the "
            f'device too, for example init_process_group("cpu:hvdlite,{tensor.device.type}:<backend>")')
    if tensor.layout is not torch.strided:
        raise UnsupportedArgumentError(f"{what}: a tensor has the layout {tensor.layout}; this needs a dense tensor")
    if hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "fake_mode"):  # wraps other tensors, or has no values
        raise UnsupportedArgumentError(f"{what}: a {type(tensor).__name__} has no memory of its own; if a functional "
                                       "collective returned it, wait for it first (torch.ops._c10d_functional.wait_tensor)")


def values(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor of one of the dtypes `REDUCED` as a flat array."""
    array: Array = np.asarray(_ArrayInterface(tensor, tensor.numel(), _CODES[tensor.dtype]))
    return array.view(BFLOAT16) if tensor.dtype is torch.bfloat16 else array


def memory(tensor: torch.Tensor) -> Array:
    """Return the memory of a contiguous tensor of any dtype as bytes."""
    array: Array = np.asarray(_ArrayInterface(tensor, tensor.numel() * tensor.element_size(), "|u1"))
    return array


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the values: the tensor itself if possible."""
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.contiguous()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie in its memory as they are, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy values between tensors of one dtype and as many elements, on this thread alone if both are plain.

    One of them is plain. They may be inference tensors, which only threads in that mode may change.
    """
    if is_plain(source) and is_plain(target):
        np.copyto(memory(target), memory(source))
        return
    with torch.inference_mode():
        if is_plain(target):
            target.detach().view(source.shape).copy_(source.detach())
        else:
            target.detach().copy_(source.detach().view(target.shape))


def adjoining(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a flat tensor over contiguous tensors that lie one after the other in memory; None if they do not."""
    present = [tensor for tensor in tensors if tensor.numel()]
    if not present:
        return tensors[0].detach().reshape(-1)
    first = present[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for tensor in present:
        if tensor.data_ptr() != end or not is_plain(tensor) or tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.numel() * tensor.element_size()
    return first.detach().as_strided((sum(tensor.numel() for tensor in present),), (1,), first.storage_offset())


class PreparedCall(msgspec.Struct, frozen=True, eq=False):
    """What one rank does for a call of `torch.distributed`.

    Attributes:
        operations: in order.
        tensors: the result, as `Work.result` returns it.
        finish: copies results to where they belong; None if they are there already.
    """

    operations: Sequence[Operation]
    tensors: list[torch.Tensor]
    finish: Callable[[], None] | None = None


def joined(calls: Sequence[PreparedCall], tensors: list[torch.Tensor]) -> PreparedCall:
    """Return several calls as one.

    Args:
        tensors: its result.
    """
    finishes = [each.finish for each in calls if each.finish is not None]

    def finish() -> None:
        for each in finishes:
            each()

    operations = [operation for each in calls for operation in each.operations]
    return PreparedCall(operations, tensors, finish if finishes else None)


class Copies:
    """Contiguous memory for the tensors of an operation: their own if possible, else copies."""

    __slots__ = ("_inputs", "_outputs")

    def __init__(self) -> None:
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # and the memory to which each is copied
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # and the memory from which each is copied

    def prepared(self, operation: Operation, tensors: list[torch.Tensor]) -> PreparedCall:
        """Return a call of the operation, with the copies that it needs.

        Args:
            tensors: its result.
        """
        if self._inputs:
            operation = msgspec.structs.replace(operation, prepare=self._fill)
        return PreparedCall([operation], tensors, self._empty if self._outputs else None)

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory that has the values of an input when the operation's turn comes."""
        return tensor if is_plain(tensor) else self._room(tensor, self._inputs)

    def room(self, output: torch.Tensor) -> torch.Tensor:
        """Return memory for the values of an output."""
        return output if is_plain(output) else self._room(output, self._outputs)

    def room_with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor that is replaced by a result, with its values."""
        return tensor if is_plain(tensor) else self._room(tensor, self._inputs, self._outputs)

    def sources(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return flat memory that has the values of inputs, one after the other."""
        return self._flat(tensors, self._inputs)

    def room_for_all(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return flat memory for outputs, one after the other."""
        return self._flat(outputs, self._outputs)

    def _room(self, tensor: torch.Tensor, *copies: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
        for each in copies:
            each.append((tensor, room))
        return room

    def _flat(self, tensors: Sequence[torch.Tensor], copies: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        whole = adjoining(tensors)
        if whole is None:
            sizes = [tensor.numel() for tensor in tensors]
            whole = torch.empty(sum(sizes), dtype=tensors[0].dtype)
            copies += zip(tensors, whole.split(sizes), strict=True)
        return whole

    def _fill(self) -> None:
        for tensor, room in self._inputs:
            copy(tensor, room)

    def _empty(self) -> None:
        for tensor, room in self._outputs:
            copy(room, tensor)
