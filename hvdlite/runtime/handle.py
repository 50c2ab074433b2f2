"""What an asynchronous call returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.control.progress import Progress
from hvdlite.core.device import Completion


class Sleepers:
    """The handles on which threads are blocked: while there are any, the runtime thread looks a little longer for news
    before it sleeps, because waking up costs more than most messages take. How long they were blocked is progress, too.

    Args:
        notice: called by a thread that is about to block.
    """

    __slots__ = ("_handles", "_notice", "progress")

    def __init__(self, notice: Callable[[], None]) -> None:
        self.progress = Progress()
        self._handles: set[Handle] = set()
        self._notice = notice

    def __bool__(self) -> bool:
        return bool(self._handles)

    def add(self, handle: Handle) -> None:
        """A thread blocks until `handle` is done."""
        self._handles.add(handle)
        self._notice()

    def remove(self, handle: Handle) -> None:
        """It does not any more; again is fine."""
        self._handles.discard(handle)


class Handle:
    """A collective in flight. Completed exactly once, by the runtime thread; may be waited for from any thread.

    Attributes:
        name: the tensor's name, as negotiated.
        contributors: after completion, the ranks that contributed, ascending; empty when all were absent.
        completion: after completion, what the result is behind when it is on a GPU: the work is launched, not done. None on
            the host, and for results that need no work.
    """

    __slots__ = ("_done", "_error", "_lock", "_result", "_sleepers", "completion", "contributors", "name")

    def __init__(self, name: str, sleepers: Sleepers) -> None:
        self.name = name
        self._sleepers = sleepers
        self.contributors: tuple[int, ...] = ()
        self.completion: Completion | None = None
        self._result: Any = None
        self._error: Exception | None = None
        self._done = False
        self._lock = threading.Lock()  # held until completion: the cheapest thing a thread can sleep on
        self._lock.acquire()

    def done(self) -> bool:
        """Return whether `wait` would return (or raise) at once."""
        return self._done

    def completions(self) -> list[Completion]:
        """After `wait`: return what the results are behind; nothing on the host."""
        return [] if self.completion is None else [self.completion]

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the collective is complete and return its result: an array, a list of arrays, None for a barrier.

        May be called again, and returns the same.

        Raises:
            HorovodInternalError: when the collective failed; see `hvdlite.core.errors`.
            TimeoutError: when it took longer than `timeout` seconds; the collective goes on.
        """
        if not self._done:
            begun = self._sleepers.progress.block()
            self._sleepers.add(self)
            acquired = self._lock.acquire(timeout=-1 if timeout is None else timeout)
            self._sleepers.remove(self)
            self._sleepers.progress.unblock(begun)
            if not acquired:
                raise TimeoutError(f"'{self.name}' is not complete after {timeout} s")
            self._lock.release()  # for other waiters
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result

    def _complete(self, result: Any, contributors: tuple[int, ...], completion: Completion | None = None) -> None:
        self._result, self.contributors, self.completion = result, contributors, completion
        self._finish()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self._sleepers.remove(self)
        self._lock.release()


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
