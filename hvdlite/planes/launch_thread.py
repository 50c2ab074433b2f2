"""A thread for library calls that cannot be interrupted (docs/protocol.md#threads)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from hvdlite.planes.base import WaitUntil

T = TypeVar("T")




class LaunchThread:
    """Executes calls one after the other. A call that does not return is abandoned with its thread.

    Args:
        begin: called by the thread before the first call.
        wake: makes the waiting background thread evaluate its predicate.
    """

    def __init__(self, name: str, wake: Callable[[], None], begin: Callable[[], None] = lambda: None) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._wake, self._begin = wake, begin
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def run(self, function: Callable[[], T], wait_until: WaitUntil) -> T:
        """Call `function` in the thread, and return its result or raise its exception.

        The background thread handles messages within `wait_until` meanwhile. If `wait_until` raises, the call is abandoned.
        """
        if not self._started:
            self._started = True
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((function, future))
        wait_until(future.done)
        return future.result()

    def end(self, timeout: float) -> bool:
        """End the thread after the calls so far; return whether it has ended within `timeout` seconds."""
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
            function, future = call
            try:
                if begun is not None:
                    raise begun
                future.set_result(function())
            except BaseException as error:  # raised by `run`
                future.set_exception(error)
            del call, function, future  # release their references before the next call
            self._wake()


