"""The replicas of a strategy on torch: exchange of tensors between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.core.errors import MismatchError
from hvdlite.core.types import ReduceOp
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite_torch.arrays.tensors import as_array, contiguous
from hvdlite_torch.collectives.broadcasts import broadcast_structure, broadcast_tensors, gather_tensors


class TorchReplicaGroup(ReplicaGroup):
    """A group of replicas with collectives on torch tensors; alone, all of them do nothing."""

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
            self.runtime.allreduce(name, array, array, op, process_set=self.process_set, blocking=True).wait()
        return result.to(tensor.device)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every replica's tensor; shapes may differ along the first dimension. Not differentiable.

        Raises:
            MismatchError: on all ranks, when something else differs.
        """
        if self.size == 1:
            return [tensor.detach().clone()]
        parts = gather_tensors(self.runtime, tensor, self.name("gather"), self.process_set)
        kinds = [(tuple(part.shape), str(part.dtype).removeprefix("torch.")) for part in parts]
        for replica_id, (shape, dtype) in enumerate(kinds):
            if (shape[1:], len(shape), dtype) != (kinds[0][0][1:], len(kinds[0][0]), kinds[0][1]):
                raise MismatchError(f"gather: shapes must be equal but for the axis: replica 0 has {kinds[0][1]} "
                                    f"{kinds[0][0]}, replica {replica_id} {dtype} {shape}")
        return parts
