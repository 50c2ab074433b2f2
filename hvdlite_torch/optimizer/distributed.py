"""The class that `DistributedOptimizer` mixes into the class of the user's optimizer, and `step(closure)`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.arguments import check_passes
from hvdlite.training.gradients.weights import check_weight
from hvdlite_torch.gradients.hooks import Hooks
from hvdlite_torch.gradients.unfinal import set_grad
from hvdlite_torch.optimizer.base import DistributedBase, Stage
from hvdlite_torch.optimizer.reduction import ReductionSettings
from hvdlite_torch.uncompiled import leave_to_python

Closure = Callable[[], Any]


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
            self._settings.names.setdefault(parameter, numbered(group, index))
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
        """Change how many backward passes are accumulated before each reduction.

        Args:
            passes: at least 1.

        Raises:
            ValueError: for less.
        """
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


def numbered(group: int, index: int) -> str:
    """Return the name of a parameter that was given none."""
    return f"noname.{group}.{index}"
