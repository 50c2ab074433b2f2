"""A doorbell between threads or processes: an eventfd where there is one, else a pipe."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

FORKED_SECONDS = 0.1
"""A ring takes microseconds; only in a forked child can the lock be held for ever, by a thread that is not there."""


class Doorbell:
    """Ringing makes the descriptor readable until it is cleared; rings do not add up.

    Its descriptors can be sent to another process (`descriptors`, then `Doorbell(received)`), which can then ring it.
    """

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        self._lock = threading.RLock()  # a signal handler may ring in the middle of a ring
        self.descriptors: tuple[int, ...]
        if descriptors:
            self.descriptors = tuple(descriptors)
        elif hasattr(os, "eventfd"):
            self.descriptors = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),)
        else:
            self.descriptors = os.pipe()
            for descriptor in self.descriptors:
                os.set_blocking(descriptor, False)

    def ring(self) -> None:
        """Make the descriptor readable; never blocks, safe in a signal handler."""
        with self._lock:  # a descriptor that was closed may be another file by now
            if not self.descriptors:
                return  # closed: nobody waits any more
            try:
                os.write(self.descriptors[-1], (1).to_bytes(8, "little"))
            except BlockingIOError:
                pass  # the pipe is full: it has been rung and not cleared

    def clear(self) -> None:
        """Forget past rings."""
        try:
            while len(os.read(self.descriptors[0], 4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self.descriptors[0]

    def close(self) -> None:
        """Close the descriptors, once."""
        acquired = self._lock.acquire(timeout=FORKED_SECONDS)
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
        if acquired:
            self._lock.release()
