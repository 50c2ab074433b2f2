"""The signals that end a job: after a failure, and after the user's signal.

After a failure, the other ranks get a grace period to end by themselves: they are notified of it, and their own messages are
useful. Then they receive SIGTERM, and later SIGKILL.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

GRACE: Final = 3.0
"""Seconds between a failure and SIGTERM for the other ranks."""
GRACE_AFTER_LOSS: Final = 1.0
"""The same after the loss of a host, whose detection has taken seconds already."""
KILL_AFTER: Final = 1.5
"""Seconds between SIGTERM and SIGKILL after a failure."""
INTERRUPT_GRACE: Final = 5.0
"""Seconds between the user's signal and SIGKILL."""


class Termination:
    """The schedule of signals for the running ranks.

    Attributes:
        user_signal: the first signal of the user; 0 for none.
        late_signal: the first one while or after the job is cleaned up; it ends only the wait for readers of the output.
        is_over: whether the job is being cleaned up.
    """

    def __init__(self) -> None:
        self.user_signal = self.late_signal = 0
        self.is_over = False
        self._pending: list[tuple[float, int]] = []  # (time, signal), in order

    def schedule(self, grace: float) -> None:
        """Schedule SIGTERM and SIGKILL after a failure, unless signals are scheduled already."""
        if not self._pending and not self.user_signal:
            now = time.monotonic()
            self._pending = [(now + grace, signal.SIGTERM), (now + grace + KILL_AFTER, signal.SIGKILL)]

    def interrupt(self, signum: int, frame: FrameType | None = None) -> None:
        """Schedule the signals after a signal of the user; a second one kills the ranks immediately."""
        now = time.monotonic()
        if self.is_over:
            self.late_signal = self.late_signal or signum
            return
        if self.user_signal:
            self._pending = [(now, signal.SIGKILL)]
        else:
            self.user_signal = signum
            first = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
            self._pending = [(now, first), (now + INTERRUPT_GRACE, signal.SIGKILL)]

    def due(self) -> Iterator[int]:
        """Yield the signals that are due, and remove them from the schedule."""
        while self._pending and self._pending[0][0] <= time.monotonic():
            yield self._pending.pop(0)[1]

    def waits(self) -> list[float]:
        """Return the seconds until the next signal; an empty list if none is scheduled."""
        return [max(0.0, self._pending[0][0] - time.monotonic())] if self._pending else []

    @contextmanager
    def handlers(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP (but not under nohup) by an orderly end of the job.

        SIGCHLD is handled as well: it wakes the loop for adopted orphans. If it were ignored, as inherited from some
        parents, the kernel would not keep exit codes.
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))
        ending = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            ending.remove(signal.SIGHUP)
        before = {signal.SIGTSTP: signal.getsignal(signal.SIGTSTP)}
        before |= {signum: signal.signal(signum, self.interrupt) for signum in ending}
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            os.close(reader)
            os.close(writer)
