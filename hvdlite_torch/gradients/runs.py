"""Autograd's runs: one object for each outermost run of the process, which notifies optimizers of its end or failure."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.core.errors import UnsupportedError
from hvdlite_torch.uncompiled import leave_to_python

if TYPE_CHECKING:
    from hvdlite_torch.gradients.hooks import Hooks

graph_task = torch._C._current_graph_task_id
"""Return autograd's number for the run that goes on on this thread; -1 when there is none."""
_NODES = tuple(getattr(torch.autograd.function.BackwardCFunction, name).__code__ for name in ("apply", "apply_boxed")
               if hasattr(torch.autograd.function.BackwardCFunction, name))
"""Of the functions that carry out nodes which are defined in Python, such as reentrant checkpoints. Not a set: code that
Dynamo makes may have no hash.
"""


class AutogradRun:
    """An outermost autograd run, on whichever threads autograd carries it out, and the runs that are nested in it.

    `torch.utils.checkpoint(..., use_reentrant=True)` nests an autograd run in the outer one. The nested run is not notified
    when the outer one ends, nor can it find out which one that is. So when the first gradient comes from a nested run, the
    nodes that follow the checkpoint in the outer run get a hook, which asks for a callback at its end.

    Waiting is apart from the end, because one run can serve several optimizers: all of them must have closed their rounds
    before anybody waits, or two ranks could wait for each other's other round.

    Attributes:
        is_awaited: whether autograd was asked to report its end.
        newest: the largest of autograd's numbers for it and for the runs nested in it; a run has a larger one than those
            that began before.
    """

    def __init__(self) -> None:
        self.is_awaited = False
        self.newest = -1
        self._computing: list[Hooks] = []  # of optimizers whose gradients it computes
        self._waiting: list[Hooks] = []  # that have handed over all of them, and have not waited yet

    def add(self, hooks: Hooks) -> None:
        """Let an optimizer take part."""
        with _changing:
            if hooks.run is self:
                return  # by a gradient that came on another thread at the same time
            hooks.run = self
            self._computing.append(hooks)
            is_awaited = self.is_awaited
        if is_awaited:
            hooks.run_is_awaited()

    def end(self) -> None:
        """Autograd has carried it out. Called once more where somebody waits, behind what others have queued meanwhile."""
        try:
            while self._waiting:
                self._waiting[0].wait()
                del self._waiting[0]
            while self._computing:
                if self._computing[0].end_pass():
                    self._waiting.append(self._computing[0])
                del self._computing[0]
            if self._waiting:
                _at_end(self)
        except BaseException:
            self.fail()
            raise

    def fail(self) -> None:
        """It did not come to its end: an interrupt, or an error, perhaps of one optimizer. Autograd calls nobody else."""
        computing, waiting, self._computing, self._waiting = self._computing, self._waiting, [], []
        for hooks in computing:
            hooks.fail_pass()
        for hooks in waiting:
            hooks.guard()

    def await_end(self, task: int) -> AutogradRun:
        """Wait for the end of run `task`, which goes on on this thread and is the outermost one; return its object.

        That is another one where somebody takes part in it already, by another run that is nested in it.
        """
        with _changing:
            if self.is_awaited:
                return self
            run = _runs.setdefault(task, self)
            is_known = run.is_awaited
            self.is_awaited = run.is_awaited = True
            joining, self._computing = self._computing, []
            run._computing += joining
        if not is_known:
            _at_end(run)
        for hooks in joining:
            hooks.run = run
            hooks.run_is_awaited()
        return run

    def await_next(self, node: Any) -> None:
        """Wait for the end of the run to which a node belongs, which is being carried out, as soon as another one is."""
        reference = weakref.ref(self)
        handles: list[Any] = []

        def reached(*_: Any) -> None:
            while handles:
                handles.pop().remove()
            run = reference()
            if run is not None:
                run.await_end(graph_task())
        leave_to_python(reached)
        handles += [following.register_prehook(reached) for following, _ in node.next_functions if following is not None]


_runs: weakref.WeakValueDictionary[int, AutogradRun] = weakref.WeakValueDictionary()
"""The outermost runs that go on, by autograd's number for each run that they consist of; it gives no number twice."""
_changing = threading.Lock()
"""Held while somebody looks for a run or joins it: gradients of several optimizers may come from several threads."""


def outermost(task: int, known: AutogradRun | None) -> AutogradRun:
    """Return the outermost run to which the run that goes on on this thread belongs.

    Args:
        task: autograd's number for the one on this thread.
        known: the outermost run in which the caller takes part already. Where that is not the result, it has failed.

    Raises:
        UnsupportedError: in compiled autograd.
    """
    _check_not_compiled()
    is_nested, node = _enclosing()
    with _changing:
        run = known
        if run is None or not (is_nested or task < run.newest):
            run = _runs.get(task) or AutogradRun()
        run.newest = max(run.newest, task)
        _runs.setdefault(task, run)
    if is_nested and node is not None and not run.is_awaited:
        run.await_next(node)
        return run
    return run.await_end(task)  # of a nested run that a hook has begun, the end is as good as that of the outer one


def _at_end(run: AutogradRun) -> None:
    """Let autograd report the end of the run under way on this thread, after what was queued before.

    Autograd may call `ended` on a thread of its own, and deletes it on the thread that called `backward()`; when the run
    fails, without having called it. If it has, deletion must run no Python code, or a pending KeyboardInterrupt is raised in
    that, where it is ignored. So `ended` lets go of all that it has when it is called.
    """
    owned: list[AutogradRun] = [run]

    def ended() -> None:
        failed.detach()
        owned.pop().end()
    failed = weakref.finalize(ended, run.fail)
    failed.atexit = False
    torch.autograd.Variable._execution_engine.queue_callback(leave_to_python(ended))


def _enclosing() -> tuple[bool, Any]:
    """Return whether the autograd run on this thread is nested in another one.

    Return also the node of the outermost run that is being carried out meanwhile, if it is defined in Python. On a GPU the
    outermost run has threads of torch's own, so that such a node is all that is seen of it.
    """
    runs, outermost_node, frame = 0, None, sys._getframe(1)
    while frame is not None:
        runs += frame.f_code.co_name == "_engine_run_backward"
        if frame.f_code in _NODES:
            outermost_node = frame
        frame = frame.f_back  # type: ignore[assignment]
    return outermost_node is not None or runs > 1, None if outermost_node is None else outermost_node.f_locals["self"]


def _check_not_compiled() -> None:
    """Raise `UnsupportedError` in compiled autograd."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and getattr(compiled, "in_compiled_autograd_region", False):
        raise UnsupportedError("compiled autograd does not tell hooks when a backward pass ends, which DistributedOptimizer "
                               "has to know. Leave torch._dynamo.config.compiled_autograd off; compiled models need it not")
