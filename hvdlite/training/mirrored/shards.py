"""Each rank's shard of a global batch, and its weight in averages over the ranks."""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.training.mirrored.replica_group import ReplicaGroup


def shard(rows: int, rank: int, size: int) -> slice:
    """Return a rank's rows of a global batch.

    Shards are contiguous, in rank order, and differ by one row at most; the first ranks have the longer ones. A batch with
    fewer rows than there are ranks goes to all ranks whole: then every rank computes the same, and none is idle.

    Args:
        rows: of the global batch.
    """
    return slice(0, rows) if rows < size else disjoint_shard(rows, rank, size)


def disjoint_shard(rows: int, rank: int, size: int) -> slice:
    """Return a rank's rows, so that every row belongs to exactly one rank.

    Like `shard`, but of a batch with fewer rows than there are ranks, the first ranks take one row each, the others none.
    """
    each, more = divmod(rows, size)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


def shard_weight(rows: int, rank: int, size: int) -> float:
    """Return the weight of a rank's mean in the average of all ranks' means: 1 when all shards are equally long."""
    if rows < size:
        return 1.0
    mine = shard(rows, rank, size)
    return float((mine.stop - mine.start) * size / rows)


class CurrentBatch:
    """The global batch that a strategy's script works on: of the loops that are not over, the last batch taken counts.

    Args:
        set_weight: called with the weight of this rank's gradients whenever the current batch changes.
    """

    def __init__(self, replicas: ReplicaGroup, set_weight: Callable[[float], None]) -> None:
        self._replicas, self._set_weight = replicas, set_weight
        self._loops: list[tuple[object, int]] = []  # loops that are not over, and the rows of their batches

    @property
    def weight(self) -> float:
        """The weight of this rank's mean over the batch in the average of all ranks' means."""
        return shard_weight(self._loops[-1][1], self._replicas.replica_id, self._replicas.size) if self._loops else 1.0

    @property
    def is_repeated(self) -> bool:
        """Whether every rank has the whole batch."""
        return bool(self._loops) and self._loops[-1][1] < self._replicas.size

    def reached(self, loop: object, rows: int) -> None:
        """Record that a loop has reached its next batch."""
        self._loops = [entry for entry in self._loops if entry[0] is not loop] + [(loop, rows)]
        self._set_weight(self.weight)

    def over(self, loop: object) -> None:
        """Record that a loop has ended; the batch of the enclosing loop is current again."""
        self._loops = [entry for entry in self._loops if entry[0] is not loop]
        self._set_weight(self.weight)
