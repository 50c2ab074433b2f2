"""One rank among the replicas of a strategy: the collectives of a strategy other than those of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdlite.core.errors import MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training import objects
from hvdlite_torch.framework import as_array, contiguous
from hvdlite_torch.state import broadcast_structure, broadcast_tensors


class Replica:
    """This rank's place among the replicas, and their collectives; alone, all of them do nothing.

    Calls are matched by strategy, kind and order, so strategies on several threads do not disturb each other.

    Args:
        process_set: id of the ranks that have replicas; a rank outside is alone.

    Attributes:
        number: this replica's, of `size`, in rank order.
        root: the rank of replica 0.
        label: the strategy's name in this job.
    """

    def __init__(self, runtime: Runtime, process_set: int) -> None:
        members = runtime.members(process_set)
        if runtime.world.rank not in members:
            members = (runtime.world.rank,)
        self.runtime, self.process_set = runtime, process_set
        self.number, self.size, self.root = members.index(runtime.world.rank), len(members), members[0]
        self.label = runtime.label("mirrored", process_set)

    def name(self, kind: str) -> str:
        """Return the next name for one kind of call."""
        return self.runtime.unnamed(self.label, kind, self.process_set)

    def broadcast_object(self, value: Any, kind: str) -> Any:
        """Return replica 0's picklable object."""
        if self.size == 1:
            return value
        return objects.broadcast_object(self.runtime, value, self.root, self.name(kind), self.process_set)

    def allgather_object(self, value: Any, kind: str) -> list[Any]:
        """Return every replica's picklable object."""
        if self.size == 1:
            return [value]
        return objects.allgather_object(self.runtime, value, self.name(kind), self.process_set)

    def ask(self, kind: str, flag: bool) -> Callable[[], bool]:
        """Begin to find out whether a flag is set on some replica; return what waits for the answer.

        The question travels with the next collective.
        """
        if self.size == 1:
            return lambda: flag
        array = np.array([flag], np.uint8)
        handle = self.runtime.allreduce(self.name(kind), array, array, ReduceOp.MAX, process_set=self.process_set,
                                        at_once=False)

        def answer() -> bool:
            handle.wait()
            return bool(array[0])
        return answer

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], kind: str) -> None:
        """Overwrite tensors with replica 0's."""
        if self.size > 1:
            broadcast_tensors(self.runtime, tensors, self.root, self.name(kind), self.process_set)

    def broadcast_structure(self, value: Any, kind: str) -> Any:
        """Return replica 0's structure of dicts, lists, tuples, tensors and objects."""
        if self.size == 1:
            return value
        return broadcast_structure(self.runtime, value, self.root, self.name(kind), self.process_set)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the reduction of a tensor, which is moved through host memory; not differentiable."""
        result = contiguous(tensor.detach().cpu(), "reduce").clone()
        if self.size > 1:
            name = self.name("reduce")
            array = as_array(result, name)
            self.runtime.allreduce(name, array, array, op, process_set=self.process_set).wait()
        return result.to(tensor.device)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every replica's tensor; shapes may differ along the first dimension. Not differentiable.

        Raises:
            MismatchError: on all ranks, when something else differs.
        """
        if self.size == 1:
            return [tensor.detach().clone()]
        dense = contiguous(tensor.detach().cpu(), "gather")
        kinds = self.allgather_object((tuple(dense.shape), str(dense.dtype).removeprefix("torch.")), "gather.shape")
        for number, (shape, dtype) in enumerate(kinds):
            if (shape[1:], len(shape), dtype) != (kinds[0][0][1:], len(kinds[0][0]), kinds[0][1]):
                raise MismatchError(f"gather: shapes must be equal but for the axis: replica 0 has {kinds[0][1]} "
                                    f"{kinds[0][0]}, replica {number} {dtype} {shape}")
        name = self.name("gather")
        flat = dense.reshape(-1).view(torch.uint8)  # as bytes, so that every dtype travels alike
        everything = self.runtime.allgather(name, as_array(flat, name), process_set=self.process_set).wait()
        assert everything is not None
        parts = torch.from_numpy(everything).view(dense.dtype).split([math.prod(shape) for shape, _ in kinds])
        return [part.reshape(shape).to(tensor.device) for part, (shape, _) in zip(parts, kinds, strict=True)]
