"""Calls of `torch.distributed` that are ready to start: their operations, and copies of what is not one piece of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from hvdlite.groups.operations import Operation
from hvdlite_torch.distributed import tensors as memory


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What one rank does for a call of `torch.distributed`.

    Attributes:
        operations: in order.
        tensors: the result, as `Work.result` returns it.
        finish: copies results to where they belong; None if they are there already.
    """

    operations: Sequence[Operation]
    tensors: list[torch.Tensor]
    finish: Callable[[], None] | None = None


def joined(calls: Sequence[Prepared], tensors: list[torch.Tensor]) -> Prepared:
    """Return several calls as one.

    Args:
        tensors: its result.
    """
    finishes = [each.finish for each in calls if each.finish is not None]

    def finish() -> None:
        for each in finishes:
            each()

    return Prepared([operation for each in calls for operation in each.operations], tensors, finish if finishes else None)


class Copies:
    """Contiguous memory for the tensors of an operation: their own if possible, else copies."""

    __slots__ = ("_inputs", "_outputs")

    def __init__(self) -> None:
        self._inputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # and the memory to which each is copied
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []  # and the memory from which each is copied

    def prepared(self, operation: Operation, tensors: list[torch.Tensor]) -> Prepared:
        """Return a call of the operation, with the copies that it needs.

        Args:
            tensors: its result.
        """
        if self._inputs:
            operation = dataclasses.replace(operation, prepare=self._fill)
        return Prepared([operation], tensors, self._empty if self._outputs else None)

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory that has the values of an input when the operation's turn comes."""
        return tensor if memory.is_plain(tensor) else self._room(tensor, self._inputs)

    def room(self, output: torch.Tensor) -> torch.Tensor:
        """Return memory for the values of an output."""
        return output if memory.is_plain(output) else self._room(output, self._outputs)

    def room_with_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor that is replaced by a result, with its values."""
        return tensor if memory.is_plain(tensor) else self._room(tensor, self._inputs, self._outputs)

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
        whole = memory.adjoining(tensors)
        if whole is None:
            sizes = [tensor.numel() for tensor in tensors]
            whole = torch.empty(sum(sizes), dtype=tensors[0].dtype)
            copies += zip(tensors, whole.split(sizes), strict=True)
        return whole

    def _fill(self) -> None:
        for tensor, room in self._inputs:
            memory.copy(tensor, room)

    def _empty(self) -> None:
        for tensor, room in self._outputs:
            memory.copy(room, tensor)
