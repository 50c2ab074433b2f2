"""Staging memory of a process set within one host: a slot for each rank and region, and a barrier.

Pieces take turns with three regions, and a barrier follows each piece that is written. A slot is written again three pieces
later. The last read of a slot may come after the next piece's barrier (reductions collect there), but comes before the
barrier of the piece after that, which every rank has passed by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from hvdlite.core.array import Array
from hvdlite.memory.shared import Segment
from hvdlite.planes.base import WaitUntil
from hvdlite.planes.exchange import Exchange
from hvdlite.planes.shm_barrier import Barrier, WakeRanks

KEPT: Final = 64
"""Exchanges that are kept."""


class HostMemory(Protocol):
    """The interface of `memory.SharedMemory` for planes."""

    def segment(self, ranks: Sequence[int], slot: int) -> Segment | None: ...

    def window(self, nbytes: int, ranks: Sequence[int]) -> list[Array]: ...

    def close(self) -> None: ...


class StagingArea:
    """The staging memory of a process set's ranks on this host; ranks are indices in the set.

    Attributes:
        barrier: the barrier of these ranks.
        places: the slots as bytes, by region and rank.
        exchanges: those that were used last, by their responses' `id`.
    """

    def __init__(self, rank: int, ranks: tuple[int, ...], segment: Segment, wake_ranks: WakeRanks) -> None:
        self.ranks, self.segment = ranks, segment
        self.index, self.size = ranks.index(rank), len(ranks)
        self.barrier = Barrier(rank, ranks, segment, wake_ranks)
        self._pieces = 0
        self.places = [[segment.staging(each, region) for each in range(self.size)] for region in range(segment.regions)]
        self.exchanges: dict[int, Exchange] = {}

    def next_region(self, nbytes: int) -> int:
        """Return the region for the next piece, and allocate `nbytes` in this rank's slot."""
        region = self._pieces % self.segment.regions
        self._pieces += 1
        self.segment.reserve(region, nbytes)
        return region

    def slot(self, index: int, region: int, dtype: np.dtype[np.generic]) -> Array:
        """Return a rank's slot as elements of `dtype`."""
        staging = self.places[region][index]
        return staging[:staging.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def keep(self, exchange: Exchange) -> Exchange:
        """Keep it for the next plan of its response."""
        if len(self.exchanges) >= KEPT:
            self.exchanges.clear()
        self.exchanges[id(exchange.response)] = exchange
        return exchange

    def close(self) -> None:
        """Unmap the memory. The pages remain: a slower rank may still read them."""
        self.exchanges.clear()
        self.places.clear()
        self.segment.close()

    def total(self, values: Array, wait_until: WaitUntil) -> Array:
        """Return the sum of all ranks' float64 arrays, in rank order; the array must fit into a slot."""
        region = self.next_region(values.nbytes)
        self.slot(self.index, region, values.dtype)[:values.size] = values.reshape(-1)
        self.barrier(wait_until)
        result = np.zeros(values.size)
        for index in range(self.size):
            result += self.slot(index, region, values.dtype)[:values.size]
        return result.reshape(values.shape)
