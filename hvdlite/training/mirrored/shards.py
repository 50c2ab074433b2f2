"""Each rank's shard of a global batch, and its weight in averages over the ranks."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

from hvdlite.training.mirrored.replica_group import ReplicaGroup


def disjoint_shard(rows: int, rank: int, size: int) -> slice:
    """Return a rank's rows of a global batch, so that every row belongs to exactly one rank.

    Like an `equal_split`, but of a batch with fewer rows than there are ranks, the first ranks take one row each, the others
    none.
    """
    each, more = divmod(rows, size)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


@functools.lru_cache(maxsize=256)
def rows_of_ranks(rows: int, shares: tuple[float, ...], limits: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return how many rows each rank gets, so that the largest of rows / share is as small as whole rows allow.

    Rows are given away one by one, each to the rank whose (rows + 1) / share is smallest then: the method of D'Hondt. Every
    rank gets at least one row. Counts of equal shares differ by one row at most; the first ranks have the larger ones.

    Args:
        rows: of the global batch, at least as many as there are ranks.
        shares: of each rank, in any unit.
        limits: the most rows of each rank.

    Raises:
        ValueError: when the limits leave no room for so many rows.
    """
    most = limits or (rows,) * len(shares)
    if sum(most) < rows:
        raise ValueError(f"a global batch of {rows} rows is larger than max_rows={list(most)} allow together, {sum(most)}: "
                         "make batches smaller, or max_rows larger")
    each = (rows - len(shares)) / math.fsum(shares)  # whole rows of this many a share do not exceed the result
    counts = [min(limit, max(1, int(each * share))) for limit, share in zip(most, shares, strict=True)]
    heap = [((count + 1) / share, rank) for rank, (count, share) in enumerate(zip(counts, shares, strict=True))
            if count < most[rank]]
    heapq.heapify(heap)
    for _ in range(rows - sum(counts)):
        _, rank = heapq.heappop(heap)
        counts[rank] += 1
        if counts[rank] < most[rank]:
            heapq.heappush(heap, ((counts[rank] + 1) / shares[rank], rank))
    return tuple(counts)


class Split(NamedTuple):
    """How global batches are divided among the replicas.

    Attributes:
        replica_id: this rank.
        shares: of each replica, in any unit.
        limits: the most rows of each replica; None where there is no limit.
    """

    replica_id: int
    shares: tuple[float, ...]
    limits: tuple[int, ...] | None = None

    def own(self, rows: int) -> slice:
        """Return this rank's rows of a global batch.

        Shards are contiguous, in rank order. A batch with fewer rows than there are ranks goes to all ranks whole: then
        every rank computes the same, and none is idle.
        """
        if rows < len(self.shares):
            return slice(0, rows)
        counts = rows_of_ranks(rows, self.shares, self.limits)
        begin = sum(counts[:self.replica_id])
        return slice(begin, begin + counts[self.replica_id])

    def weight(self, rows: int) -> float:
        """Return the weight of this rank's mean in the average of all ranks' means: 1 when all shards are equally long."""
        if rows < len(self.shares):
            return 1.0
        return rows_of_ranks(rows, self.shares, self.limits)[self.replica_id] * len(self.shares) / rows


def equal_split(replica_id: int, size: int) -> Split:
    """Return the split among ranks with equal shares."""
    return Split(replica_id, (1.0,) * size)


class CurrentBatch:
    """The global batch that a strategy's script works on: of the loops that are not over, the last batch taken counts.

    Args:
        set_weight: called with the weight of this rank's gradients whenever the current batch changes.
    """

    def __init__(self, replicas: ReplicaGroup, set_weight: Callable[[float], None]) -> None:
        self._replicas, self._set_weight = replicas, set_weight
        self._loops: list[tuple[object, int, float]] = []  # loops that are not over; their batches' rows and weights

    @property
    def weight(self) -> float:
        """The weight of this rank's mean over the batch in the average of all ranks' means."""
        return self._loops[-1][2] if self._loops else 1.0

    @property
    def is_repeated(self) -> bool:
        """Whether every rank has the whole batch."""
        return bool(self._loops) and self._loops[-1][1] < self._replicas.size

    def reached(self, loop: object, rows: int, weight: float) -> None:
        """Record that a loop has reached its next batch, in which this rank has a weight."""
        self._loops = [entry for entry in self._loops if entry[0] is not loop] + [(loop, rows, weight)]
        self._set_weight(self.weight)

    def over(self, loop: object) -> None:
        """Record that a loop has ended; the batch of the enclosing loop is current again."""
        self._loops = [entry for entry in self._loops if entry[0] is not loop]
        self._set_weight(self.weight)
