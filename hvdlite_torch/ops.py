"""Collectives on torch tensors: synchronous, asynchronous, in place, grouped, differentiable.

Names follow Horovod: a tensor called "x" is negotiated as "allreduce.x"; unnamed calls are matched by their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import Collective, ReduceOp, reduce_op
from hvdlite.runtime.names import member_names
from hvdlite_torch.arrays import cuda
from hvdlite_torch.arrays.tensors import as_tensor
from hvdlite_torch.collectives import below_autograd
from hvdlite_torch.collectives.below_autograd import (
    TorchHandle,
    as_runtime_array,
    to_transportable,
)
from hvdlite_torch.collectives.derivatives import (
    AllgatherCall,
    AllreduceCall,
    AlltoallCall,
    BroadcastCall,
    ReducescatterCall,
    apply,
    apply_in_place,
)
from hvdlite_torch.compression import Compression, Compressor
from hvdlite_torch.uncompiled import leave_module_to_python

Average, Sum, Adasum = api.Average, api.Sum, api.Adasum
Min, Max, Product = api.Min, api.Max, api.Product


def _name(kind: str, name: str | None, process_set: ProcessSet) -> str:
    return api.runtime().names.of_call("torch", kind, name, api.set_id(process_set))


def poll(handle: TorchHandle) -> bool:
    """Return whether `synchronize(handle)` would not block.

    Args:
        handle: what an asynchronous collective has returned.

    Raises:
        ValueError: for a value that is not a handle.
    """
    return _checked(handle).done()


def synchronize(handle: TorchHandle) -> Any:
    """Wait for an asynchronous call and return its result, or raise its error; may be called again.

    Args:
        handle: what an asynchronous collective has returned.

    Raises:
        ValueError: for a value that is not a handle.
        HorovodInternalError: like every collective.
    """
    return _checked(handle).wait()


def _checked(handle: TorchHandle) -> TorchHandle:
    if not isinstance(handle, TorchHandle):
        raise ValueError(f"this takes what hvd.allreduce_async and the like return, not {type(handle).__name__}; what "
                         "sparse_allreduce_async returns is called")
    return handle


def allreduce_async_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
                     op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `allreduce_`, but return a handle immediately."""
    return apply_in_place(AllreduceCall(_name("allreduce", name, process_set), process_set, reduce_op(op, average),
                                        prescale_factor, postscale_factor), [tensor])


def allreduce_async(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
                    op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `allreduce`, but return a handle immediately; not differentiable."""
    return below_autograd.allreduce(tensor, torch.empty_like(tensor), _name("allreduce", name, process_set),
                                    reduce_op(op, average), prescale_factor, postscale_factor, process_set)


def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Like `allreduce`, in place; returns `tensor`.

    Differentiable (Average and Sum) where the tensor was computed from others. A leaf, such as a parameter, is overwritten
    without a gradient, also outside of `torch.no_grad()`.
    """
    return apply_in_place(AllreduceCall(_name("allreduce", name, process_set), process_set, reduce_op(op, average),
                                        prescale_factor, postscale_factor, is_blocking=True), [tensor]).wait()


def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: type[Compressor] = Compression.none, op: ReduceOp | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return the reduction of a tensor over all ranks; `tensor` is untouched. Differentiable.

    Args:
        tensor: the same shape and dtype on all ranks; any strides, any dtype but bool (Min and Max only) on the CPU.
        average: deprecated; use `op`.
        name: the same on all ranks; unnamed calls are matched by their order.
        compression: dtype on the wire for float32 and float64.
        op: Average (default), Sum, Product, Min, Max or Adasum (no gradient). The gradient is the derivative of the sum of
            all ranks' losses: for Average and Sum the same reduction of the upstream gradient.
        prescale_factor: factor on every rank's values before the reduction.
        postscale_factor: factor on the result.
        process_set: the ranks that take part.

    Raises:
        MismatchError: on all ranks, when they disagree about shape, dtype, op or factors.
        PeerLostError: if a rank died (`PeerFailedError`: it raised; `PeerLeftError`: it left).
        ValueError: at the call, for an unsupported tensor, or a name that is still being processed.
    """
    compressed, context = compression.compress(tensor)
    (reduced,) = apply(AllreduceCall(_name("allreduce", name, process_set), process_set, reduce_op(op, average),
                                     prescale_factor, postscale_factor), compressed)
    return compression.decompress(reduced, context)


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                             op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `grouped_allreduce_`, but return one handle immediately."""
    call = AllreduceCall(_name("grouped_allreduce", name, process_set), process_set, reduce_op(op, average),
                         prescale_factor, postscale_factor, is_grouped=True)
    return apply_in_place(call, tensors)


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                            op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `grouped_allreduce`, but return one handle immediately; not differentiable."""
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return below_autograd.grouped_allreduce(tensors, outputs, _name("grouped_allreduce", name, process_set),
                                            reduce_op(op, average), prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                       op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Like `allreduce_` on several tensors, which are fused."""
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                      compression: type[Compressor] = Compression.none, op: ReduceOp | None = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Like `allreduce` on several tensors, which are fused. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = apply(AllreduceCall(_name("grouped_allreduce", name, process_set), process_set, reduce_op(op, average),
                                  prescale_factor, postscale_factor, is_grouped=True), *(tensor for tensor, _ in pairs))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: ReduceOp = Average,
                           process_set: ProcessSet = global_process_set) -> Callable[[], torch.Tensor]:
    """Begin to reduce a sparse COO tensor; call the function that this returns, to wait for the result, a sparse tensor.

    Args:
        tensor: the same shape and dtype on all ranks; each rank has its own elements.
        name: the same on all ranks.
        op: Average or Sum.
        process_set: the ranks that take part.

    Raises:
        UnsupportedError: for a tensor that is not sparse COO, or another op; otherwise like `allgather`.
    """
    op = ReduceOp(op)
    if tensor.layout is not torch.sparse_coo or op not in (Average, Sum):
        raise UnsupportedError(f"'{name}': sparse_allreduce_async takes sparse COO tensors and Average or Sum, not "
                               f"{tensor.layout} and {op.name.capitalize()}")
    mine = tensor.detach().coalesce()
    indices = allgather_async(mine.indices().t(), f"{name}.indices", process_set)
    values = allgather_async(mine.values(), f"{name}.values", process_set)
    divisor = len(api.runtime().members(api.set_id(process_set))) if op is Average else 1

    def finish() -> torch.Tensor:
        return torch.sparse_coo_tensor(indices.wait().t(), values.wait() / divisor, tensor.shape, check_invariants=False)
    return finish


def allgather_async(tensor: torch.Tensor, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `allgather`, but return a handle immediately; not differentiable."""
    return below_autograd.allgather(tensor, _name("allgather", name, process_set), process_set)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set,
              horovod_gradient: bool = True) -> torch.Tensor:
    """Return all ranks' tensors concatenated along the first dimension, which may differ between ranks. Differentiable.

    Args:
        tensor: at least 1-D, of any dtype; the same on all ranks but for the number of rows.
        horovod_gradient: the gradient is the *average* over ranks of the upstream gradient's rows of this rank, as in
            Horovod; False: their sum, which is the derivative of the sum of all ranks' losses.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    (gathered,) = apply(AllgatherCall(_name("allgather", name, process_set), process_set, horovod_gradient), tensor)
    return gathered


def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `grouped_allgather`, but return one handle immediately; not differentiable."""
    members = member_names(_name("grouped_allgather", name, process_set), len(tensors))
    return below_autograd.join_handles([below_autograd.allgather(tensor, member, process_set)
                                        for tensor, member in zip(tensors, members, strict=True)])


def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None = None,
                      process_set: ProcessSet = global_process_set, horovod_gradient: bool = True) -> list[torch.Tensor]:
    """Like `allgather`, of several tensors. Differentiable."""
    call = AllgatherCall(_name("grouped_allgather", name, process_set), process_set, horovod_gradient, is_grouped=True)
    return apply(call, *tensors)


def reducescatter_async(tensor: torch.Tensor, name: str | None = None, op: ReduceOp = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> TorchHandle:
    """Like `reducescatter`, but return a handle immediately; not differentiable."""
    return below_autograd.reducescatter(tensor, _name("reducescatter", name, process_set), op, prescale_factor,
                                        postscale_factor, process_set)


def reducescatter(tensor: torch.Tensor, name: str | None = None, compression: type[Compressor] = Compression.none,
                  op: ReduceOp = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0, horovod_gradient: bool = True) -> torch.Tensor:
    """Return this rank's rows of the reduction over all ranks. Differentiable.

    Rows (the first dimension) are divided as evenly as possible; the first ranks get one row more.

    Args:
        tensor: at least 1-D; the same shape and dtype on all ranks.
        compression: dtype on the wire for float32 and float64.
        op: Average (default), Sum, Product, Min or Max; differentiable for Average and Sum.
        horovod_gradient: the gradient is all ranks' upstream gradients put together (times the number of ranks for Sum), as
            in Horovod; False: 1/size of that, the derivative of the sum of all ranks' losses.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    compressed, context = compression.compress(tensor)
    call = ReducescatterCall(_name("reducescatter", name, process_set), process_set, ReduceOp(op), prescale_factor,
                             postscale_factor, horovod_gradient)
    (reduced,) = apply(call, compressed)
    return compression.decompress(reduced, context)


def grouped_reducescatter_async(tensors: Sequence[torch.Tensor], name: str | None = None, op: ReduceOp = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> TorchHandle:
    """Like `grouped_reducescatter`, but return one handle immediately; not differentiable."""
    members = member_names(_name("grouped_reducescatter", name, process_set), len(tensors))
    return below_autograd.join_handles([below_autograd.reducescatter(tensor, member, op, prescale_factor, postscale_factor,
                                                                     process_set)
                                        for tensor, member in zip(tensors, members, strict=True)])


def grouped_reducescatter(tensors: Sequence[torch.Tensor], name: str | None = None,
                          compression: type[Compressor] = Compression.none, op: ReduceOp = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0, horovod_gradient: bool = True) -> list[torch.Tensor]:
    """Like `reducescatter`, of several tensors. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    call = ReducescatterCall(_name("grouped_reducescatter", name, process_set), process_set, ReduceOp(op), prescale_factor,
                             postscale_factor, horovod_gradient, is_grouped=True)
    scattered = apply(call, *(tensor for tensor, _ in pairs))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(scattered, pairs, strict=True)]


def alltoall_async(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `alltoall`, but return a handle immediately; its result is always (tensor, rows received). Not differentiable."""
    return below_autograd.alltoall(tensor, _split_list(splits), _name("alltoall", name, process_set), process_set)


def alltoall(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send rows to each rank and return those received, in rank order. Differentiable.

    Args:
        tensor: at least 1-D; the rows for rank 0 first, then those for rank 1, and so on.
        splits: the number of rows for each rank; rows beyond their sum are not sent. Default: equal parts.

    Returns:
        The tensor; with `splits`, the pair of it and an int32 tensor of the rows received from each rank.

    Raises:
        UnsupportedError: for splits that do not fit, or rows that cannot be divided equally; otherwise like `allreduce`.
        MismatchError: when the ranks' shapes differ after the first dimension.
    """
    call = AlltoallCall(_name("alltoall", name, process_set), process_set, _split_list(splits))
    (received,) = apply(call, tensor)
    return received if splits is None else (received, call.received)


def reduce(tensor: torch.Tensor, root_rank: int, name: str | None = None, op: ReduceOp = Average,
           process_set: ProcessSet = global_process_set) -> torch.Tensor | None:
    """Like `allreduce`, but only rank `root_rank` gets the result; the others get None. Not differentiable.

    Args:
        root_rank: the rank, in the numbering of the job.
    """
    name = _name("reduce", name, process_set)
    source = to_transportable(tensor, name, Collective.REDUCE, op)
    target = torch.empty_like(source) if api.rank() == root_rank else None
    cuda.wait(api.runtime().reduce(name, as_runtime_array(source, name),
                                   None if target is None else as_runtime_array(target, name), root_rank, op,
                                   process_set=api.set_id(process_set)))
    return None if target is None else target.to(tensor.device)


def gather(tensor: torch.Tensor, root_rank: int, name: str | None = None,
           process_set: ProcessSet = global_process_set) -> torch.Tensor | None:
    """Like `allgather`, but only rank `root_rank` gets the result; the others get None. Not differentiable.

    Args:
        root_rank: the rank, in the numbering of the job.
    """
    name = _name("gather", name, process_set)
    source = to_transportable(tensor, name, Collective.GATHER)
    array = cuda.wait(api.runtime().gather(name, as_runtime_array(source, name), root_rank,
                                           process_set=api.set_id(process_set)))
    return None if array is None else as_tensor(array).to(tensor.device)


def scatter(tensor: torch.Tensor, root_rank: int, name: str | None = None,
            process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return this rank's rows of rank `root_rank`'s tensor; all ranks pass one of the same shape and dtype.

    Rows are divided as by `reducescatter`. Not differentiable.

    Args:
        tensor: at least 1-D, of any dtype; its values count on rank `root_rank` only.
        root_rank: the rank, in the numbering of the job.

    Raises:
        UnsupportedError: for a scalar, and for a root that does not exist, or is not in the set; otherwise like `allreduce`.
    """
    name = _name("scatter", name, process_set)
    source = to_transportable(tensor, name, Collective.SCATTER)
    array = cuda.wait(api.runtime().scatter(name, as_runtime_array(source, name), root_rank,
                                            process_set=api.set_id(process_set)))
    return as_tensor(array).to(tensor.device)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `broadcast_`, but return a handle immediately."""
    return apply_in_place(BroadcastCall(_name("broadcast", name, process_set), process_set, root_rank), [tensor])


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `broadcast`, but return a handle immediately; not differentiable."""
    return below_autograd.broadcast(tensor, torch.empty_like(tensor), root_rank, _name("broadcast", name, process_set),
                                    process_set)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Like `broadcast`, in place as by `allreduce_`; returns `tensor`."""
    return apply_in_place(BroadcastCall(_name("broadcast", name, process_set), process_set, root_rank, is_blocking=True),
                          [tensor]).wait()


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set,
              horovod_gradient: bool = True) -> torch.Tensor:
    """Return rank `root_rank`'s tensor; all ranks pass one of the same shape and dtype. Differentiable.

    Args:
        tensor: any dtype and shape, the same on all ranks.
        root_rank: the rank, in the numbering of the job.
        horovod_gradient: the gradient is the *average* over ranks of the upstream gradient on the root and zero elsewhere,
            as in Horovod; False: their sum, which is the derivative of the sum of all ranks' losses.

    Raises:
        UnsupportedError: for a root that does not exist, or is not in the set; otherwise like `allreduce`.
    """
    (result,) = apply(BroadcastCall(_name("broadcast", name, process_set), process_set, root_rank, horovod_gradient), tensor)
    return result


def _split_list(splits: Sequence[int] | torch.Tensor | None) -> list[int] | None:
    return splits.tolist() if isinstance(splits, torch.Tensor) else None if splits is None else list(splits)


leave_module_to_python(vars())
