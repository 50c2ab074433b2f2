"""Events of autograd for a reducer: a gradient has been accumulated; the outermost backward pass is over."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.core.errors import UnsupportedError
from hvdlite.training.framework import Framework
from hvdlite.training.gradient_reducer import GradientReducer
from hvdlite.training.order_errors import GradientOrderError
from hvdlite_torch import cuda, unfinal
from hvdlite_torch.framework import is_elsewhere
from hvdlite_torch.shared_parameters import SharedParameters, come_last
from hvdlite_torch.unfinal import get_grad, set_grad

_graph_task = torch._C._current_graph_task_id
_NODES = {getattr(torch.autograd.function.BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed")
          if hasattr(torch.autograd.function.BackwardCFunction, name)}
"""Of the functions that carry out nodes which are defined in Python, such as reentrant checkpoints."""


class _Run:
    """An outermost autograd run, on whichever threads autograd carries it out.

    Attributes:
        hooks: that hand gradients over in it and have not waited yet.
    """

    def __init__(self) -> None:
        self.hooks: weakref.WeakSet[BackwardHooks] = weakref.WeakSet()

    def guard(self) -> None:
        """Autograd calls nobody else: guard what every optimizer has not waited for."""
        for hooks in list(self.hooks):
            hooks._guard()
        self.hooks.clear()


_runs: weakref.WeakValueDictionary[int, _Run] = weakref.WeakValueDictionary()
"""The runs that go on, by autograd's number for them, which no other run of the process gets."""


class _End:
    """The callback at the end of an autograd run. If the run fails, autograd deletes it without calling it."""

    def __init__(self, hooks: BackwardHooks, task: int) -> None:
        self._hooks, self._task, self._is_reached = hooks, task, False
        self.run = _runs.setdefault(task, _Run())
        self.run.hooks.add(hooks)

    def __call__(self) -> None:
        self._is_reached = True
        self._hooks._end_backward(self.run)

    def __del__(self) -> None:
        if not self._is_reached:
            self._hooks._failed(self._task)


class BackwardHooks(SharedParameters):
    """Hands gradients over as they are accumulated, and waits for the round before `backward()` returns.

    Where the wait is left for later, by choice or because it was deferred, gradients are guarded until the round is over:
    reading one ends it. Hooks do not keep this object alive, and end with it.

    `torch.utils.checkpoint(..., use_reentrant=True)` nests an autograd run in the outer one, and nothing tells the nested
    run when the outer one ends. So when a gradient comes from a nested run, the nodes that follow the checkpoint in the
    outer run get a hook, which asks to be told of its end. A layer in several such checkpoints, or in one and outside of it
    too, is accumulated into several times in one backward pass. Hence gradients are handed over when the outer pass ends,
    until a pass has shown which come only once; those are handed over at once from then on, as soon as the end of the outer
    run is awaited: a pass that fails is noticed by that.

    A parameter's other hooks are called first, whenever they were registered, as under DDP: they see this rank's gradient,
    and what they write to it is reduced.

    Attributes:
        weight: by what gradients are multiplied before they are handed over.
        own_weight: by what gradients are multiplied that the script has set itself.
        on_moved: returns what handles gradients on GPUs and on the host; called when a parameter is on a GPU for the first
            time.
        on_begin: called before a backward pass hands over its first gradient; returns whether it is to do so.
    """

    def __init__(self, reducer: GradientReducer[torch.Tensor]) -> None:
        super().__init__(reducer)
        self._task = -1  # the autograd run whose end we already wait for
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._registered = -1  # torch's count of hooks when ours were last known to be called last
        self._nested = -1  # the last nested run that was entered
        self._later: dict[int, tuple[torch.Tensor, int]] = {}  # to be handed over at the end; how often accumulated
        self._once: set[int] = set()  # accumulated into once in a backward pass, by identity
        self._due: set[int] = set()  # those of them that have not been accumulated into in this backward pass
        self._guarded: list[torch.Tensor] = []
        # On a GPU: is told on which stream each gradient was made.
        self._note: Callable[[torch.Tensor], None] | None = getattr(reducer.framework, "note", None)
        self._first: torch.Tensor | None = None  # the first watched parameter
        self.on_moved: Callable[[], Framework[torch.Tensor]] | None = None
        self.weight = self.own_weight = 1.0
        self.on_begin: Callable[[], bool] | None = None

    @property
    def reducer(self) -> GradientReducer[torch.Tensor]:
        """The reducer of the gradients."""
        return self._reducer

    def watch(self, parameter: torch.Tensor) -> None:
        """Hand this parameter's gradients over from now on, whenever it is trainable; the reducer knows it already."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return  # it can never have one
        self._first = parameter if self._first is None else self._first
        frozen = not parameter.requires_grad
        if frozen:  # torch takes no hook then, but keeps one when a parameter is frozen
            if parameter.is_inference():
                return
            parameter.requires_grad_(True)
        try:
            with torch._C.DisableTorchFunctionSubclass():  # a lazy parameter refuses it, but keeps the hook
                self._hooks.append(self._share(parameter, _hook(weakref.ref(self))))
        finally:
            if frozen:
                parameter.requires_grad_(False)

    def unwatch(self) -> None:
        """Hand nothing over any more."""
        _remove(self._hooks)
        self._unshare()

    def finish_if_due(self, *, in_step: bool = False) -> None:
        """Like the reducer's."""
        if self.elsewhere:
            self.take_back()
        try:
            if self._first is not None:
                self._notice_move(self._first)
            self._weigh_own()
            self._reducer.finish_if_due(in_step=in_step)
        finally:
            self._unguard()

    def cleared(self) -> None:
        """Like the reducer's."""
        try:
            self._reducer.cleared()
        finally:
            self._unguard()
            self._forget_pass()
            self.claim()

    def stepped(self) -> None:
        """Like the reducer's."""
        self._reducer.stepped()
        self._unguard()
        self._forget_pass()
        self.claim()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self.elsewhere and is_elsewhere(parameter, self.elsewhere):
            return
        if self._note is not None and cuda.is_on_gpu(parameter):
            self._note(parameter)
        task = _graph_task()
        if task != self._task and not self._enter(task, parameter):
            return
        key = id(parameter)
        if key not in self._due or self._task == -1:
            self._postpone(parameter, key)
            return
        self._due.discard(key)
        if self.weight != 1.0:
            self.hand_over(parameter)
        else:
            self._reducer.hand_over(parameter)

    def _enter(self, task: int, parameter: torch.Tensor) -> bool:
        """Enter an autograd run whose end we do not wait for, by a gradient; return whether that is to be handed over."""
        if task == self._nested:
            return True
        _check_not_compiled()
        self._notice_move(parameter)
        is_nested, node = _enclosing()
        if not is_nested and (self._task != -1 or task < self._nested):
            self._failed(self._task)  # an earlier run, which never came to its end
        if self._task == self._nested == -1 and self.on_begin is not None and not self.on_begin():
            return False
        if is_nested and (node is not None or self._task != -1):
            self._nested = task
            if self._task == -1:
                self._await_next(node)
        else:  # of a nested run that a hook has begun, the end is as good as that of the outer one
            self._await_end(task)
        if self._comes_early(parameter):
            self._postpone(parameter, id(parameter))
            return False
        return True

    def _postpone(self, parameter: torch.Tensor, key: int) -> None:
        """Hand a gradient over when the backward pass is over.

        Raises:
            GradientOrderError: when it was handed over in this pass.
        """
        if key in self._once and key not in self._later and key not in self._due:
            self._once.clear()
            raise GradientOrderError(
                f"a parameter of shape {list(parameter.shape)} is in several torch.utils.checkpoint(..., "
                "use_reentrant=True) of one backward pass, or in one and outside of it, and was used once only before: its "
                "gradient was handed over when the first part was computed. Use use_reentrant=False, or clear gradients "
                "and repeat the step")
        self._later[key] = parameter, 1 + self._later.get(key, (parameter, 0))[1]
        self._due.discard(key)

    def _notice_move(self, parameter: torch.Tensor) -> None:
        """If the model was moved to a GPU after the optimizer was made, let gradients be reduced there from now on."""
        if self._note is None and self.on_moved is not None and cuda.is_on_gpu(parameter) and not self._reducer.is_under_way:
            framework = self.on_moved()
            self._note = getattr(framework, "note", None)
            if self._note is None:
                self.on_moved = None  # there is no plane for GPUs
            else:
                self._reducer.change_framework(framework)
                self._tell(framework)
                self._note(parameter)

    def _await_end(self, task: int) -> None:
        self._task = task
        torch.autograd.Variable._execution_engine.queue_callback(_End(self, task))

    def _await_next(self, node: Any) -> None:
        """Wait for the end of the run to which a node belongs, which is being carried out, as soon as another one is."""
        owner = weakref.ref(self)
        handles: list[Any] = []

        def reached(*_: Any) -> None:
            while handles:
                handles.pop().remove()
            hooks, task = owner(), _graph_task()
            if hooks is not None and hooks._task != task and hooks._nested != -1:
                hooks._await_end(task)
                hooks._hand_over_due()
        handles += [following.register_prehook(reached) for following, _ in node.next_functions if following is not None]

    def _comes_early(self, running: torch.Tensor) -> bool:
        """Return whether hooks of `running`, which torch is calling, come after ours; only in this backward pass."""
        if self._registered == RemovableHandle.next_id:
            return False
        self._registered = RemovableHandle.next_id
        return come_last(self._hooks, running)

    def _hand_over_due(self) -> None:
        """The end of the outer run is awaited from now on: hand over what is accumulated into once and was left for this."""
        for key, (parameter, times) in list(self._later.items()):
            if times == 1 and key in self._once:
                del self._later[key]
                self.hand_over(parameter)

    def _hand_over_later(self) -> None:
        """The outer backward pass is over: hand over what was left for then."""
        later = list(self._later.values())
        for parameter, times in later:
            if times == 1:
                self._once.add(id(parameter))
            else:
                self._once.discard(id(parameter))
        self._forget_pass()
        for parameter, _ in later:
            self.hand_over(parameter)

    def _forget_pass(self) -> None:
        self._nested = -1
        self._later.clear()
        self._due = self._once.copy()

    def _failed(self, task: int) -> None:
        """A backward pass did not come to its end: guard what it has handed over."""
        if task == self._task:
            self._task = -1
            self._forget_pass()
            self._guard()

    def hand_over(self, parameter: torch.Tensor) -> None:
        """Hand a gradient over now, times the weight."""
        gradient = get_grad(parameter)
        if self.weight != 1.0 and gradient is not None:
            gradient.mul_(self.weight)
        self._reducer.hand_over(parameter)

    def _weigh_own(self) -> None:
        if self.own_weight != 1.0:
            for parameter in self._reducer.unseen():
                set_grad(parameter, get_grad(parameter) * self.own_weight)  # the script may use its tensor further

    def _end_backward(self, run: _Run) -> None:
        self._task = -1
        with _guarding_all(run):
            self._hand_over_later()
            self._weigh_own()
            if self._reducer.end_backward():
                # Behind the other optimizers' ends.
                torch.autograd.Variable._execution_engine.queue_callback(lambda: self._wait(run))
                return
        run.hooks.discard(self)
        self._guard()

    def _wait(self, run: _Run) -> None:
        with _guarding_all(run), torch.profiler.record_function("hvdlite.wait_for_gradients"):
            if self._reducer.wait(deferrable=True) and self._reducer.has_late_passes:
                self._reducer.finish()  # the round before was of a backward pass that failed
        run.hooks.discard(self)
        self._guard()

    def _guard(self) -> None:
        """While a round is under way: let whatever reads a gradient end it first."""
        if not self._reducer.is_under_way:
            return
        self._reducer.withdraw()
        owner, guarded = weakref.ref(self), [parameter for parameter in self._reducer.parameters
                                               if not is_elsewhere(parameter, self.elsewhere)]

        def finish() -> None:
            hooks = owner()
            if hooks is None:  # the optimizer is gone
                unfinal.unguard(guarded)
                return
            if _graph_task() != -1:  # a hook of the user's reads it, in a backward pass that goes on
                hooks.reducer.notice_late()
            hooks.finish()
        self._guarded = guarded
        unfinal.guard(guarded, finish)

    def finish(self) -> None:
        """End the round that is under way, if there is one; gradients are final then."""
        with torch.profiler.record_function("hvdlite.wait_for_gradients"):
            try:
                self._reducer.finish_under_way()
            finally:
                self._unguard()

    def _unguard(self) -> None:
        if self._guarded and not self._reducer.is_under_way:
            unfinal.unguard(self._guarded)
            self._guarded = []


@contextmanager
def _guarding_all(run: _Run) -> Iterator[None]:
    """Guard all gradients of the run if the block fails, an interrupt included: autograd then calls no other callback."""
    try:
        yield
    except BaseException:
        run.guard()
        raise


def _hook(owner: weakref.ref[BackwardHooks]) -> Callable[[torch.Tensor], None]:
    """Return a hook that does not keep its owner alive: torch does not let Python see the cycle that would make."""
    def accumulated(parameter: torch.Tensor) -> None:
        hooks = owner()
        if hooks is not None:
            hooks._accumulated(parameter)
    return accumulated


def _enclosing() -> tuple[bool, Any]:
    """Return whether the autograd run on this thread is nested in another one.

    Return also the node of the outermost run that is being carried out meanwhile, if it is defined in Python. On a GPU the
    outermost run has threads of torch's own, so that such a node is all that is seen of it.
    """
    runs, outermost, frame = 0, None, sys._getframe(1)
    while frame is not None:
        runs += frame.f_code.co_name == "_engine_run_backward"
        if frame.f_code in _NODES:
            outermost = frame
        frame = frame.f_back  # type: ignore[assignment]
    return outermost is not None or runs > 1, None if outermost is None else outermost.f_locals["self"]


def _check_not_compiled() -> None:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and getattr(compiled, "in_compiled_autograd_region", False):
        raise UnsupportedError("compiled autograd does not tell hooks when a backward pass ends, which DistributedOptimizer "
                               "has to know. Leave torch._dynamo.config.compiled_autograd off; compiled models need it not")


def _remove(hooks: list[Any]) -> None:
    while hooks:
        hooks.pop().remove()
