"""Handles: the results of asynchronous calls, and how threads wait for them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from hvdlite.core.device import Completion
from hvdlite.diagnostics.progress import Progress
from hvdlite.handoff.group_state import GroupState
from hvdlite.negotiation.messages import Blocked, Wait

LONG_SECONDS: Final = 0.5
"""How long a thread is blocked before it is reported to the coordinator, which looks for ranks that wait for each other in a
circle.
"""


OWN_THREADS: Final = "hvdlite-"
"""How the names of threads begin that never call a collective."""


class WaitDeferred(Exception):
    """Raised by a deferrable wait that the coordinator has ended, because ranks wait for each other in a circle."""


class WaitLeftToCaller(WaitDeferred):
    """Raised by a deferrable wait that takes long on a thread that Python did not start, such as torch's for a GPU.

    The thread that called `backward()` is blocked in C++ meanwhile, where Ctrl-C does not interrupt it.
    """


def is_foreign_thread() -> bool:
    """Return whether this thread was not started by Python."""
    return isinstance(threading.current_thread(), threading._DummyThread)


@dataclasses.dataclass(eq=False)
class _LongWait:
    """A thread that has been blocked for long. Woken when its handle is done, or when the wait is deferred."""

    handle: Handle
    deferrable: bool
    thread: int
    deferred: bool = False
    wakeup: threading.Lock = dataclasses.field(default_factory=threading.Lock)  # held, but when the thread is to look

    def wake(self) -> None:
        """Let the thread look; callable from any thread, again is fine."""
        with contextlib.suppress(RuntimeError):  # it is to look already
            self.wakeup.release()


class BlockedWaiters:
    """The handles on which user threads are blocked; user threads add and remove them.

    While there are any, the background thread polls a little longer for messages before it sleeps, because waking up takes
    longer than most messages. How long threads were blocked is part of the rank's progress.

    Args:
        about_to_block: called by a thread that is about to block.
        report: called by a thread that has been blocked for long, or whose long wait was interrupted, with these waiters.

    Attributes:
        have_deferred: whether a wait has ever been deferred.
    """

    __slots__ = ("_about_to_block", "_handles", "_long", "_report", "have_deferred", "progress")

    def __init__(self, about_to_block: Callable[[], None], report: Callable[[BlockedWaiters], None]) -> None:
        self.progress = Progress()
        self.have_deferred = False
        self._handles: set[Handle] = set()
        self._long: list[_LongWait] = []  # a signal handler may begin one inside another of the same thread
        self._about_to_block, self._report = about_to_block, report

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, handle: Handle) -> None:
        """A thread blocks until `handle` is done."""
        self._handles.add(handle)
        self._about_to_block()

    def remove(self, handle: Handle) -> None:
        """It does not any more; again is fine."""
        self._handles.discard(handle)

    def finished(self, handle: Handle) -> None:
        """`handle` is done."""
        self._handles.discard(handle)
        if self._long:
            for wait in list(self._long):
                if wait.handle is handle:
                    wait.wake()

    def wait_long(self, handle: Handle, deferrable: bool) -> None:
        """Block until `handle` is done, which has already taken long.

        Raises:
            WaitDeferred: when that is allowed and the coordinator has decided so.
        """
        wait = _LongWait(handle, deferrable, threading.get_ident())
        wait.wakeup.acquire()
        try:
            self._long.append(wait)
            self._report(self)
            while not handle.done() and not wait.deferred:
                wait.wakeup.acquire()
        except BaseException:
            self._long.remove(wait)
            self._report(self)
            raise
        self._long.remove(wait)
        if not handle.done():
            self.have_deferred = True
            raise WaitDeferred

    def defer(self) -> None:
        """End the deferrable long waits."""
        for wait in list(self._long):
            if wait.deferrable:
                wait.deferred = True
                wait.wake()

    def blocked(self, groups: Sequence[GroupState] = ()) -> Blocked:
        """Return the report for the coordinator.

        Args:
            groups: the groups of this process.
        """
        waits, threads = self._waiting(groups)
        reported = tuple(group.calls() for group in groups)
        others = threads is None or any(thread.ident not in threads and not thread.name.startswith(OWN_THREADS)
                                        for thread in threading.enumerate())
        # Whoever waits before and after this has waited meanwhile: so what is reported was true at one time.
        has_changed = (waits, threads) != self._waiting(groups) or any(
            (calls.begun, len(calls.waits)) != (now.begun, len(now.waits))
            for calls, now in zip(reported, (group.calls() for group in groups), strict=True))
        return Blocked(tuple(msgspec.structs.replace(wait.handle.waits_for, deferrable=wait.deferrable) for wait in waits),
                       not others and not has_changed, reported)

    def _waiting(self, groups: Sequence[GroupState]) -> tuple[list[_LongWait], frozenset[int] | None]:
        """Return the long waits, and the threads blocked there and in calls of groups; None: calls are carried out."""
        waits = {wait.thread: wait for wait in list(self._long)}  # of nested waits the innermost
        threads = frozenset(waits)
        for group in groups:
            blocked = group.blocked_threads()
            if blocked is None:
                return list(waits.values()), None
            threads |= blocked
        return list(waits.values()), threads


class Handle:
    """A collective in flight. Completed exactly once, by the background thread; may be waited for from any thread.

    Attributes:
        name: the tensor's name, as negotiated.
        waits_for: the tensor, or the round of a gradient set to which it belongs.
        contributors: after completion, the ranks that contributed, ascending; empty when all were absent.
        ranks_in_step: after completion, as in `Response`.
        rows: after completion, likewise.
        completion: after completion, what the result is behind when it is on a GPU: the work is launched, not done. None on
            the host, and for results that need no work.
    """

    __slots__ = (
        "_done",
        "_error",
        "_lock",
        "_result",
        "_waiters",
        "completion",
        "contributors",
        "name",
        "ranks_in_step",
        "rows",
        "waits_for",
    )

    def __init__(self, name: str, waiters: BlockedWaiters, waits_for: Wait) -> None:
        self.name, self.waits_for = name, waits_for
        self._waiters = waiters
        self.contributors: tuple[int, ...] = ()
        self.ranks_in_step: tuple[int, ...] = ()
        self.rows: tuple[int, ...] = ()
        self.completion: Completion | None = None
        self._result: Any = None
        self._error: Exception | None = None
        self._done = False
        self._lock = threading.Lock()  # held until completion: the cheapest thing a thread can sleep on
        self._lock.acquire()

    @classmethod
    def finished(cls, name: str, waiters: BlockedWaiters, waits_for: Wait, result: Any,
                 contributors: tuple[int, ...]) -> Handle:
        """Return the handle of a collective that is complete."""
        handle = cls(name, waiters, waits_for)
        handle._result, handle.contributors, handle._done = result, contributors, True
        return handle

    def done(self) -> bool:
        """Return whether `wait` would return (or raise) at once."""
        return self._done

    def completions(self) -> list[Completion]:
        """After `wait`: return what the results are behind; nothing on the host."""
        return [] if self.completion is None else [self.completion]

    def wait(self, timeout: float | None = None, *, deferrable: bool = False) -> Any:
        """Block until the collective is complete and return its result: an array, a list of arrays, None for a barrier.

        May be called again, and returns the same.

        Args:
            deferrable: whether the wait may end early.

        Raises:
            HorovodInternalError: when the collective failed; see `hvdlite.core.errors`.
            TimeoutError: when it took longer than `timeout` seconds; the collective goes on.
            WaitDeferred: when that is allowed and the coordinator ended the wait; the collective goes on.
            WaitLeftToCaller: likewise, when this thread cannot be interrupted and has waited for long.
        """
        if not self._done:
            begun = self._waiters.progress.block()
            self._waiters.add(self)
            try:
                if self._lock.acquire(timeout=LONG_SECONDS if timeout is None else timeout):
                    self._lock.release()  # for other waiters
                elif timeout is not None:
                    raise TimeoutError(f"'{self.name}' is not complete after {timeout} s")
                elif deferrable and is_foreign_thread():
                    raise WaitLeftToCaller
                else:
                    self._waiters.wait_long(self, deferrable)
            finally:
                self._waiters.remove(self)
                self._waiters.progress.unblock(begun)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result

    def settle(self, error: Exception | None) -> None:
        """The background thread is done with what has no result."""
        if error is None:
            self._complete(None, ())
        else:
            self._fail(error)

    def _complete(self, result: Any, contributors: tuple[int, ...], completion: Completion | None = None) -> None:
        self._result, self.contributors, self.completion = result, contributors, completion
        self._finish()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self._lock.release()
        self._waiters.finished(self)


class Handles:
    """Several collectives in flight, as one.

    Args:
        result: what `wait` returns; None for the list of the collectives' own results.
    """

    __slots__ = ("_handles", "_result")

    def __init__(self, handles: Sequence[Handle | Handles], result: Any = None) -> None:
        self._handles, self._result = handles, result

    def done(self) -> bool:
        """Return whether `wait` would return (or raise) at once."""
        return all(handle.done() for handle in self._handles)

    def completions(self) -> list[Completion]:
        """Like `Handle.completions`."""
        return [completion for handle in self._handles for completion in handle.completions()]

    def wait(self) -> Any:
        """Wait for all of them, in order, and return the result, or raise the first error. May be called again."""
        results = [handle.wait() for handle in self._handles]
        return results if self._result is None else self._result
