"""What autograd tells a reducer: that a gradient has been accumulated, and that the outermost backward pass is over."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.training.gradient_reducer import GradientReducer
from hvdlite_torch import cuda, unfinal
from hvdlite_torch.unfinal import get_grad

_graph_task = torch._C._current_graph_task_id


class _Backward(threading.local):
    """The backward pass on a thread.

    Attributes:
        hooks: that handed gradients over in it and have not waited yet.
    """

    def __init__(self) -> None:
        self.hooks: weakref.WeakSet[BackwardHooks] = weakref.WeakSet()


_backward = _Backward()


class BackwardHooks:
    """Hands gradients over as they are accumulated, and waits for the round before `backward()` returns.

    Where the wait is left for later, by choice or because it was deferred, gradients are guarded until the round is over:
    reading one ends it. Hooks do not keep this object alive, and end with it. When *every* watched parameter lies inside
    `torch.utils.checkpoint(..., use_reentrant=True)`, nothing marks the end of the outer backward pass: then the round is
    the reducer's to finish.

    A parameter's other hooks are called first, whenever they were registered, as under DDP: they see this rank's gradient, and
    what they write to it is reduced.

    Attributes:
        weight: by what gradients are multiplied before they are handed over.
        on_begin: called before a backward pass hands over its first gradient; returns whether it is to do so.
    """

    def __init__(self, reducer: GradientReducer[torch.Tensor]) -> None:
        self._reducer = reducer
        self._task = -1  # the autograd run whose end we already wait for
        self._hooks: list[RemovableHandle] = []
        self._registered = -1  # torch's count of hooks when ours were last known to be called last
        self._late: list[torch.Tensor] = []  # to be handed over when the backward pass ends
        self._guarded: list[torch.Tensor] = []
        self.weight = 1.0
        self.on_begin: Callable[[], bool] | None = None

    @property
    def reducer(self) -> GradientReducer[torch.Tensor]:
        """Who reduces the gradients."""
        return self._reducer

    def watch(self, parameter: torch.Tensor) -> None:
        """Hand this parameter's gradients over from now on, whenever it is trainable; the reducer knows it already."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return  # it can never have one
        note = getattr(self._reducer.framework, "note", None) if cuda.is_on_gpu(parameter) else None
        frozen = not parameter.requires_grad
        if frozen:  # torch takes no hook then, but keeps one when a parameter is frozen
            if parameter.is_inference():
                return
            parameter.requires_grad_(True)
        try:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), note)))
        finally:
            if frozen:
                parameter.requires_grad_(False)

    def unwatch(self) -> None:
        """Hand nothing over any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def finish_if_due(self, *, in_step: bool = False) -> None:
        """Like the reducer's."""
        try:
            self._reducer.finish_if_due(in_step=in_step)
        finally:
            self._unguard()

    def cleared(self) -> None:
        """Like the reducer's."""
        try:
            self._reducer.cleared()
        finally:
            self._unguard()

    def stepped(self) -> None:
        """Like the reducer's."""
        self._reducer.stepped()
        self._unguard()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        task = _graph_task()
        if task != self._task and _backward_depth() <= 1:
            if self.on_begin is not None and not self.on_begin():
                return
            self._task = task
            _backward.hooks.add(self)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if self._registered != RemovableHandle.next_id and self._come_last(parameter):
                return
        if self.weight != 1.0:
            self.hand_over(parameter)
        else:
            self._reducer.hand_over(parameter)

    def hand_over(self, parameter: torch.Tensor) -> None:
        """Hand a gradient over now, times the weight."""
        gradient = get_grad(parameter)
        if self.weight != 1.0 and gradient is not None:
            gradient.mul_(self.weight)
        self._reducer.hand_over(parameter)

    def _come_last(self, running: torch.Tensor) -> bool:
        """Move our hooks behind those that were registered since.

        Return whether hooks of `running`, which torch is calling, are still to come in this backward pass.
        """
        self._registered = RemovableHandle.next_id
        self._late.clear()  # of a backward pass that failed
        for handle in self._hooks:
            hooks = handle.hooks_dict_ref()
            if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)
                if hooks is running._post_accumulate_grad_hooks:
                    self._late.append(running)
        return bool(self._late)

    def _end_backward(self) -> None:
        self._task = -1
        with _guarding_all():
            while self._late:
                self.hand_over(self._late.pop())
            if self._reducer.end_backward():
                torch.autograd.Variable._execution_engine.queue_callback(self._wait)  # behind the other optimizers' ends
                return
        _backward.hooks.discard(self)
        self._guard()

    def _wait(self) -> None:
        with _guarding_all(), torch.profiler.record_function("hvdlite.wait_for_gradients"):
            self._reducer.wait(deferrable=True)
        _backward.hooks.discard(self)
        self._guard()

    def _guard(self) -> None:
        """While a round is under way: let whatever reads a gradient end it first."""
        if not self._reducer.is_under_way:
            return
        owner, guarded = weakref.ref(self), list(self._reducer.parameters)

        def finish() -> None:
            hooks = owner()
            if hooks is None:  # the optimizer is gone
                unfinal.unguard(guarded)
            else:
                hooks._finish()
        self._guarded = guarded
        unfinal.guard(guarded, finish)

    def _finish(self) -> None:
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
def _guarding_all() -> Iterator[None]:
    """When this fails, an interrupt included, autograd calls nobody else: guard what every optimizer has not waited for."""
    try:
        yield
    except BaseException:
        for hooks in list(_backward.hooks):
            hooks._guard()
        _backward.hooks.clear()
        raise


def _hook(owner: weakref.ref[BackwardHooks],
          note: Callable[[torch.Tensor], None] | None) -> Callable[[torch.Tensor], None]:
    """Return a hook that does not keep its owner alive: torch does not let Python see the cycle that would make.

    Args:
        note: is told of every gradient first; on a GPU, where it matters on which stream it was made.
    """
    if note is not None:
        def noted(parameter: torch.Tensor) -> None:
            hooks = owner()
            if hooks is not None:
                note(parameter)
                hooks._accumulated(parameter)
        return noted

    def accumulated(parameter: torch.Tensor) -> None:
        hooks = owner()
        if hooks is not None:
            hooks._accumulated(parameter)
    return accumulated


def _backward_depth() -> int:
    """Return how many backward passes are nested on this thread (reentrant checkpoints nest them)."""
    depth, frame = 0, sys._getframe(1)
    while frame is not None:
        depth += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back  # type: ignore[assignment]
    return depth
