"""The ranks that have joined: they have no more data and wait until all ranks have called `join()`. Pure."""

from __future__ import annotations


class Joins:
    """The joins of a job.

    The last rank to join is told to all. When nothing was reduced without a joined rank since the join before, that join's
    last rank is named again: its parameters are as new as any other rank's, and nested joins (of several optimizers) name
    the same rank.

    Attributes:
        ranks: those that have joined, in order.
        count: how often all ranks have joined.
        was_missed: something was carried out without a rank that has joined.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, None] = {}
        self.count = 0
        self.was_missed = False
        self._last: int | None = None

    def name_last(self) -> int:
        """Return the last rank of the join that is complete now."""
        if self.was_missed or self._last is None:
            self._last = next(reversed(self.ranks))
        return self._last

    def complete(self) -> None:
        """All ranks have joined; they all take part again."""
        self.ranks.clear()
        self.was_missed = False
        self.count += 1
