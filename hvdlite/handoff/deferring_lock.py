"""A lock for which the background thread never waits: what it has to do under the lock is done when that is free.

Its holder may be interrupted by a signal handler that waits for the background thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class DeferringLock:
    """A lock of user threads, with what the background thread has to do under it.

    Attributes:
        lock: the lock itself; a signal handler may acquire it again in the thread that holds it.

    Args:
        later: called by user threads: lets the background thread call a function.
    """

    def __init__(self, later: Callable[[Callable[[], None]], None]) -> None:
        self.lock = threading.RLock()
        self._later, self._deferred = later, deque[Callable[[], object]]()

    @property
    def is_busy(self) -> bool:
        """Whether the background thread has not got the lock yet."""
        return bool(self._deferred)

    def when_unlocked(self, act: Callable[[], object]) -> None:
        """Call a function under the lock: now, or when the thread that holds it has finished. The background thread's."""
        self._deferred.append(act)
        self._act()

    def let_act(self) -> None:
        """A user thread has released the lock, if it is no signal handler inside another call."""
        if self._deferred:
            self._later(self._act)

    def _act(self) -> None:
        while self._deferred and self.lock.acquire(blocking=False):
            try:
                self._deferred.popleft()()
            finally:
                self.lock.release()
