"""The barrier of the ranks of one host: counters in shared memory, and bells that wake those that wait.

Every rank counts its own arrivals in a place that only it writes, rings the others, and waits until all counters have
reached its own. A rank whose bell is rung looks at the counters again; the last to arrive does not wait at all.

Everything that a rank reads and writes before the barrier happens before everything that any rank reads and writes after it.
On x86 the order of plain stores and loads is enough for that. Elsewhere a counter may become visible before the data that it
stands for, and data may be loaded before the counter. There every rank calls the host's fence twice: before it writes its
counter, and after it has seen the others'. docs/decisions/0021 has the argument, tests/planes/test_memory_order.py a model.
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

    @property
    def fence(self) -> Callable[[], None] | None:
        """Order memory between the ranks that call it; None where the machine does."""


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
        arrivals, fence, due = self._counters.arrivals, self._counters.fence, self._count
        if fence is not None:
            fence()
        arrivals[self._index] = due
        for rank in self._others:
            self._ring(rank)
        wait_until(lambda: bool((arrivals >= due).all()))
        if fence is not None:
            fence()
