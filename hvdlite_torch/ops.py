"""Collectives on torch tensors: synchronous, asynchronous, in place, grouped, differentiable.

Names follow Horovod: a tensor called "x" is negotiated as "allreduce.x"; unnamed calls are matched by their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import api
from hvdlite.core.device import AnyArray
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.runtime.handle import Handle, Handles
from hvdlite_torch import cuda
from hvdlite_torch.compression import Compression, Compressor
from hvdlite_torch.framework import as_tensor, contiguous, lent

Average, Sum, Adasum = api.Average, api.Sum, api.Adasum
Min, Max, Product = api.Min, api.Max, api.Product
_name = functools.partial(api.negotiated_name, "torch")


class TorchHandle:
    """A collective on a torch tensor in flight; pass it to `poll` and `synchronize`.

    On a GPU, being done means being launched: the result is there for the stream that is current where `wait` is called.
    """

    __slots__ = ("_finish", "_handle", "_result")

    def __init__(self, handle: Handle | Handles, finish: Callable[[Any], Any]) -> None:
        self._handle = handle
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Return whether `wait` would not block."""
        return self._handle.done()

    def wait(self) -> Any:
        """Wait and return the result tensor; may be called again."""
        array = cuda.wait(self._handle)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish(array)
        return self._result


def poll(handle: TorchHandle) -> bool:
    """Return whether `synchronize(handle)` would not block."""
    return _checked(handle).done()


def synchronize(handle: TorchHandle) -> Any:
    """Wait for an asynchronous call and return its result, or raise its error; may be called again.

    Raises:
        ValueError: for something that is no handle.
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
    """Like `allreduce_`, returning a handle at once."""
    return _allreduce(tensor, tensor, _name("allreduce", name, process_set), api.reduce_op(op, average), prescale_factor,
                      postscale_factor, process_set)


def allreduce_async(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
                    op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `allreduce`, returning a handle at once; not differentiable."""
    return _allreduce(tensor, torch.empty_like(tensor), _name("allreduce", name, process_set), api.reduce_op(op, average),
                      prescale_factor, postscale_factor, process_set)


def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Like `allreduce`, in place and not differentiable; returns `tensor`."""
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: type[Compressor] = Compression.none, op: ReduceOp | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return the reduction of a tensor over all ranks; `tensor` is untouched. Differentiable.

    Args:
        tensor: the same shape and dtype on all ranks; any strides, any dtype but bool (Min and Max only) on the CPU.
        average: deprecated; use `op`.
        name: the same on all ranks.
        compression: dtype on the wire for float32 and float64.
        op: Average (default), Sum, Product, Min, Max or Adasum. The gradient is the same reduction of the upstream gradient.
        prescale_factor: factor on every rank's values before the reduction.
        postscale_factor: factor on the result.

    Raises:
        MismatchError: on all ranks, when they disagree about shape, dtype, op or factors.
        PeerLostError: when a rank died (`PeerFailedError`: raised, `PeerLeftError`: left).
        ValueError: at the call, for an unsupported tensor, or a name that is still being processed.
    """
    compressed, context = compression.compress(tensor)
    name = _name("allreduce", name, process_set)
    operation = api.reduce_op(op, average)
    reduced = _Allreduce.apply(compressed, name, operation, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, context)


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                             op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `grouped_allreduce_`, returning one handle at once."""
    return _grouped_allreduce(tensors, tensors, _name("grouped_allreduce", name, process_set), api.reduce_op(op, average),
                              prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                            op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `grouped_allreduce`, returning one handle at once; not differentiable."""
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    return _grouped_allreduce(tensors, outputs, _name("grouped_allreduce", name, process_set), api.reduce_op(op, average),
                              prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                       op: ReduceOp | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Like `allreduce_` on several tensors, which are fused."""
    return synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor,
                                                process_set))


def grouped_allreduce(tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
                      compression: type[Compressor] = Compression.none, op: ReduceOp | None = None,
                      prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Like `allreduce` on several tensors, which are fused. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    name = _name("grouped_allreduce", name, process_set)
    reduced = _GroupedAllreduce.apply(name, api.reduce_op(op, average), prescale_factor, postscale_factor, process_set,
                                      *(tensor for tensor, _ in pairs))
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: ReduceOp = Average,
                           process_set: ProcessSet = global_process_set) -> Callable[[], torch.Tensor]:
    """Begin to reduce a sparse COO tensor; call what is returned to wait for the result, a sparse tensor.

    Args:
        tensor: the same shape and dtype on all ranks; each brings the elements it has.
        op: Average or Sum.

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
    """Like `allgather`, returning a handle at once; not differentiable."""
    return _gathered(tensor, _name("allgather", name, process_set), process_set)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set,
              horovod_gradient: bool = True) -> torch.Tensor:
    """Return all ranks' tensors concatenated along the first dimension, which may differ between ranks. Differentiable.

    Args:
        horovod_gradient: the gradient is the *average* over ranks of the upstream gradient's rows of this rank, as in
            Horovod; False: their sum, which is the derivative of the sum of all ranks' losses.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    return _Allgather.apply(tensor, _name("allgather", name, process_set), process_set, horovod_gradient)


def grouped_allgather_async(tensors: Sequence[torch.Tensor], name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `grouped_allgather`, returning one handle at once; not differentiable."""
    base = _name("grouped_allgather", name, process_set)
    members = api.member_names(base, len(tensors))
    return _many([_gathered(tensor, member, process_set) for tensor, member in zip(tensors, members, strict=True)])


def grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None = None,
                      process_set: ProcessSet = global_process_set, horovod_gradient: bool = True) -> list[torch.Tensor]:
    """Like `allgather`, of several tensors. Differentiable."""
    base = _name("grouped_allgather", name, process_set)
    return [_Allgather.apply(tensor, member, process_set, horovod_gradient)
            for tensor, member in zip(tensors, api.member_names(base, len(tensors)), strict=True)]


def reducescatter_async(tensor: torch.Tensor, name: str | None = None, op: ReduceOp = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> TorchHandle:
    """Like `reducescatter`, returning a handle at once; not differentiable."""
    return _reducescatter(tensor, _name("reducescatter", name, process_set), op, prescale_factor, postscale_factor,
                          process_set)


def reducescatter(tensor: torch.Tensor, name: str | None = None, compression: type[Compressor] = Compression.none,
                  op: ReduceOp = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0, horovod_gradient: bool = True) -> torch.Tensor:
    """Return this rank's rows of the reduction over all ranks. Differentiable.

    Rows (the first dimension) are cut as evenly as possible; the first ranks get one more.

    Args:
        compression: dtype on the wire for float32 and float64.
        op: Average (default), Sum, Product, Min or Max; differentiable for Average and Sum.
        horovod_gradient: the gradient is all ranks' upstream gradients put together (times the number of ranks for Sum), as
            in Horovod; False: 1/size of that, the derivative of the sum of all ranks' losses.

    Raises:
        UnsupportedError: for a scalar; otherwise like `allreduce`.
    """
    compressed, context = compression.compress(tensor)
    reduced = _Reducescatter.apply(compressed, _name("reducescatter", name, process_set), ReduceOp(op), prescale_factor,
                                   postscale_factor, process_set, horovod_gradient)
    return compression.decompress(reduced, context)


def grouped_reducescatter_async(tensors: Sequence[torch.Tensor], name: str | None = None, op: ReduceOp = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> TorchHandle:
    """Like `grouped_reducescatter`, returning one handle at once; not differentiable."""
    base = _name("grouped_reducescatter", name, process_set)
    return _many([_reducescatter(tensor, member, op, prescale_factor, postscale_factor, process_set)
                  for tensor, member in zip(tensors, api.member_names(base, len(tensors)), strict=True)])


def grouped_reducescatter(tensors: Sequence[torch.Tensor], name: str | None = None,
                          compression: type[Compressor] = Compression.none, op: ReduceOp = Average,
                          process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> list[torch.Tensor]:
    """Like `reducescatter`, of several tensors. Differentiable."""
    base = _name("grouped_reducescatter", name, process_set)
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [compression.decompress(_Reducescatter.apply(tensor, member, ReduceOp(op), prescale_factor, postscale_factor,
                                                        process_set, True), context)
            for (tensor, context), member in zip(pairs, api.member_names(base, len(tensors)), strict=True)]


def alltoall_async(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `alltoall`, returning a handle at once; its result is always (tensor, rows received). Not differentiable."""
    return _alltoall(tensor, _split_list(splits), _name("alltoall", name, process_set), process_set)


def alltoall(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> Any:
    """Send rows to each rank and return those received, in rank order. Differentiable.

    Args:
        tensor: at least 1-D; the rows for rank 0 first, then those for rank 1, and so on.
        splits: how many rows go to each rank; rows beyond their sum stay here. Default: equal shares.

    Returns:
        The tensor; with `splits`, the pair of it and an int32 tensor of the rows received from each rank.

    Raises:
        UnsupportedError: for splits that do not fit, or rows that cannot be shared equally; otherwise like `allreduce`.
        MismatchError: when the ranks' shapes differ after the first dimension.
    """
    received, rows = _Alltoall.apply(tensor, _split_list(splits), _name("alltoall", name, process_set), process_set)
    return received if splits is None else (received, rows)


def reduce(tensor: torch.Tensor, root_rank: int, name: str | None = None, op: ReduceOp = Average,
           process_set: ProcessSet = global_process_set) -> torch.Tensor | None:
    """Like `allreduce`, but only rank `root_rank` gets the result; the others get None. Not differentiable."""
    name = _name("reduce", name, process_set)
    source = _carried(tensor, name, Collective.REDUCE, op)
    target = torch.empty_like(source) if api.rank() == root_rank else None
    cuda.wait(api.runtime().reduce(name, _lent(source, name), None if target is None else _lent(target, name), root_rank, op,
                                   process_set=api.set_id(process_set)))
    return None if target is None else target.to(tensor.device)


def gather(tensor: torch.Tensor, root_rank: int, name: str | None = None,
           process_set: ProcessSet = global_process_set) -> torch.Tensor | None:
    """Like `allgather`, but only rank `root_rank` gets the result; the others get None. Not differentiable."""
    name = _name("gather", name, process_set)
    source = _carried(tensor, name, Collective.GATHER)
    array = cuda.wait(api.runtime().gather(name, _lent(source, name), root_rank, process_set=api.set_id(process_set)))
    return None if array is None else as_tensor(array).to(tensor.device)


def scatter(tensor: torch.Tensor, root_rank: int, name: str | None = None,
            process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Return this rank's rows of rank `root_rank`'s tensor; all ranks pass one of the same shape and dtype.

    Rows are cut as by `reducescatter`. Not differentiable.
    """
    name = _name("scatter", name, process_set)
    source = _carried(tensor, name, Collective.SCATTER)
    array = cuda.wait(api.runtime().scatter(name, _lent(source, name), root_rank, process_set=api.set_id(process_set)))
    return as_tensor(array).to(tensor.device)


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `broadcast_`, returning a handle at once."""
    return _broadcast(tensor, tensor, root_rank, _name("broadcast", name, process_set), process_set)


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> TorchHandle:
    """Like `broadcast`, returning a handle at once; not differentiable."""
    return _broadcast(tensor, torch.empty_like(tensor), root_rank, _name("broadcast", name, process_set), process_set)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Like `broadcast`, in place and not differentiable; returns `tensor`."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set,
              horovod_gradient: bool = True) -> torch.Tensor:
    """Return rank `root_rank`'s tensor; all ranks pass one of the same shape and dtype. Differentiable.

    Args:
        horovod_gradient: the gradient is the *average* over ranks of the upstream gradient on the root and zero elsewhere,
            as in Horovod; False: their sum, which is the derivative of the sum of all ranks' losses.
    """
    return _Broadcast.apply(tensor, root_rank, _name("broadcast", name, process_set), process_set, horovod_gradient)


def send_async(tensor: torch.Tensor, dst: int, name: str | None = None) -> TorchHandle:
    """Like `send`, returning a handle at once; `tensor` must not be written until it is done."""
    name = api.transfer_name("torch", name, api.rank(), dst)
    source = _carried(tensor, name, Collective.SEND)
    return TorchHandle(api.runtime().send(name, _lent(source, name), dst), lambda _: None)


def send(tensor: torch.Tensor, dst: int, name: str | None = None) -> None:
    """Send a tensor to rank `dst`, which calls `recv`; return when it has arrived. Like `hvdlite.send`."""
    synchronize(send_async(tensor, dst, name))


def recv_async(tensor: torch.Tensor, src: int, name: str | None = None) -> TorchHandle:
    """Like `recv`, returning a handle at once; `tensor` must not be used until it is done."""
    name = api.transfer_name("torch", name, src, api.rank())
    target = _carried(_contiguous_like(tensor), name, Collective.SEND)
    return TorchHandle(api.runtime().receive(name, _lent(target, name), src), lambda _: _written(tensor, target))


def recv(tensor: torch.Tensor, src: int, name: str | None = None) -> torch.Tensor:
    """Overwrite `tensor` with what rank `src` sends, of the same shape and dtype; return it. Not differentiable."""
    return synchronize(recv_async(tensor, src, name))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, op: ReduceOp, prescale: float, postscale: float,
                process_set: ProcessSet) -> torch.Tensor:
        ctx.arguments = (f"{name}.gradient", op, prescale, postscale, process_set)
        return _allreduce(tensor, torch.empty_like(tensor), name, op, prescale, postscale, process_set).wait()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        result = _allreduce(upstream, torch.empty_like(upstream), *ctx.arguments).wait()
        return result, None, None, None, None, None


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, op: ReduceOp, prescale: float, postscale: float, process_set: ProcessSet,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.arguments = (f"{name}.gradient", op, prescale, postscale, process_set)
        outputs = [torch.empty_like(tensor) for tensor in tensors]
        return tuple(_grouped_allreduce(tensors, outputs, name, op, prescale, postscale, process_set).wait())

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        outputs = [torch.empty_like(tensor) for tensor in upstream]
        return (None, None, None, None, None, *_grouped_allreduce(upstream, outputs, *ctx.arguments).wait())


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, process_set: ProcessSet, averages: bool) -> torch.Tensor:
        runtime = api.runtime()
        rows = allgather_async(torch.tensor([tensor.shape[0] if tensor.dim() else 0]), f"{name}.rows", process_set)
        result: torch.Tensor = _gathered(tensor, name, process_set).wait()
        before = rows.wait()[:runtime.members(api.set_id(process_set)).index(runtime.world.rank)].sum().item()
        ctx.mine = slice(before, before + (tensor.shape[0] if tensor.dim() else 0))
        ctx.arguments = (f"{name}.gradient", Average if averages else Sum, 1.0, 1.0, process_set)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        combined = _allreduce(upstream, torch.empty_like(upstream), *ctx.arguments).wait()
        return combined[ctx.mine], None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet,
                averages: bool) -> torch.Tensor:
        ctx.is_root = api.runtime().world.rank == root_rank
        ctx.arguments = (f"{name}.gradient", Average if averages else Sum, 1.0, 1.0, process_set)
        return _broadcast(tensor, torch.empty_like(tensor), root_rank, name, process_set).wait()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        combined = _allreduce(upstream, torch.empty_like(upstream), *ctx.arguments).wait()
        return (combined if ctx.is_root else torch.zeros_like(combined)), None, None, None, None


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, op: ReduceOp, prescale: float, postscale: float,
                process_set: ProcessSet, horovod: bool) -> torch.Tensor:
        size = len(api.runtime().members(api.set_id(process_set)))
        ctx.name, ctx.process_set, ctx.op = name, process_set, op
        ctx.factor = prescale * postscale * ((size if horovod else 1) if op is Sum else 1 if horovod else 1 / size)
        return _reducescatter(tensor, name, op, prescale, postscale, process_set).wait()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.op not in (Sum, Average):
            raise UnsupportedError(f"reducescatter with op={ctx.op.name.capitalize()} has no gradient; use Sum or Average")
        whole = _gathered(upstream, f"{ctx.name}.gradient", ctx.process_set).wait()
        return whole * ctx.factor, None, None, None, None, None, None


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: list[int] | None, name: str,
                process_set: ProcessSet) -> tuple[torch.Tensor, torch.Tensor]:
        received, rows = _alltoall(tensor, splits, name, process_set).wait()
        ctx.arguments = (rows.tolist(), f"{name}.gradient", process_set)
        ctx.rows = tensor.shape[0]
        ctx.mark_non_differentiable(rows)
        return received, rows

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, _: torch.Tensor) -> Any:  # type: ignore[override]
        back, _ = _alltoall(upstream, *ctx.arguments).wait()
        kept = back.new_zeros(ctx.rows - back.shape[0], *back.shape[1:])  # rows that were sent to nobody
        return torch.cat([back, kept]), None, None, None


def _allreduce(tensor: torch.Tensor, output: torch.Tensor, name: str, op: ReduceOp, prescale: float, postscale: float,
               process_set: ProcessSet) -> TorchHandle:
    source = _carried(tensor, name, Collective.ALLREDUCE, op)
    target = source if output is tensor else _contiguous_like(output, source)
    array = _lent(source, name)
    handle = api.runtime().allreduce(name, array, array if target is source else _lent(target, name), op,
                                     prescale=prescale, postscale=postscale, process_set=api.set_id(process_set))
    return TorchHandle(handle, lambda _: _written(output, target))


def _grouped_allreduce(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str, op: ReduceOp,
                       prescale: float, postscale: float, process_set: ProcessSet) -> TorchHandle:
    sources = [_carried(tensor, f"{name}[{index}]", Collective.ALLREDUCE, op) for index, tensor in enumerate(tensors)]
    targets = [source if output is tensor else _contiguous_like(output, source)
               for tensor, output, source in zip(tensors, outputs, sources, strict=True)]
    own = [_lent(target, name) for target in targets]
    given = [array if target is source else _lent(source, name)
             for source, target, array in zip(sources, targets, own, strict=True)]
    handle = api.runtime().grouped_allreduce(name, given, own, op, prescale=prescale, postscale=postscale,
                                             process_set=api.set_id(process_set))
    return TorchHandle(handle, lambda _: [_written(output, target) for output, target in zip(outputs, targets, strict=True)])


def _gathered(tensor: torch.Tensor, name: str, process_set: ProcessSet) -> TorchHandle:
    source = _carried(tensor, name, Collective.ALLGATHER)
    handle = api.runtime().allgather(name, _lent(source, name), process_set=api.set_id(process_set))
    return TorchHandle(handle, lambda array: as_tensor(array).to(tensor.device))


def _reducescatter(tensor: torch.Tensor, name: str, op: ReduceOp, prescale: float, postscale: float,
                   process_set: ProcessSet) -> TorchHandle:
    source = _carried(tensor, name, Collective.REDUCESCATTER, op)
    handle = api.runtime().reducescatter(name, _lent(source, name), op, prescale=prescale, postscale=postscale,
                                         process_set=api.set_id(process_set))
    return TorchHandle(handle, lambda array: as_tensor(array).to(tensor.device))


def _alltoall(tensor: torch.Tensor, splits: list[int] | None, name: str, process_set: ProcessSet) -> TorchHandle:
    source = _carried(tensor, name, Collective.ALLTOALL)
    handle = api.runtime().alltoall(name, _lent(source, name), splits, process_set=api.set_id(process_set))
    return TorchHandle(handle, lambda result: (as_tensor(result[0]).to(tensor.device),
                                               torch.from_numpy(result[1].astype("int32"))))


def _split_list(splits: Sequence[int] | torch.Tensor | None) -> list[int] | None:
    return splits.tolist() if isinstance(splits, torch.Tensor) else None if splits is None else list(splits)


def _many(handles: Sequence[TorchHandle]) -> TorchHandle:
    return TorchHandle(Handles([handle._handle for handle in handles]), lambda _: [handle.wait() for handle in handles])


def _broadcast(tensor: torch.Tensor, output: torch.Tensor, root_rank: int, name: str,
               process_set: ProcessSet) -> TorchHandle:
    source = _carried(tensor, name, Collective.BROADCAST)
    target = source if output is tensor else _contiguous_like(output, source).copy_(source)
    return TorchHandle(api.runtime().broadcast(name, _lent(target, name), root_rank, process_set=api.set_id(process_set)),
                       lambda _: _written(output, target))


def _carried(tensor: torch.Tensor, name: str, collective: Collective, op: ReduceOp | None = None) -> torch.Tensor:
    """Return a contiguous tensor where a plane can take it; a copy in host memory when none on the GPU can."""
    dense = contiguous(tensor, name)
    return cuda.carried(dense, api.runtime().devices, collective, op) if cuda.is_on_gpu(dense) else dense


def _lent(tensor: torch.Tensor, name: str) -> AnyArray:
    return lent(tensor, name, api.runtime().devices)


def _contiguous_like(tensor: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
    """Return memory for a result: the tensor's own if it is contiguous, and where `beside` is."""
    detached = tensor.detach()
    if beside is not None and cuda.is_on_gpu(beside) != cuda.is_on_gpu(tensor):
        return cuda.room_beside(beside)
    return detached if detached.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _written(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `output` holding `target`'s values; they share memory unless `output` has unusual strides."""
    if output.data_ptr() != target.data_ptr() or not output.is_contiguous():
        with torch.no_grad():
            output.copy_(target)
    return output
