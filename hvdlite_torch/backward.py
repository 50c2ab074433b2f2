"""What autograd tells a reducer: that a gradient has been accumulated, and that the outermost backward pass is over."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hvdlite.training.gradient_reducer import GradientReducer
from hvdlite_torch import cuda

_graph_task = torch._C._current_graph_task_id


class BackwardHooks:
    """Hands gradients over as they are accumulated, and waits for the round before `backward()` returns.

    Hooks do not keep this object alive, and end with it. When *every* watched parameter lies inside
    `torch.utils.checkpoint(..., use_reentrant=True)`, nothing marks the end of the outer backward pass: then the round is
    the reducer's to finish.

    Attributes:
        weight: by what gradients are multiplied before they are handed over.
        on_begin: called when a backward pass hands over its first gradient.
    """

    def __init__(self, reducer: GradientReducer[torch.Tensor]) -> None:
        self._reducer = reducer
        self._task = -1  # the autograd run whose end we already wait for
        self._hooks: list[Any] = []
        self.weight = 1.0
        self.on_begin: Callable[[], None] | None = None

    @property
    def reducer(self) -> GradientReducer[torch.Tensor]:
        """Who reduces the gradients."""
        return self._reducer

    def watch(self, parameter: torch.Tensor) -> None:
        """Hand this parameter's gradients over from now on; the reducer knows it already."""
        note = getattr(self._reducer.framework, "note", None) if cuda.is_on_gpu(parameter) else None
        self._hooks.append(parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), note)))

    def _accumulated(self, parameter: torch.Tensor) -> None:
        task = _graph_task()
        if task != self._task and _backward_depth() <= 1:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if self.on_begin is not None:
                self.on_begin()
        if self.weight != 1.0:
            self.hand_over(parameter)
        else:
            self._reducer.hand_over(parameter)

    def hand_over(self, parameter: torch.Tensor) -> None:
        """Hand a gradient over now, times the weight."""
        if self.weight != 1.0 and parameter.grad is not None:
            parameter.grad.mul_(self.weight)
        self._reducer.hand_over(parameter)

    def _end_backward(self) -> None:
        self._task = -1
        if self._reducer.end_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)  # behind the other optimizers' ends

    def _wait(self) -> None:
        with torch.profiler.record_function("hvdlite.wait_for_gradients"):
            self._reducer.wait()


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
