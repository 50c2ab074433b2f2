"""The barrier of the ranks of one host: counters in shared memory, and doorbells that wake the ranks that wait.

Every rank counts its own arrivals in a place that only it writes, and looks at all counters. The last to arrive finds that
all have reached its own, wakes the others, and does not sleep; the others wait for that. So a barrier of N ranks costs
N - 1 wake-ups.

Somebody must see that it is the last. A processor may hold a store back while it executes later loads, so two ranks that
arrive together could both miss the other's counter, and wait for ever. Therefore every rank makes a system call between
its store and its look, the flush: of these calls one is the last, all stores came before it, and so its rank sees all
counters. Several ranks may; then some ranks are woken more than once.

Everything that a rank reads and writes before the barrier happens before everything that any rank reads and writes after it.
On x86 the order of plain stores and loads is enough for that. Elsewhere a counter may become visible before the data that it
stands for, and data may be loaded before the counter. There every rank calls the host's fence twice: before it writes its
counter, and after it has seen the others'; and the flush is the host's fence, too. docs/decisions/0021 has the argument,
tests/planes/test_memory_order.py a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlite.core.array import Array
from hvdlite.planes.base import WaitUntil

WakeRanks = Callable[[Sequence[int]], object]
"""Wakes some other ranks that may be waiting; more of them is fine."""


def one_by_one(wake_rank: Callable[[int], None]) -> WakeRanks:
    """Return what wakes ranks, from what wakes one."""
    def wake_ranks(ranks: Sequence[int]) -> None:
        for rank in ranks:
            wake_rank(rank)
    return wake_ranks


class Counters(Protocol):
    """The part of `memory.Segment` that a barrier uses.

    Attributes:
        arrivals: how often each rank has arrived; shared, and zeros at first.
    """

    arrivals: Array

    @property
    def fence(self) -> Callable[[], None] | None:
        """Order memory between the ranks that call it; None where the machine does."""

    @property
    def flush(self) -> Callable[[], None]:
        """Let all ranks see what this one has written before it loads what others write; the fence where there is one."""


class Barrier:
    """One rank's end of a barrier that is used again and again.

    Args:
        rank: this one.
        ranks: those that meet, this one included; in the order of the counters.
        wake_ranks: wakes other ranks that may be waiting.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], counters: Counters, wake_ranks: WakeRanks) -> None:
        self._index, self._counters, self._wake_ranks = ranks.index(rank), counters, wake_ranks
        self._others = [other for other in ranks if other != rank]
        self._count = 0

    def __call__(self, wait_until: WaitUntil) -> None:
        """Wait until every rank has come here as often as this one."""
        self._count += 1
        arrivals, fence, due = self._counters.arrivals, self._counters.fence, self._count
        if fence is not None:
            fence()
        arrivals[self._index] = due
        self._counters.flush()
        if min(arrivals.tolist()) >= due:
            self._wake_ranks(self._others)
        wait_until(lambda: min(arrivals.tolist()) >= due)
        if fence is not None:
            fence()
