"""Whether this process itself stood still: stopped by a signal, swapped out, or frozen with its machine.

What others have sent meanwhile has not been read, so their silence means nothing.
"""

from __future__ import annotations

import math
from typing import Final

_LATE_SECONDS: Final = 2.0
"""Seconds by which a loop is late on a busy machine."""


def standstill(last: float, now: float, period: float) -> float:
    """Return for how many seconds this process stood still before a turn of a loop; 0 if it did not.

    Args:
        last: the time of the turn before; infinitely early for the first one.
        period: the seconds after which the next turn was due.
    """
    late = now - last - period
    return late if _LATE_SECONDS < late < math.inf else 0.0
