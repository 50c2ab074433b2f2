"""A thread for engines whose calls cannot be interrupted (docs/protocol.md#threads)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from hvdlite.planes.base import WaitUntil

T = TypeVar("T")


class _Call:
    __slots__ = ("done", "error", "function", "result")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = False


class LaunchThread:
    """Makes calls, one after the other. One that does not return is abandoned with its thread.

    Args:
        begin: called by the thread before the first call.
        wake: makes the waiting runtime thread look again.
    """

    def __init__(self, name: str, wake: Callable[[], None], begin: Callable[[], None] = lambda: None) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._wake, self._begin = wake, begin
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def run(self, function: Callable[[], T], wait_until: WaitUntil) -> T:
        """Let the thread call `function`; return what it returns, or raise what it raises.

        `wait_until` lets the caller go on with other things; when it raises, the call is left to itself.
        """
        if not self._started:
            self._started = True
            self._thread.start()
        call = _Call(function)
        self._calls.put(call)
        wait_until(lambda: call.done)
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[no-any-return]

    def end(self, timeout: float) -> bool:
        """Let the thread end after the calls so far; return whether it did within `timeout` seconds."""
        if not self._started:
            return True
        self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        begun: BaseException | None = None
        try:
            self._begin()
        except BaseException as error:
            begun = error
        while (call := self._calls.get()) is not None:
            try:
                if begun is not None:
                    raise begun
                call.result = call.function()
            except BaseException as error:  # raised where the call was ordered
                call.error = error
            call.function = _forgotten  # what it refers to must not outlive the call until the next one
            call.done = True
            self._wake()
            del call


def _forgotten() -> None:
    pass
