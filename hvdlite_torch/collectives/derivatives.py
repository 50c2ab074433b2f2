"""The derivatives of collectives, for autograd, torch.func and vmap.

Rules
- Most collectives are linear in all ranks' tensors, so their gradient is their adjoint: another collective. Every adjoint is
  itself made of collectives from this file, so derivatives of every order exist.
- A gradient is a collective too: all ranks differentiate together, in the same order. A part of a gradient that is zero on
  some ranks stays in their graphs, because the derivative of that gradient is a collective as well.
- In uneven batches of a scope, a gradient is the adjoint that `gradients.weights` derives.
- Under vmap one collective carries the whole batch. Rows (the first dimension) stay rows.
- Facts that are known only after a collective, such as other ranks' row counts, are kept in the call object; transforms
  of torch.func pass it through unchanged.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.names import member_names
from hvdlite_torch.arrays.tensors import contiguous
from hvdlite_torch.collectives import below_autograd
from hvdlite_torch.collectives.below_autograd import TorchHandle
from hvdlite_torch.gradients.weights import times, transforms_active, weight_of_this_pass
from hvdlite_torch.uncompiled import leave_module_to_python

_F = TypeVar("_F", bound=Callable[..., Any])
Tensors = Sequence[torch.Tensor]
LINEAR = (ReduceOp.SUM, ReduceOp.AVERAGE)
_creation: Callable[[torch.Tensor], Any] = torch._C._autograd._get_creation_meta
_CreationMeta = torch._C._autograd.CreationMeta


@dataclasses.dataclass(eq=False)
class DifferentiableCall:
    """A collective on some tensors, and how it is differentiated.

    Attributes:
        name: as negotiated. Gradients append to it.
        is_grouped: whether it is of a list of tensors, which may have one element.
        is_blocking: whether the caller of `begin` waits for the handle immediately.
        has_rows: whether the first dimension is cut or concatenated.
    """

    name: str
    process_set: ProcessSet
    is_grouped: bool = dataclasses.field(default=False, kw_only=True)
    is_blocking: bool = dataclasses.field(default=False, kw_only=True)
    has_rows = False

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return new tensors; not differentiable."""
        raise NotImplementedError

    def adjoint(self, upstream: Tensors) -> list[torch.Tensor]:
        """Return the gradients of the tensors, given those of the results. Differentiable."""
        raise NotImplementedError

    def again(self, suffix: str) -> Any:
        """Return the same call under another name."""
        return dataclasses.replace(self, name=f"{self.name}.{suffix}")

    def names(self, tensors: Tensors) -> list[str]:
        """Return the names under which tensors that travel one by one are negotiated."""
        return member_names(self.name, len(tensors)) if self.is_grouped else [self.name]


@dataclasses.dataclass(eq=False)
class AllreduceCall(DifferentiableCall):
    """An allreduce. Sums and averages are linear, and their own adjoint; the gradient of others is in `_Selected`."""

    op: ReduceOp
    prescale: float = 1.0
    postscale: float = 1.0

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        self.is_blocking = True
        result = self.begin(tensors, [torch.empty_like(tensor) for tensor in tensors]).wait()
        return result if self.is_grouped else [result]

    def begin(self, tensors: Tensors, outputs: Tensors) -> TorchHandle:
        """Begin to reduce into `outputs`, which may be the tensors; the handle returns a list of them, or the only one."""
        rest = self.name, self.op, self.prescale, self.postscale, self.process_set
        if self.is_grouped:
            return below_autograd.grouped_allreduce(tensors, outputs, *rest)
        return below_autograd.allreduce(tensors[0], outputs[0], *rest, blocking=self.is_blocking)

    def adjoint(self, upstream: Tensors) -> list[torch.Tensor]:
        if self.op not in LINEAR:
            raise UnsupportedError(f"'{self.name}': an allreduce in place with op={self.op.name.capitalize()} has no "
                                   "gradient; use hvd.allreduce, or Sum or Average")
        return apply(self.again("gradient"), *upstream)


@dataclasses.dataclass(eq=False)
class BroadcastCall(DifferentiableCall):
    """A broadcast. Its gradient is the sum or average of all ranks' upstream gradients on the root, and zero elsewhere."""

    root_rank: int
    averages: bool = False

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        self.is_blocking = True
        return [self.begin(tensors, [torch.empty_like(tensors[0])]).wait()]

    def begin(self, tensors: Tensors, outputs: Tensors) -> TorchHandle:
        """Begin to broadcast into the only output, which may be the tensor."""
        return below_autograd.broadcast(tensors[0], outputs[0], self.root_rank, self.name, self.process_set,
                                        blocking=self.is_blocking)

    def adjoint(self, upstream: Tensors) -> list[torch.Tensor]:
        (combined,) = apply(_sum(f"{self.name}.gradient", self.process_set, self.averages), *upstream)
        is_root = api.runtime().world.rank == self.root_rank
        return [combined.where(torch.full((), is_root, device=combined.device), 0)]  # not new zeros: see the rules


@dataclasses.dataclass(eq=False)
class AllgatherCall(DifferentiableCall):
    """An allgather of one tensor or several.

    Its gradient is this rank's rows of the sum of all ranks' upstream gradients, or of their average.
    """

    averages: bool
    has_rows = True

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        handles = [below_autograd.allgather(tensor, name, self.process_set, blocking=not self.is_grouped)
                   for tensor, name in zip(tensors, self.names(tensors), strict=True)]
        results = [handle.wait() for handle in handles]
        mine = _members(self.process_set).index(api.runtime().world.rank)
        self._spans = [(sum(handle.rows[:mine]), handle.rows[mine]) for handle in handles]
        return results

    def adjoint(self, upstream: Tensors) -> list[torch.Tensor]:
        combined = apply(_sum(f"{self.name}.gradient", self.process_set, self.averages, self.is_grouped), *upstream)
        return [tensor.narrow(0, *span) for tensor, span in zip(combined, self._spans, strict=True)]


@dataclasses.dataclass(eq=False)
class ReducescatterCall(DifferentiableCall):
    """A reducescatter of one tensor or several.

    Its gradient is all ranks' upstream gradients put together, times a factor.
    """

    op: ReduceOp
    prescale: float
    postscale: float
    horovod_gradient: bool
    has_rows = True

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        handles = [below_autograd.reducescatter(tensor, name, self.op, self.prescale, self.postscale, self.process_set,
                                                blocking=not self.is_grouped)
                   for tensor, name in zip(tensors, self.names(tensors), strict=True)]
        return [handle.wait() for handle in handles]

    def adjoint(self, upstream: Tensors) -> list[torch.Tensor]:
        if self.op not in LINEAR:
            raise UnsupportedError(f"reducescatter with op={self.op.name.capitalize()} has no gradient; use Sum or Average")
        size = len(_members(self.process_set))
        factor = self.prescale * self.postscale * (size if self.horovod_gradient else 1)
        factor /= size if self.op is ReduceOp.AVERAGE else 1
        whole = apply(AllgatherCall(f"{self.name}.gradient", self.process_set, False, is_grouped=self.is_grouped), *upstream)
        return [tensor * factor for tensor in whole]


@dataclasses.dataclass(eq=False)
class AlltoallCall(DifferentiableCall):
    """An alltoall. Its gradient sends every row's back to where it came from.

    Attributes:
        received: after `run`: the rows that came from each rank.
    """

    splits: list[int] | None
    has_rows = True

    def run(self, tensors: Tensors) -> list[torch.Tensor]:
        (tensor,) = tensors
        handle = below_autograd.alltoall(tensor, self.splits, self.name, self.process_set, blocking=True)
        result, self.received = handle.wait()
        self._rows = tensor.shape[0]
        return [result]

    def adjoint(self, upstream: Tensors) -> list[torch.Tensor]:
        (back,) = apply(AlltoallCall(f"{self.name}.gradient", self.process_set, self.received.tolist()), *upstream)
        kept = back.new_zeros(self._rows - back.shape[0], *back.shape[1:])  # rows that were sent to nobody
        return [torch.cat([back, kept])]


def apply(call: DifferentiableCall, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a collective on tensors. Differentiable."""
    _check(call, tensors)
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not is_recorded and not transforms_active() and forward_ad._current_level < 0:
        return call.run(tensors)  # autograd's function alone takes 10 us
    function = _Selected if isinstance(call, AllreduceCall) and call.op not in LINEAR else _Linear
    return list(function.apply(call, *tensors))


def apply_in_place(call: AllreduceCall | BroadcastCall, tensors: Tensors) -> TorchHandle:
    """Begin a collective that overwrites its tensors; return the handle of `call.begin`.

    A tensor that was computed from others gets the collective's gradient, as with torch's own operations in place. Leaves
    and their views are overwritten without a gradient, as by Horovod and torch.distributed: so parameters can be averaged
    outside of `torch.no_grad()`.

    Raises:
        UnsupportedError: before anything is exchanged: in forward mode, in a transform of torch.func, and where torch
            refuses to overwrite a tensor, such as one of the results of `split` of a computed tensor.
    """
    _check(call, tensors)
    instead = f"use hvd.{'broadcast' if isinstance(call, BroadcastCall) else 'allreduce'}"
    if transforms_active() or forward_ad._current_level >= 0:
        raise UnsupportedError(f"'{call.name}': a collective in place has no derivative in forward mode, nor in transforms "
                               f"of torch.func; {instead}")
    has_history = [torch.is_grad_enabled() and _has_history(tensor) for tensor in tensors]
    for tensor, has in zip(tensors, has_history, strict=True):
        if has and tensor._is_view() and _creation(tensor) != _CreationMeta.DEFAULT:
            raise UnsupportedError(f"'{call.name}': torch refuses to overwrite this view of a computed tensor, which is one "
                                   "of several results (split, unbind) or was made by a custom function; "
                                   f"{instead}, or clone it")
    handle = call.begin(tensors, tensors)
    if not any(has_history):
        return handle

    def finish(result: Any) -> Any:
        _Overwritten.apply(call, *(tensor if has else tensor.detach()
                                   for tensor, has in zip(tensors, has_history, strict=True)))
        return result
    return handle.then(finish)


def pull_back(call: DifferentiableCall, upstream: Tensors) -> list[torch.Tensor]:
    """Return the gradients of a call's tensors in the running backward pass, given those of the results. Differentiable.

    That is the call's adjoint; in an uneven batch of a scope, the adjoint that `gradients.weights` derives.
    """
    weight = weight_of_this_pass(call.name)
    if weight == 1:
        return call.adjoint(upstream)
    wide = [each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in upstream]
    pulled = call.adjoint([times(each, weight) for each in wide])  # 16-bit gradients could overflow
    back = 1 / weight if weight else 0.0  # what comes back is multiplied by the weight later
    return [times(each, back).to(given.dtype) for each, given in zip(pulled, upstream, strict=True)]


def _check(call: DifferentiableCall, tensors: Tensors) -> None:
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            contiguous(tensor, call.name)  # raises


def _has_history(tensor: torch.Tensor) -> bool:
    """Return whether autograd has computed a tensor, or what it is a view of, from others."""
    return not tensor.is_leaf and not (tensor._is_view() and tensor._base is not None and tensor._base.is_leaf)


def _sum(name: str, process_set: ProcessSet, averages: bool = False, is_grouped: bool = False) -> AllreduceCall:
    return AllreduceCall(name, process_set, ReduceOp.AVERAGE if averages else ReduceOp.SUM, is_grouped=is_grouped)


def _members(process_set: ProcessSet) -> tuple[int, ...]:
    return api.runtime().members(api.set_id(process_set))


def with_signature(function: _F) -> _F:
    """Store a function's signature, which `torch.autograd.Function.apply` otherwise computes in each call, in 20 us."""
    function.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return function


class _Collective(torch.autograd.Function):
    """The base of the functions; transforms of torch.func need `setup_context` apart from `forward`."""

    @staticmethod
    @with_signature
    def forward(call: DifferentiableCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(call.run(tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: DifferentiableCall, *given: torch.Tensor) -> Any:  # type: ignore[override]
        """Run one collective on tensors of which some have a batch dimension; return the results and their dimensions."""
        if isinstance(call, AllreduceCall) and call.op is ReduceOp.ADASUM:
            raise UnsupportedError(f"'{call.name}': Adasum weighs whole tensors, and cannot run under vmap; use Sum or "
                                   "Average")
        tensors, dims = list(given), in_dims[1:]
        if call.has_rows:
            for tensor, dim in zip(tensors, dims, strict=True):
                if dim is not None and tensor.dim() == 1:
                    raise UnsupportedError(f"'{call.name}': this collective has rows along the first dimension, and under "
                                           "vmap this tensor is a scalar; pass one of shape (1,)")
            tensors = [tensor if dim is None else tensor.movedim(dim, -1) for tensor, dim in zip(tensors, dims, strict=True)]
            dims = [None if dim is None else tensor.dim() - 1 for tensor, dim in zip(tensors, dims, strict=True)]
        return tuple(apply(call, *tensors)), tuple(dims)


class _Linear(_Collective):
    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return None, *pull_back(ctx.call, upstream)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> Any:  # type: ignore[override]
        return tuple(apply(ctx.call.again("tangent"), *tangents))


class _Selected(_Collective):
    """Allreduces that are not linear. Min and Max share the gradient among ties, as `torch.amax` does."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        call, count = ctx.call, len(upstream)
        tensors, results = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if call.op is ReduceOp.ADASUM:
            raise UnsupportedError(f"'{call.name}': allreduce with op=Adasum has no gradient; use Sum or Average")
        factor = call.prescale * call.postscale
        sum_ = AllreduceCall(call.name, call.process_set, ReduceOp.SUM, postscale=factor, is_grouped=call.is_grouped)
        totals = pull_back(sum_, upstream)
        derivative = _of_product if call.op is ReduceOp.PRODUCT else _of_extreme
        return None, *(total * each for total, each in zip(totals, derivative(call, tensors, results), strict=True))


def _of_product(call: AllreduceCall, tensors: Tensors, results: Tensors) -> list[torch.Tensor]:
    """Return the product of the other ranks' tensors."""
    mine = _members(call.process_set).index(api.runtime().world.rank)
    gathered = apply(AllgatherCall(f"{call.name}.factors", call.process_set, False, is_grouped=True),
                     *(tensor[None] * call.prescale for tensor in tensors))
    return [torch.cat([each[:mine], each[mine + 1:]]).prod(0).conj() for each in gathered]


def _of_extreme(call: AllreduceCall, tensors: Tensors, results: Tensors) -> list[torch.Tensor]:
    """Return 1 where this rank has the extreme, divided by how many ranks have it, and 0 elsewhere."""
    if call.prescale != 1 or call.postscale != 1:
        opposite = {ReduceOp.MIN: ReduceOp.MAX, ReduceOp.MAX: ReduceOp.MIN}
        bare = AllreduceCall(f"{call.name}.extreme", call.process_set, opposite[call.op] if call.prescale < 0 else call.op,
                             is_grouped=call.is_grouped)
        results = apply(bare, *(tensor.detach() for tensor in tensors))
    hits = [(tensor == result).to(tensor.dtype) for tensor, result in zip(tensors, results, strict=True)]
    ties = apply(AllreduceCall(f"{call.name}.ties", call.process_set, ReduceOp.SUM, is_grouped=call.is_grouped), *hits)
    return [hit / tie for hit, tie in zip(hits, ties, strict=True)]


class _Overwritten(torch.autograd.Function):
    """Sets the history of tensors that a collective has overwritten."""

    @staticmethod
    @with_signature
    def forward(call: DifferentiableCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.mark_dirty(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return None, *pull_back(ctx.call, upstream)


leave_module_to_python(vars())
