"""A doorbell between threads or processes: an eventfd where the system has it, else a pipe."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from hvdlite.core.kernel_files import open_eventfd

FORKED_SECONDS = 0.1
"""A ring takes microseconds. In a forked child the lock may stay locked by a thread that does not exist there."""


class Doorbell:
    """A descriptor that a ring makes readable until it is cleared; several rings count as one.

    To ring it from another process, send its `descriptors` there and make `Doorbell(received)`.
    """

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        self._lock = threading.RLock()  # a signal handler may ring in the middle of a ring
        self._pid = os.getpid()
        self.descriptors: tuple[int, ...]
        if descriptors:
            self.descriptors = tuple(descriptors)
        elif (descriptor := open_eventfd()) >= 0:
            self.descriptors = (descriptor,)
        else:
            self.descriptors = os.pipe()
            for descriptor in self.descriptors:
                os.set_blocking(descriptor, False)

    def ring(self) -> None:
        """Make the descriptor readable; never blocks, safe in a signal handler."""
        with self._lock:  # the number of a closed descriptor may be reused for another file
            if not self.descriptors:
                return  # closed
            try:
                os.write(self.descriptors[-1], (1).to_bytes(8, "little"))
            except BlockingIOError:
                pass  # the pipe is full: rung and not cleared yet

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
        acquired = self._lock.acquire(timeout=-1 if os.getpid() == self._pid else FORKED_SECONDS)
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
        if acquired:
            self._lock.release()
