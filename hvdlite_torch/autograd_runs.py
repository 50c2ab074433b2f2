"""Autograd's runs: which optimizers take part in one, its end or failure, and runs nested in it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from hvdlite.core.errors import UnsupportedError

graph_task = torch._C._current_graph_task_id
"""Return autograd's number for the run that goes on on this thread; -1 when there is none."""
_NODES = {getattr(torch.autograd.function.BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed")
          if hasattr(torch.autograd.function.BackwardCFunction, name)}
"""Of the functions that carry out nodes which are defined in Python, such as reentrant checkpoints."""


class Listener(Protocol):
    """Hands over the gradients of one optimizer."""

    def guard(self) -> None:
        """Let whatever reads a gradient that is not final wait for it."""

    def end_backward(self, run: Run) -> None:
        """The run is over."""

    def fail_backward(self, task: int) -> None:
        """The run with autograd's number `task` did not come to its end."""


class Run:
    """An outermost autograd run, on whichever threads autograd carries it out.

    Attributes:
        listeners: that hand gradients over in it and have not waited yet.
    """

    def __init__(self) -> None:
        self.listeners: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextmanager
    def guarding_all(self) -> Iterator[None]:
        """When this fails, an interrupt included, autograd calls nobody else: guard what nobody has waited for."""
        try:
            yield
        except BaseException:
            for listener in list(self.listeners):
                listener.guard()
            self.listeners.clear()
            raise


_runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
"""The runs that go on, by autograd's number for them, which no other run of the process gets."""


class RunEnd:
    """What autograd calls at the end of a run. When the run fails, this is deleted without having been called.

    Autograd may call this on a thread of its own, and deletes it on the thread that called `backward()`. That must run no
    Python code then, or a pending KeyboardInterrupt is raised in it, where it is ignored. So this lets go of all that it has
    when it is called.
    """

    def __init__(self, listener: Listener, task: int) -> None:
        self._unreached: _Unreached | None = _Unreached(listener, task)
        self._run: Run | None = _runs.setdefault(task, Run())
        self._run.listeners.add(listener)

    def __call__(self) -> None:
        unreached, run, self._unreached, self._run = self._unreached, self._run, None, None
        assert unreached is not None
        assert run is not None
        unreached.is_reached = True
        unreached.listener.end_backward(run)


class _Unreached:
    """Tells a listener that a run has failed, when this is deleted."""

    def __init__(self, listener: Listener, task: int) -> None:
        self.listener, self._task, self.is_reached = listener, task, False

    def __del__(self) -> None:
        if not self.is_reached:
            self.listener.fail_backward(self._task)


class Once:
    """Calls a function with an argument, of which nothing is kept afterwards; see `RunEnd`."""

    def __init__(self, function: Callable[[Any], None], argument: Any) -> None:
        self._call: tuple[Callable[[Any], None], Any] | None = (function, argument)

    def __call__(self) -> None:
        assert self._call is not None
        function, argument = self._call
        self._call = None
        function(argument)


def at_end(callback: Any) -> None:
    """Let autograd call this at the end of the run that goes on, after what was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def enclosing() -> tuple[bool, Any]:
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


def check_not_compiled() -> None:
    """Raise `UnsupportedError` in compiled autograd."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and getattr(compiled, "in_compiled_autograd_region", False):
        raise UnsupportedError("compiled autograd does not tell hooks when a backward pass ends, which DistributedOptimizer "
                               "has to know. Leave torch._dynamo.config.compiled_autograd off; compiled models need it not")
