"""A call of a group: under way, done, or failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from hvdlite.diagnostics.progress import Progress
from hvdlite.groups.operation import Operation
from hvdlite.handoff.group_state import GroupState

_log = logging.getLogger("hvdlite")


class Call:
    """Some operations that one rank starts together, and the result of all of them.

    Attributes:
        operations: carried out one after the other.
        timeout: seconds that it may take, once it has begun; None for the group's.
        place: its number in the group's queue, from 1; 0 if it never was in the queue, so that no order depends on it.
        error: what it failed with; None while it is under way, and when it has succeeded.
        ended: when it was over, by `time.monotonic`.
        source: the rank that has sent what this call receives; -1 for other calls, and before it is known.
        progress: counts the time that threads wait for it.
        help: called by a thread that begins to wait: it carries the call out if no other thread can.
        state: is aware of threads that wait for it, however long that takes.

    Args:
        finish: called when the operations are done, before the call is: for example, it copies results to where they belong.
    """

    def __init__(self, operations: Sequence[Operation], progress: Progress, finish: Callable[[], None] | None = None,
                 timeout: float | None = None) -> None:
        self.progress = progress
        self.help: Callable[[Call], None] | None = None
        self.state: GroupState | None = None
        self.operations, self.finish, self.timeout = operations, finish, timeout
        self.error: Exception | None = None
        self.place, self.source, self.ended = 0, -1, 0.0
        self._is_over = False
        self._event: threading.Event | None = None  # once a thread waits
        self._callbacks: list[Callable[[Call], None]] = []
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether it is over, successfully or not."""
        return self._is_over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is over; return False when that takes longer than `timeout` seconds. Raises nothing."""
        if self._is_over:
            return True
        begun = self.progress.block()
        try:
            help_ = self.help
            if help_ is not None:
                help_(self)
            return self._wait(timeout)
        finally:
            self.progress.unblock(begun)

    def _wait(self, timeout: float | None) -> bool:
        with self._lock:
            if self._is_over:
                return True
            if self._event is None:
                self._event = threading.Event()
        state = self.state
        if timeout is not None or state is None:
            return self._event.wait(timeout)
        key = object()
        state.waiting[key] = threading.get_ident(), self._event
        try:
            return self._event.wait()
        except BaseException:
            state.waiting.pop(key, None)
            state.changed()
            raise
        finally:
            state.waiting.pop(key, None)

    def when_done(self, callback: Callable[[Call], None]) -> None:
        """Call a function when it is over: on the thread that carries it out, or at once if it is over already.

        Where the function makes collective calls, use `Group.when_over`. What it raises is logged.
        """
        with self._lock:
            if not self._is_over:
                self._callbacks.append(callback)
                return
        self._run(callback)

    def end(self, error: Exception | None = None) -> None:
        """It is over; called once, by the thread that has carried it out."""
        with self._lock:
            self.error, self.ended = error, time.monotonic()
            self._is_over = True
            self.help = None
            if self._event is not None:
                self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._run(callback)

    def _run(self, callback: Callable[[Call], None]) -> None:
        try:
            callback(self)
        except Exception:
            _log.exception("a callback of a call of a group failed")


def when_all_done(calls: Sequence[Call], callback: Callable[[], None]) -> None:
    """Call a function when all of these calls are over; see `Call.when_done`."""
    for index, call in enumerate(calls):
        if not call.is_done:
            call.when_done(lambda _, rest=calls[index + 1:]: when_all_done(rest, callback))  # type: ignore[misc]
            return
    callback()
