"""Sums of sparse tensors (COO), such as the gradients of `nn.Embedding(sparse=True)`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.core.types import ReduceOp
from hvdlite_torch.distributed.errors import UnsupportedArgumentError
from hvdlite_torch.distributed.operations import Operations, Reduce
from hvdlite_torch.distributed.prepared import Prepared


def coalesced(tensor: torch.Tensor, reduce: Reduce) -> torch.Tensor:
    """Return this rank's contribution, in which each index occurs once.

    Raises:
        UnsupportedArgumentError: for another layout, device or operation.
    """
    if tensor.layout is not torch.sparse_coo or tensor.device.type != "cpu":
        raise UnsupportedArgumentError("all_reduce: only COO is supported of the sparse layouts, in host memory; this "
                                       f"tensor has {tensor.layout} on {tensor.device}")
    if reduce.op is not ReduceOp.SUM or reduce.prescale != 1.0:
        raise UnsupportedArgumentError(f"all_reduce: sparse tensors can be reduced with SUM only, not {reduce.name}")
    return tensor.detach().coalesce()


def told(tensor: torch.Tensor) -> str:
    """Return the call in an error's words."""
    return f"all_reduce of a sparse tensor of shape {tuple(tensor.shape)}, {tensor.sparse_dim()} sparse dimensions"


def summing(operations: Operations, tensor: torch.Tensor, own: torch.Tensor, counts: Sequence[int]) -> Prepared:
    """Return the operations that replace `tensor` by the sum of all ranks' contributions.

    Args:
        own: this rank's contribution.
        counts: the ranks' numbers of values.
    """
    name, shape, total = told(own), own.shape, sum(counts)
    indices = torch.empty((total, own.sparse_dim()), dtype=torch.int64)
    values = torch.empty((total, *own.values().shape[1:]), dtype=own.dtype)
    gathered = [operations.allgather(whole.split(list(counts)), part, name)
                for whole, part in ((indices, own.indices().t()), (values, own.values()))]

    def finish() -> None:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False).coalesce())

    return Prepared([operation for each in gathered for operation in each.operations], [tensor], finish)
