"""A rank's shard of a global batch: which rows it takes."""

from __future__ import annotations


def shard(rows: int, rank: int, size: int) -> slice:
    """Return which rows of a global batch a rank takes.

    Shards are contiguous, in rank order, and differ by one row at most; the first ranks have the longer ones. A batch with
    fewer rows than there are ranks goes to all ranks whole: then every rank computes the same, and nobody stands still.

    Args:
        rows: of the global batch.
    """
    return slice(0, rows) if rows < size else disjoint_shard(rows, rank, size)


def disjoint_shard(rows: int, rank: int, size: int) -> slice:
    """Return which rows a rank takes when every row is taken by exactly one rank.

    Like `shard`, but of a batch with fewer rows than there are ranks, the first ranks take one row each, the others none.
    """
    each, more = divmod(rows, size)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


def shard_weight(rows: int, rank: int, size: int) -> float:
    """Return what a rank's mean counts in the average of all ranks' means: 1 when all shards are equally long."""
    if rows < size:
        return 1.0
    mine = shard(rows, rank, size)
    return float((mine.stop - mine.start) * size / rows)
