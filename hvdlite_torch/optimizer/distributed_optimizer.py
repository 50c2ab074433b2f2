"""`DistributedOptimizer`, the class that it mixes into the class of the user's optimizer, and `step(closure)`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.arguments import (
    WRAPPED,
    check_compression,
    check_passes,
    chosen_groups,
    factors,
    group_ids,
    shown_without_internal,
)
from hvdlite.training.gradients.weights import check_weight
from hvdlite.training.outer.settings import DiLoCo
from hvdlite_torch.comm_hooks.exchange import CommHook, check_hook
from hvdlite_torch.compression import Compression, Compressor
from hvdlite_torch.gradients.hooks import Hooks
from hvdlite_torch.gradients.unfinal import set_grad
from hvdlite_torch.mistakes import warn_of_ddp
from hvdlite_torch.optimizer.adasum import DistributedAdasum, check_whole_job
from hvdlite_torch.optimizer.base import DistributedBase, Stage, is_distributed
from hvdlite_torch.optimizer.reduction import ReductionSettings, chosen_wait
from hvdlite_torch.uncompiled import leave_to_python

Closure = Callable[[], Any]


@shown_without_internal
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    comm_hook: CommHook | None = None,
    wait_in: str | None = None,
    sharded: bool = False,
    outer: DiLoCo | None = None,
    _runtime: Runtime | None = None,
    _label: str | None = None,
    _kind: type[Distributed] | None = None,
) -> WrappedOptimizer:
    """Make `optimizer` average its gradients over all ranks; returns the same object.

    Each gradient is handed over by a hook as soon as it is accumulated, so communication overlaps `backward()`. When the
    (outermost) `backward()` returns, gradients are final: you can clip, unscale and read them. With
    `wait_in="step"` they are final in `step()`, after `synchronize()`, or when one is read from Python, whichever comes
    first. A parameter without a gradient on some ranks counts as zeros there; without one on all ranks it keeps None. A
    parameter that is frozen when the optimizer is wrapped is reduced from the step in which it is trainable on all ranks.
    The optimizer keeps its class name, `isinstance`, state, defaults, hooks and schedulers. Copies and pickles are plain.

    Several `backward()` calls before a step work when all ranks make the same number of them, over the same parameters:
    each one is reduced, and gradients add up. It is cheaper to sum the losses, to use `backward_passes_per_step`, or
    `optimizer.no_sync()` for all but the last. For other ops than Average, and
    with communication hooks that are not exact, one of these is needed: a second pass onto reduced gradients is an error.

    Gradients that a script sets itself (`p.grad = ...`, by `torch.autograd.grad` or torch.func, of float32 copies) are
    reduced in `step()` or `synchronize()`, on all ranks. So are those with which it replaces reduced ones; what it changes
    in place after the reduction (clipping) stays as it is.

    `step(closure)`: gradients are final when the closure returns, also on a rank whose closure had no `backward()`. For
    `torch.optim.LBFGS`, which decides by the losses how often it calls the closure, losses are reduced like gradients. For
    other optimizers that do, return `hvd.allreduce(loss)` from the closure.

    Args:
        named_parameters: names for messages and matching; `model.named_parameters()`. Default: numbered.
        compression: `Compression.none`, `.fp16` or `.bf16`: dtype on the wire for float32 and float64 gradients.
        backward_passes_per_step: gradients accumulated (summed) locally before each reduction.
        op: Average, Sum, Product, Min, Max or Adasum (of the changes of the ranks' steps, see `optimizer.adasum`).
        gradient_predivide_factor: for Average: divide by this before the sum and by size/this after it, against overflow.
        num_groups: deprecated; use `groups`.
        groups: gradients that are reduced together: a number of groups, or a list of lists of parameters.
        sparse_as_dense: densify sparse gradients, instead of gathering their rows. Gathered ones are gathered again when
            backward passes accumulate.
        process_set: the ranks that share gradients; on other ranks the optimizer trains alone.
        comm_hook: a communication hook, see `comm_hooks`; with op=Average and no other argument that changes what
            travels.
        wait_in: "backward" or "step", Horovod's contract: where ranks wait for the reduced gradients, the same on all ranks:
            they make different numbers of reductions where passes compute different gradients. Default: the knob
            `HVDLITE_WAIT_IN`, "backward" (`hvdrun --horovod-compat` and `hvdlite.horovod_compat` make it "step").
        sharded: whether each rank has the optimizer state of some parameters only, which it updates for all ranks.
        outer: `hvd.DiLoCo(...)` or `hvd.LocalSGD(...)`: gradients are averaged among the ranks of a host only, and hosts
            exchange changes of the parameters every few steps (docs/slow-links.md).

    Raises:
        ValueError: for invalid arguments, and an optimizer that is wrapped already; parameters without a name or with the
            same name are listed.
        UnsupportedError: for an unregistered process set, and parameters that are `DTensor`s.
        NotImplementedError: for Adasum on some of the ranks.
        NotInitializedError: before `init()`.
    """
    runtime = _runtime if _runtime is not None else api.attached_runtime()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if is_distributed(optimizer):
        raise ValueError(WRAPPED)
    op = ReduceOp(op)
    groups = chosen_groups(groups, num_groups)
    check_passes(backward_passes_per_step)
    check_compression(compression)
    prescale, postscale = factors(op, gradient_predivide_factor)
    names = _names(optimizer, named_parameters)
    _check_not_sharded(names)
    ids = group_ids(groups, list(names))
    if comm_hook is not None and (op is not ReduceOp.AVERAGE or compression is not Compression.none or groups is not None
                                  or gradient_predivide_factor != 1.0):
        raise ValueError("comm_hook decides itself how gradients are averaged: leave op, compression, groups and "
                         "gradient_predivide_factor at their defaults")
    if comm_hook is not None:
        check_hook(comm_hook)
    waiting = chosen_wait(wait_in)
    warn_of_ddp(names)
    if runtime is not None:
        api.set_id(process_set)  # raises before anything is changed
    kind: type[DistributedBase] = _kind or Distributed
    if sharded:
        from hvdlite_torch.optimizer.sharded import Sharded, check_sharded  # it extends `Distributed`
        check_sharded(optimizer, op)
        kind = Sharded
    if outer is not None:
        from hvdlite_torch.optimizer.outer import WithOuter, check_outer  # it extends `Distributed`
        check_outer(outer, optimizer, op, process_set, has_hook=comm_hook is not None, is_sharded=sharded)
        kind = WithOuter
    if op is ReduceOp.ADASUM:
        kind = DistributedAdasum
        if runtime is not None and runtime.world.size > 1:
            check_whole_job(process_set)
    base, made = type(optimizer), cast(DistributedBase, optimizer)
    unseen_sparse_dims = int(isinstance(optimizer, torch.optim.SparseAdam))  # it takes no dense gradients
    made.__class__ = type(base.__name__, (kind, base), {"__module__": base.__module__})
    made._prepare(ReductionSettings(
        names, ids, op, prescale, postscale, compression, backward_passes_per_step, sparse_as_dense, process_set,
        waiting, comm_hook, unseen_sparse_dims, outer))
    if runtime is not None:
        made._attach(runtime, _label)
    if _runtime is None:
        api.follow(made)
    return cast("WrappedOptimizer", optimizer)


class Distributed(DistributedBase):
    """Mixed into the user's optimizer class. Only translates between torch's events and the reducer."""

    _hooks: Hooks  # of this world
    _sources: list[Hooks]  # that reduce this optimizer's gradients: the own ones first; none while it trains alone
    _loss_reduction: tuple[str, ReduceOp] | None = None  # name and op, where losses steer the optimizer

    def _prepare(self, settings: ReductionSettings) -> None:
        super()._prepare(settings)
        self._synchronizes = True
        self._sources = []

    def _attach(self, runtime: Runtime, label: str | None = None) -> None:
        settings = self._settings
        self._process_set = api.set_id(settings.process_set)
        label = runtime.names.label("torch", self._process_set) if label is None else label
        self.gradient_label, self._check_name = label, f"{label}.check"
        self._hooks = settings.make_hooks(runtime, label)
        self._runtime, self._active, self._sources = runtime, False, []
        self._loss_reduction = (f"{label}.loss", settings.op) if isinstance(self, torch.optim.LBFGS) else None
        self._steps = 0
        if self._hooks.reducer.is_shared:
            self._activate()
        self._hooks.retire_others()

    def _detach(self) -> None:
        self._hooks.abandon()
        self._settings.detach()
        del self._hooks
        self._sources, self._loss_reduction = [], None

    def _watch(self, parameter: torch.Tensor) -> None:
        if self._active:
            self._hooks.reducer.add(parameter, self._settings.names[parameter],
                                    self._settings.group_ids.get(id(parameter), 0))
            self._hooks.watch(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the base class's; the new parameters are reduced too. Call it on all ranks."""
        super().add_param_group(param_group)  # type: ignore[misc]
        group = len(self.param_groups) - 1
        for index, parameter in enumerate(self.param_groups[-1]["params"]):
            self._settings.names.setdefault(parameter, _number(group, index))
            self._watch(parameter)

    @leave_to_python
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Like the base class's, whose arguments it takes; reductions under way are completed first."""
        self._clear()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        if self._active and not (args[0] if args else kwargs.get("set_to_none", True)):
            self._hooks.before_step.zeroed()

    @leave_to_python
    def synchronize(self) -> None:
        """Make gradients final now. Only needed where `backward()` does not already (see `DistributedOptimizer`)."""
        self._take_part()
        self._make_final(in_step=False)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` inside take the gradients as they are, after a call of `synchronize()`."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the first backward pass after it reduces the sums."""
        self._take_part()
        with ExitStack() as stack:
            for hooks in self._sources:
                stack.enter_context(hooks.reducer.suspended())
            yield
        for hooks in self._sources:
            hooks.count_unreached()

    @leave_to_python
    def set_weight(self, weight: float) -> None:
        """Weight this rank's gradients of the next backward pass by what its loss is a mean over: samples, or tokens.

        The average over ranks is then sum(n g) / sum(n), and k sum(n g) / sum(n) over all ranks and passes where k backward
        passes accumulate (`backward_passes_per_step`, `no_sync`). So equal weights change nothing. All ranks call this
        before every backward pass that reaches one of the parameters (and before `torch.autograd.grad`, where the script
        sets gradients itself), and in a step without one, with 0. Gradients with weight 0 count as zeros, whatever they are.
        Where the weights of all ranks are 0, the step changes nothing. A second backward pass onto reduced gradients is an
        error, as with op=Sum.

        Args:
            weight: a finite number, at least 0.

        Raises:
            ValueError: for anything else.
            UnsupportedError: with another op than Average, with a communication hook, for parameters that another optimizer
                reduces, on a rank that is not in the optimizer's process set, and in loops that weigh ranks themselves.
            GradientOrderError: when gradients without a weight have accumulated since the last step.
            MismatchError: by `backward()` or `step()`, on all ranks, when some ranks make a pass without a weight.
        """
        self._take_part()
        value, reason = check_weight(weight, self._runtime.world.rank), self._why_unweighted()
        if reason:
            raise UnsupportedError(f"rank {self._runtime.world.rank}: set_weight {reason}")
        if not self._active:
            self._activate()
        self._hooks.set_weight(value)

    def _why_unweighted(self) -> str:
        """Return why passes cannot have weights; nothing where they can."""
        op, members = self._settings.op, self._hooks.reducer.members
        if op is not ReduceOp.AVERAGE:
            return f"weights averages: it needs op=Average, not {op.name.capitalize()}"
        if self._settings.comm_hook is not None:
            return "cannot be used with comm_hook, which decides itself how gradients are averaged"
        if self._hooks.weight.weight is not None and self._hooks.weight.passes is None:
            return "cannot be used in state.loop, which weighs ranks by their rows: let the loss be a mean over the rows"
        if any(map(members.is_elsewhere, members.parameters())):
            return "cannot be used for an optimizer of whose parameters another one reduces the gradients"
        if self._runtime.world.rank not in self._runtime.members(self._process_set):
            return "is for the ranks of the optimizer's process set, and this rank trains alone"
        return ""

    def _activate(self) -> None:
        """Reduce gradients, also where no other rank takes part: passes have weights."""
        self._active, self._sources = True, [self._hooks]
        for parameter in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
            self._watch(parameter)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated before each reduction."""
        check_passes(passes)
        self._settings.passes = passes
        if self._is_attached:
            self._hooks.reducer.passes.per_round = passes
            self._hooks.before_step.cleared()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like the base class's; reductions under way are completed and counts start anew."""
        self._clear()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _clear(self) -> None:
        for hooks in self._sources:
            hooks.cleared()

    def _make_final(self, *, in_step: bool) -> None:
        """Make gradients final.

        Args:
            in_step: whether the script cannot change them before they are used.
        """
        for hooks in self._sources:
            hooks.finish_if_due(in_step=in_step)

    def _reduce_loss(self, loss: Any) -> Any:
        """Return the reduction of all ranks' losses, like that of their gradients, where it steers the optimizer."""
        if self._loss_reduction is None or not self._active:
            return loss
        name, op = self._loss_reduction
        value = np.array((loss.item() if isinstance(loss, torch.Tensor) else float(loss)) * self._hooks.weight.value)
        share = self._hooks.reducer.set.weights.share
        value = np.array(value * share if share else 0.0)  # a loss over nothing may be NaN
        self._runtime.allreduce(name, value, value, op, process_set=self._process_set, blocking=True).wait()
        return torch.full_like(loss, float(value), requires_grad=False) if isinstance(loss, torch.Tensor) else float(value)

    # --- stages of a step ----------------------------------------------------------------------------------------------

    def _finish_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        is_final = not self._synchronizes or not callable(closure)
        if is_final and self._synchronizes:
            self._make_final(in_step=True)
        if is_final:
            self._skip_weightless()
        if is_final or not type(self).__module__.startswith("torch.optim"):  # those call the closure first
            api.worlds().step_begins()
        if is_final:
            return None
        final = _final_closure(closure, self)
        return ((args[0], final, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": final})

    def _skip_weightless(self) -> None:
        """Where all ranks have weight 0, let the step find no gradients, so that it changes nothing."""
        if self._hooks.reducer.set.weights.is_zero:
            for parameter in itertools.chain.from_iterable(group["params"] for group in self.param_groups):
                set_grad(parameter, None)

    def _end_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for hooks in self._sources:
            self._counted.have_gradients |= hooks.reducer.has_reduced
            hooks.stepped()

    _stages_before: tuple[Stage, ...] = (DistributedBase._take_part, DistributedBase._compare_once, _finish_gradients)
    _stages_after: tuple[Stage, ...] = (_end_step, DistributedBase._check_replicas)


class WrappedOptimizer(Distributed, torch.optim.Optimizer, Any if TYPE_CHECKING else object):  # type: ignore[misc]
    """For type checkers: the class of wrapped optimizers, which also is that of the user's (`Any`)."""


def _final_closure(closure: Closure, optimizer: Distributed) -> Closure:
    """Return a closure for one step, after which the gradients that it computed are final.

    A rank whose closure has no `backward()` takes part in the others' reduction. An optimizer may call the closure several
    times in a step; each call computes gradients anew, or accumulates onto those of the call before.
    """
    calls = itertools.count()

    def final() -> Any:
        with ExitStack() as stack:
            if next(calls):  # before the first one the script may have computed gradients
                for hooks in optimizer._sources:
                    stack.enter_context(hooks.before_step.later_call())
            loss = closure()
            optimizer._make_final(in_step=True)
        optimizer._skip_weightless()
        loss = optimizer._reduce_loss(loss)
        api.worlds().step_begins()
        return loss
    return leave_to_python(final)


def _check_not_sharded(names: Mapping[torch.Tensor, str]) -> None:
    """Raise `UnsupportedError` for a `DTensor`; whoever has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    for parameter, name in names.items() if module is not None else ():
        if isinstance(parameter, module.DTensor):
            raise UnsupportedError(
                f"parameter '{name}' is a DTensor (of FSDP2 or tensor parallel), {parameter.placements} over "
                f"{parameter.device_mesh}: torch reduces its gradients itself. Leave the optimizer as it is, name the "
                "backend in torch.distributed.init_process_group('hvdlite'), and give the mesh a dimension for the data")


def _number(group: int, index: int) -> str:
    return f"noname.{group}.{index}"


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None) -> dict[torch.Tensor, str]:
    """Return a unique name for every parameter of the optimizer."""
    parameters = {parameter: _number(group_index, index) for group_index, group in enumerate(optimizer.param_groups)
                  for index, parameter in enumerate(group["params"])}
    if named is None:
        return parameters
    pairs = list(named) if isinstance(named, Iterable) else [named]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters must be (name, parameter) pairs, such as model.named_parameters()")
    seen: set[str] = set()
    twice = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise ValueError(f"parameter names must be unique; these occur more than once: {', '.join(twice)}")
    given = {parameter: name for name, parameter in pairs}
    unnamed = [f"group {number}" for parameter, number in parameters.items() if parameter not in given]
    if unnamed:
        raise ValueError(f"{len(unnamed)} of the optimizer's parameters have no name in named_parameters (group.index): "
                         f"{', '.join(name.removeprefix('group noname.') for name in unnamed[:10])}; pass "
                         "model.named_parameters() of the very model whose parameters the optimizer has, or leave it out")
    return {parameter: given[parameter] for parameter in parameters}
