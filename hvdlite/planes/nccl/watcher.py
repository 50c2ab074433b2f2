"""What happens to work after it was launched: completions, a look at it from time to time, the end of communicators."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from hvdlite.core.errors import HorovodInternalError
from hvdlite.planes.nccl.device import Communicator, Device, PooledEvent, check_not_captured

_log = logging.getLogger("hvdlite")

POLL_SECONDS: Final = 0.01
"""Between two looks at work under way. Nobody waits for a look: it frees what nobody fetches, and sees errors."""
MAX_POLL_SECONDS: Final = 1.0
"""What a look never takes, unless it hangs."""
_MIN_SLEEP, _MAX_SLEEP = 20e-6, 1e-3


class LaunchedWork:
    """A completion: one entry's share of a launch.

    Attributes:
        keep_alive: what must stay alive until a stream of the framework, or the host, is behind the work.
    """

    __slots__ = ("_device", "_watcher", "event", "keep_alive")

    def __init__(self, device: Device, event: PooledEvent, watcher: Watcher, keep_alive: object = None) -> None:
        self._device, self.event, self._watcher, self.keep_alive = device, event, watcher, keep_alive

    @property
    def device(self) -> int:
        """The GPU's number."""
        return self._device.index

    def for_entry(self, keep_alive: object) -> LaunchedWork:
        """Return another entry's share of the same launch."""
        share = LaunchedWork(self._device, self.event, self._watcher, keep_alive)
        self._watcher.watch(share)
        return share

    def block_stream(self, stream: int) -> None:
        self._watcher.raise_failure()
        check_not_captured(self._device, stream)
        self._device.wait(stream, self.event.handle)
        self.keep_alive = None

    def is_done(self) -> bool:
        return self._device.is_event_done(self.event.handle)

    def wait(self) -> None:
        sleep = _MIN_SLEEP
        while not self.is_done():
            self._watcher.raise_failure()
            time.sleep(sleep)
            sleep = min(2 * sleep, _MAX_SLEEP)
        self._watcher.raise_failure()
        self.keep_alive = None


class Watcher:
    """Looks at launched work until it is done, on a thread of its own that sleeps while there is none.

    Args:
        check: looks for errors that NCCL met by itself; raises them.
        fail: is told of the first error, once.
    """

    def __init__(self, device: Device, check: Callable[[], None], fail: Callable[[Exception], None]) -> None:
        self._device, self._check, self._fail = device, check, fail
        self._pending: deque[LaunchedWork] = deque()
        self._failure: HorovodInternalError | None = None
        self._condition = threading.Condition()
        self._polling = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="hvdlite-nccl-watcher", daemon=True)
        self._started = False

    def watch(self, launched: LaunchedWork) -> None:
        """Look after a completion until it has passed; in the order of their launches."""
        with self._condition:
            self._pending.append(launched)
            if not self._started:
                self._started = True
                self._thread.start()
            self._condition.notify()

    def drain(self, timeout: float) -> bool:
        """Wait until everything has passed; return whether it did within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._pending and self._failure is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS / 2)
        return not self._pending

    def end(self, failure: HorovodInternalError | None) -> None:
        """Look no more; with a failure, nothing can be waited for any more either."""
        with self._condition:
            self._ended = True
            self._failure = self._failure or failure
            self._condition.notify()

    def wait_for_poll(self) -> None:
        """Return when no look is under way that began before: then communicators that later looks do not find may end."""
        if self._polling.acquire(timeout=MAX_POLL_SECONDS):
            self._polling.release()

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def _run(self) -> None:
        try:
            self._device.make_current()
            while self._wait_for_work():
                self._poll()
                time.sleep(POLL_SECONDS)
        except Exception as error:
            text = error if isinstance(error, HorovodInternalError) else HorovodInternalError(
                f"a GPU failed while work was under way: {self._device.explain(None, error)}")
            self.end(text)
            self._fail(text)

    def _wait_for_work(self) -> bool:
        with self._condition:
            while not self._pending and not self._ended:
                self._condition.wait()
            return not self._ended

    def _poll(self) -> None:
        while self._pending and self._pending[0].is_done():
            self._pending.popleft().keep_alive = None
        with self._polling:
            if self._pending and not self._ended:
                self._check()


class CommunicatorRef:
    """A communicator that garbage collection cannot end: CuPy would call `ncclCommDestroy`, which waits for other ranks.

    Args:
        ranks: between which it is.
    """

    def __init__(self, communicator: Communicator, ranks: tuple[int, ...] = ()) -> None:
        self.communicator, self.ranks = communicator, ranks
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))

    def end(self) -> None:
        """Abort the communicator; only then may it be collected."""
        self.communicator.abort()
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self.communicator))


def abort(refs: Sequence[CommunicatorRef], device: Device, timeout: float) -> int:
    """Abort communicators, each in a thread of its own: one after the other can hang (nccl issue 1013).

    Return how many have not come back within `timeout` seconds; their threads are left behind.
    """
    def end(ref: CommunicatorRef) -> None:
        try:
            device.make_current()
            ref.end()
        except Exception as error:
            _log.warning("aborting a communicator failed: %s", device.explain(None, error))

    threads = [threading.Thread(target=end, args=(ref,), name="hvdlite-nccl-abort", daemon=True) for ref in refs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return sum(thread.is_alive() for thread in threads)
