"""The short forms of a process group's methods, such as `group.allreduce(tensor, op)`, as the form with options.

torch's C++ has these forms for its own process groups; one that Python implements gets them here.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch._C import _distributed_c10d as c10d

Arguments = tuple[Any, ...]
Timeout = datetime.timedelta | None
_SUM: Final = c10d.ReduceOp.SUM


def _options(kind: Any, timeout: Timeout, **fields: Any) -> Any:
    options = kind()
    for name, value in fields.items():
        setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options


def _listed(given: Any) -> Sequence[Any]:
    return [given] if isinstance(given, torch.Tensor) else given


def _broadcast(tensor: torch.Tensor, root: int, timeout: Timeout = None) -> Arguments:
    return [tensor], _options(c10d.BroadcastOptions, timeout, rootRank=root)


def _allreduce(tensor: Any = None, op: Any = _SUM, timeout: Timeout = None, *, tensors: Any = None) -> Arguments:
    return _listed(tensors if tensor is None else tensor), _options(c10d.AllreduceOptions, timeout, reduceOp=op)


def _reduce(tensor: torch.Tensor, root: int, op: Any = _SUM, timeout: Timeout = None) -> Arguments:
    return [tensor], _options(c10d.ReduceOptions, timeout, rootRank=root, reduceOp=op)


def _allgather(output_tensors: Any, input_tensor: Any, timeout: Timeout = None) -> Arguments:
    is_short = isinstance(input_tensor, torch.Tensor)
    return ([output_tensors] if is_short else output_tensors, _listed(input_tensor),
            _options(c10d.AllgatherOptions, timeout))


def _gather(output_tensors: Any, input_tensor: torch.Tensor, root: int, timeout: Timeout = None) -> Arguments:
    return ([output_tensors] if output_tensors else []), [input_tensor], _options(c10d.GatherOptions, timeout, rootRank=root)


def _scatter(output_tensor: torch.Tensor, input_tensors: Any, root: int, timeout: Timeout = None) -> Arguments:
    return [output_tensor], ([input_tensors] if input_tensors else []), _options(c10d.ScatterOptions, timeout, rootRank=root)


def _reduce_scatter(output: Any, input: Any, op: Any = _SUM, timeout: Timeout = None) -> Arguments:
    is_short = isinstance(output, torch.Tensor)
    return _listed(output), [input] if is_short else input, _options(c10d.ReduceScatterOptions, timeout, reduceOp=op)


def _all_to_all_single(output: torch.Tensor, input: torch.Tensor, output_split_sizes: Sequence[int],
                       input_split_sizes: Sequence[int], timeout: Timeout = None) -> Arguments:
    return output, input, output_split_sizes, input_split_sizes, _options(c10d.AllToAllOptions, timeout)


def _alltoall(output_tensors: Any, input_tensors: Any, timeout: Timeout = None) -> Arguments:
    return output_tensors, input_tensors, _options(c10d.AllToAllOptions, timeout)


def _barrier(timeout: Timeout = None) -> Arguments:
    return (_options(c10d.BarrierOptions, timeout),)


OVERLOADS: Final[dict[str, Callable[..., Arguments]]] = {
    "broadcast": _broadcast, "allreduce": _allreduce, "reduce": _reduce, "allgather": _allgather, "gather": _gather,
    "scatter": _scatter, "reduce_scatter": _reduce_scatter, "all_to_all_single": _all_to_all_single, "alltoall": _alltoall,
    "barrier": _barrier,
}
"""By method: the function that makes the arguments of the form with options from those of a short form."""
