"""The barrier of the ranks of one host: counters in shared memory, and bells that wake those that wait.

Every rank counts its own arrivals in a place that only it writes, rings the others, and waits until all counters have
reached its own. A rank whose bell is rung looks at the counters again; the last to arrive does not wait at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hvdlite.core.array import Array
from hvdlite.planes.base import WaitUntil


class Counters(Protocol):
    """What a barrier needs of `memory.Segment`.

    Attributes:
        arrivals: how often each rank has arrived; shared, and zeros at first.
    """

    arrivals: Array


class Barrier:
    """One rank's end of a barrier that is used again and again.

    Args:
        rank: this one.
        ranks: those that meet, this one included; in the order of the counters.
        ring: wakes another rank that may be waiting.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], counters: Counters, ring: Callable[[int], None]) -> None:
        self._index, self._counters, self._ring = ranks.index(rank), counters, ring
        self._others = [other for other in ranks if other != rank]
        self._count = 0

    def __call__(self, wait_until: WaitUntil) -> None:
        """Wait until every rank has come here as often as this one."""
        self._count += 1
        arrivals, due = self._counters.arrivals, self._count
        arrivals[self._index] = due
        for rank in self._others:
            self._ring(rank)
        wait_until(lambda: bool((arrivals >= due).all()))
