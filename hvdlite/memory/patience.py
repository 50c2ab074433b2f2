"""Polling before sleeping: how long a thread looks for what another rank writes, learned from how that went.

A wake-up takes 5 to 50 us, so a thread that looks in time wins that. On a machine with other work polling loses: the
scheduler lets who has used its core wait behind others. Neither is known beforehand, so the outcome decides.

- What comes in time costs nothing: polling goes on.
- After `VAIN` times in a row in vain, the thread sleeps at once for a number of waits, which doubles each time.
- A look that took more than twice its time has lost its core meanwhile: the pause grows fourfold.
- `PROOF` times in time in a row halve the next pause.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

VAIN: Final = 4
PROOF: Final = 256
SHORTEST, LONGEST = 16, 8192
"""Waits without polling."""
_EVERY: Final = 16
"""Looks between two glances at the clock."""


class Patience:
    """Polls for one kind of event.

    Args:
        seconds: how long at most; 0 turns polling off.
        clock: in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds, self._clock = seconds, clock
        self._pause, self._left = SHORTEST, 0  # the next pause, and what is left of this one
        self._vain = self._in_time = 0  # in a row

    def look(self, has_come: Callable[[], object]) -> bool:
        """Return whether something has come while this thread polled for it; if not, it may sleep.

        Args:
            has_come: returns something true when it has.
        """
        if self._left:
            self._left -= 1
            return False
        if not self._seconds:
            return False
        clock, now = self._clock, 0.0
        until = clock() + self._seconds
        while now < until:
            for _ in range(_EVERY):
                if has_come():
                    self._succeeded()
                    return True
            now = clock()
        self._in_time = 0
        self._vain += 1
        if now > until + self._seconds:
            self._rest(4)
        elif self._vain >= VAIN:
            self._rest(2)
        return False

    @classmethod
    def of_ranks(cls, seconds: float, ranks: int) -> Patience:
        """Return the patience of threads of so many ranks of a host: none where it has no core for each."""
        return cls(seconds if ranks <= (os.cpu_count() or 1) else 0.0)

    def _succeeded(self) -> None:
        self._vain = 0
        self._in_time += 1
        if self._in_time == PROOF:
            self._in_time, self._pause = 0, max(SHORTEST, self._pause // 2)

    def _rest(self, factor: int) -> None:
        self._vain, self._left, self._pause = 0, self._pause, min(LONGEST, self._pause * factor)
