"""Events of autograd for a reducer: a gradient has been accumulated; the outermost backward pass is over."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.nn.parameter import is_lazy

from hvdlite.core.errors import HvdliteError, UnsupportedError
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.before_step import BeforeStep
from hvdlite.training.gradients.errors import GradientOrderError
from hvdlite.training.gradients.members import IDLE, LOCAL
from hvdlite.training.gradients.reducer import Reducer
from hvdlite.training.gradients.round import Round
from hvdlite_torch.arrays import cuda
from hvdlite_torch.gradients.owners import Owner
from hvdlite_torch.gradients.recorder import Recorder
from hvdlite_torch.gradients.runs import AutogradRun, graph_task, outermost
from hvdlite_torch.gradients.torch_gradients import TorchGradients
from hvdlite_torch.gradients.unfinal import Guard, get_grad, set_grad
from hvdlite_torch.gradients.weights import GradientWeight, times, weigh
from hvdlite_torch.uncompiled import leave_to_python

_passes: weakref.WeakKeyDictionary[Runtime, int] = weakref.WeakKeyDictionary()
"""By runtime, how often a backward pass has ended for one of its optimizers."""


class Hooks(Owner):
    """Hands gradients over as they are accumulated, and waits for the round before `backward()` returns.

    Where the wait is left for later, by choice or because it was deferred, gradients are guarded until the round is over:
    reading one ends it. Hooks do not keep this object alive, and end with it.

    A layer in several reentrant checkpoints, or in one and outside of it too, is accumulated into several times in one
    backward pass. Hence gradients are handed over when the pass ends, until a pass has shown which come only once; those are
    handed over at once from then on, as soon as the end of the outermost run is awaited: a pass that fails is noticed by
    that.

    A parameter's other hooks are called first, whenever they were registered, as under DDP: they see this rank's gradient,
    and what they write to it is reduced.

    Attributes:
        run: the outermost autograd run that computes gradients, while one goes on.
        weight: of a scope's or loop's batches, or of passes; gradients that the script sets itself get it here.
        scale: by what gradients are multiplied before they are handed over.
        on_begin: called before a backward pass hands over its first gradient; returns whether it is to do so.
    """

    def __init__(self, reducer: Reducer[torch.Tensor], before_step: BeforeStep[torch.Tensor]) -> None:
        super().__init__(reducer, before_step, _hook(weakref.ref(self)))
        self.run: AutogradRun | None = None
        self._task = -1  # autograd's number for the last run that was entered, the outermost one or one nested in it
        self._later: dict[int, torch.Tensor] = {}  # to be handed over at the end, by identity
        self._several: set[int] = set()  # those of them that were accumulated into more than once in this pass
        self._once: set[int] = set()  # accumulated into once in a backward pass, by identity
        self._due: set[int] = set()  # those of them that are still to come in this pass; none until it is open
        self._is_open = False  # whether the end of the run is awaited, so that gradients are handed over at once
        self._guard: Guard | None = None  # of gradients that are not final
        # Notes on which stream each gradient was computed, once a parameter has been on a GPU.
        self._note: Callable[[torch.Tensor], None] | None = None
        self._recorder = Recorder(self._hook)
        self._recorded_layout: object = None  # for which parameters are recorded
        self.weight = GradientWeight(reducer.runtime)
        self.scale = 1.0
        self._passes_before = 0  # how many passes there had been when the weight was set
        # By parameter, the gradients that the script has set in a step.
        self._weighed: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        self.on_begin: Callable[[], bool] | None = None

    def watch(self, parameter: torch.Tensor, *, claims: bool = True) -> None:
        """Hand this parameter's gradients over from now on."""
        super().watch(parameter, claims=claims)
        self._recorded_layout = None
        if self.weight.is_pending:  # it comes before the pass
            self.weight.set(self.weight.weight, self._parameters())

    def abandon(self) -> None:
        """The runtime has ended, maybe in the middle of a backward pass: end here too, without waiting for anything."""
        self.reducer.abandon()
        if self.weight.is_pending:  # its hooks stay where a graph still has their nodes
            self.weight.set(None, ())
        self._leave_run()
        self._unguard()
        self._resting = []
        self.unwatch()

    def finish_if_due(self, *, in_step: bool = False) -> None:
        """Like the reducer's."""
        self.wake()
        if self.elsewhere:
            self.take_back()
        try:
            self._hand_over_recorded(all_of_them=True)
            for parameter in itertools.islice(self._own.values(), 1):
                self._notice_move(parameter)
            self.weight.check()
            self._renew_unit()
            self.reducer.admit()  # a parameter that has thawed: it, too, has a weight
            if self._weigh_own() or self.weight.is_pending:
                self.weight.count_pass()  # the weight also counts where the pass has reached no parameter, or there was none
            self.before_step.make_final(in_step=in_step)
        finally:
            self._unguard()

    def set_weight(self, weight: float) -> None:
        """Let the next backward pass have a weight, see `DistributedOptimizer.set_weight`.

        Raises:
            GradientOrderError: Like `Reducer.weigh`.
            UnsupportedError: while parameters have no shape yet.
        """
        parameters = self._parameters()
        if any(map(is_lazy, parameters)):
            raise UnsupportedError(f"rank {self.reducer.rank}: set_weight was called before lazy parameters have got their "
                                   "shapes; call the model once before, on all ranks")
        weights, current = self.reducer.weigh(), self.reducer.round
        if current is not None and current.is_closed and not weights.has_unit:
            self.finish()  # the unit is different then, and what the next pass computes is not of this round
        self._renew_unit()
        if self.weight.passes is None:
            self.weight = GradientWeight(self.reducer.runtime, weights)
        if self.reducer.passes.is_suspended or self.reducer.passes.per_round > 1:
            self.count_unreached()
        self._passes_before = _passes.get(self.reducer.runtime, 0)
        self.weight.set(weight, parameters)

    def count_unreached(self) -> None:
        """Passes accumulate: where there was one since the weight was set, but it has not come here, it counts."""
        if self.weight.is_pending and self._passes_before != _passes.get(self.reducer.runtime, 0):
            self.weight.count_pass()

    def _parameters(self) -> list[torch.Tensor]:
        return [member.parameter for members in (self.reducer.members.by_key, self.reducer.members.waiting)
                for member in members.values()]

    def _renew_unit(self) -> None:
        """If all ranks have joined, their unit is found anew: let what has accumulated have the new one."""
        if self.reducer.round is None and (factor := self.reducer.set.weights.renew()) != 1.0:
            accumulated = {id(gradient): gradient for member in self.reducer.members
                           if (gradient := get_grad(member.parameter)) is not None
                           and (member.state is LOCAL or (member.state is IDLE and
                                                          self._weighed.get(id(member.parameter)) is gradient))}
            for gradient in accumulated.values():
                weigh(gradient, factor)

    def cleared(self) -> None:
        """Like the reducer's."""
        try:
            self._hand_over_recorded(all_of_them=True)
            self.before_step.cleared()
        finally:
            self._weighed.clear()
            self._unguard()
            self._forget_pass()
            self.claim()

    def stepped(self) -> None:
        """Like the reducer's."""
        self.has_stepped = True
        if self.weight.is_pending:  # it was for a pass before the step
            self.weight.set(None, ())
        self.before_step.stepped()
        self._weighed.clear()
        self._unguard()
        self._forget_pass()
        self.claim()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self.elsewhere and self.reducer.members.is_elsewhere(parameter):
            return
        if self._note is not None and cuda.is_on_gpu(parameter):
            self._note(parameter)
        task = graph_task()
        if task != self._task and not self._enter(task, parameter):
            return
        key = id(parameter)
        if self._recorder.is_recording and key in self._recorder.small:
            self._recorder.parameters.append(parameter)
            if key in self._recorder.ending:
                self._hand_over_recorded()
        elif key not in self._due:
            self._postpone(parameter, key)
        else:
            self._due.discard(key)
            self.hand_over(parameter)

    def _record(self) -> None:
        """From here to the end of the backward pass, only record small gradients of learned buckets."""
        layout = self.reducer.layout.together
        if (not layout or self.elsewhere or self.scale != 1.0
                or self._note is not None or torch.cuda.is_initialized()):
            return  # gradients on GPUs come from other threads, and count from the moment they are accumulated
        if layout is not self._recorded_layout:
            self._recorded_layout = layout
            self._recorder.record_only(
                frozenset().union(*(bucket.small_keys for bucket in layout)),
                [id(bucket.small[-1].parameter) for bucket in layout if bucket.small], self._hooks)
        self._recorder.start()

    def _hand_over_recorded(self, *, all_of_them: bool = False) -> None:
        """Hand over the recorded gradients of buckets of which all small ones are recorded, or all that are recorded.

        Raises:
            GradientOrderError: Like `_postpone`, and like the reducer.
        """
        if not self._recorder.parameters:
            return
        parameters = self._recorder.take()
        keys = set(map(id, parameters))
        if len(keys) == len(parameters) and keys <= self._due and not self.elsewhere:
            taken = self.reducer.accumulated_small(keys)
            self._due -= taken
            parameters = [] if len(taken) == len(keys) else [
                parameter for parameter in parameters if id(parameter) not in taken]
        if not all_of_them:
            self._recorder.parameters[:0] = parameters
            return
        for parameter in parameters:
            key = id(parameter)
            if self.elsewhere and self.reducer.members.is_elsewhere(parameter):
                continue
            if key in self._due:
                self._due.discard(key)
                self.hand_over(parameter)
            else:
                self._postpone(parameter, key)

    def _enter(self, task: int, parameter: torch.Tensor) -> bool:
        """Enter an autograd run, by a gradient; return whether that is to be handed over now."""
        self._notice_move(parameter)
        run = outermost(task, self.run)
        if run is not self.run:
            if self.run is not None:
                self.run.fail()  # an earlier one, which never came to its end
            if self.on_begin is not None and not self.on_begin():
                return False
            run.add(self)
        self._task = task
        if self._comes_early(parameter):
            self._postpone(parameter, id(parameter))
            return False
        return True

    def _postpone(self, parameter: torch.Tensor, key: int) -> None:
        """Hand a gradient over when the backward pass is over.

        Raises:
            GradientOrderError: when it was handed over in this pass.
        """
        if self._is_open and key in self._once and key not in self._later and key not in self._due:
            self._once.clear()
            raise GradientOrderError(
                f"a parameter of shape {list(parameter.shape)} is in several torch.utils.checkpoint(..., "
                "use_reentrant=True) of one backward pass, or in one and outside of it, and was used once only before: its "
                "gradient was handed over when the first part was computed. Use use_reentrant=False, or clear gradients "
                "and repeat the step")
        if key in self._later:
            self._several.add(key)
        self._later[key] = parameter
        self._due.discard(key)

    def _notice_move(self, parameter: torch.Tensor) -> None:
        """If the model is on a GPU, maybe since the optimizer was made, let gradients be reduced there from now on."""
        if self._note is None and cuda.is_on_gpu(parameter):
            framework = self.reducer.framework
            if isinstance(framework, TorchGradients) and framework.use_plane():
                self._note = framework.note
                self._note(parameter)

    def run_is_awaited(self) -> None:
        """Its end will be reported: from here on, hand over what is accumulated into once, also what was left for this."""
        self._record()
        self._due = self._once.difference(self._later)
        self._is_open = True
        for key in [key for key in self._later if key in self._once and key not in self._several]:
            self.hand_over(self._later.pop(key))

    def _leave_run(self) -> None:
        self.run, self._task, self._is_open = None, -1, False
        self._forget_pass()

    def _forget_pass(self) -> None:
        self._recorder.stop()
        self._later.clear()
        self._several.clear()
        self._due = self._once.copy() if self._is_open else set()

    def hand_over(self, parameter: torch.Tensor) -> None:
        """Hand a gradient over now."""
        if self.scale != 1.0 and (gradient := get_grad(parameter)) is not None:
            weigh(gradient, self.scale)
        self.reducer.accumulated(parameter)

    def _weigh_own(self) -> bool:
        """Weigh gradients that the script has set; return whether there are any that have a weight."""
        weight = self.weight.factor
        if weight == 1.0 and self.weight.passes is None:
            return False
        own = [member.parameter for member in self.before_step.unseen()
               if self._weighed.get(id(member.parameter)) is not get_grad(member.parameter)]
        weighed = set(map(id, self._weighed.values()))  # one may be the gradient of several parameters
        for parameter in own:
            gradient = get_grad(parameter)
            assert gradient is not None
            if id(gradient) in weighed:
                gradient = gradient.clone()
                set_grad(parameter, gradient)
            elif gradient.layout is torch.strided and 0 in gradient.stride():  # expanded
                gradient = times(gradient, weight)
                set_grad(parameter, gradient)
            else:
                weigh(gradient, weight)
                weighed.add(id(gradient))
            self._weighed[id(parameter)] = gradient
        return bool(own)

    def end_pass(self) -> bool:
        """The outermost backward pass is over: hand over what was left for then; return whether to wait for results now."""
        self._hand_over_recorded(all_of_them=True)
        later = list(self._later.values())
        self._once.update(self._later)
        self._once -= self._several
        self._leave_run()
        for parameter in later:
            self.hand_over(parameter)
        self._weigh_own()
        self.weight.count_pass()
        _passes[self.reducer.runtime] = _passes.get(self.reducer.runtime, 0) + 1
        waits = self.reducer.end_pass()
        if not waits:
            self.guard()
        return waits

    def wait(self) -> None:
        """Wait for the results of the rounds that the pass has closed."""
        with torch.profiler.record_function("hvdlite.wait_for_gradients"):
            self.reducer.wait_and_make_due(deferrable=True)
        self.guard()

    def fail_pass(self) -> None:
        """A backward pass did not come to its end: guard what it has handed over."""
        with suppress(HvdliteError):  # the pass has failed anyway
            self._hand_over_recorded(all_of_them=True)
        self._leave_run()
        self.reducer.fail_pass()
        self.guard()

    def guard(self) -> None:
        """While a round is under way: let whatever reads a gradient end that round first."""
        current = self.reducer.round
        if current is None:
            return
        owner, reducer, members = weakref.ref(self), self.reducer, self.reducer.members

        def finish() -> None:
            hooks = owner()
            if hooks is not None:  # else the optimizer is gone
                hooks._hand_over_recorded(all_of_them=True)
                if graph_task() != -1:  # a hook of the user's reads it, in a backward pass that goes on
                    reducer.notice_trailing(current)
                hooks.finish(current)
            guard.lift()
        guard = self._guard = Guard(itertools.filterfalse(members.is_elsewhere, members.parameters()), finish)

    def finish(self, only: Round[torch.Tensor] | None = None) -> None:
        """End the round that is under way, if there is one; gradients are final then.

        Args:
            only: the round that is to be ended; nothing is done when it is over.
        """
        with torch.profiler.record_function("hvdlite.wait_for_gradients"):
            try:
                self.reducer.finish(only)
            finally:
                self._unguard()

    def _unguard(self) -> None:
        guard = self._guard
        if guard is not None and self.reducer.round is None:
            guard.lift()
            self._guard = None


def _hook(owner: weakref.ref[Hooks]) -> Callable[[torch.Tensor], None]:
    """Return a hook that does not keep its owner alive: torch does not let Python see the cycle that would make."""
    def accumulated(parameter: torch.Tensor) -> None:
        hooks = owner()
        if hooks is not None:
            hooks._accumulated(parameter)
    return leave_to_python(accumulated)
