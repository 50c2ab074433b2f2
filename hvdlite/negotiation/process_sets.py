"""The table of process sets, which every rank has and which changes by decisions only. Pure.

Any two ranks are a process set from the beginning, for sends between them. Its negative id is computed from the two ranks,
so it need not be announced.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID


def pair_set_id(one: int, other: int, size: int) -> int:
    """Return the id of the set of two ranks of a job of `size` ranks."""
    return -(1 + min(one, other) * size + max(one, other))


class ProcessSetTable:
    """The ascending ranks of each process set, by id. Set 0 is all ranks. Ids are never used again; pairs are not listed."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: dict[int, tuple[int, ...]] = {GLOBAL_PROCESS_SET_ID: tuple(range(size))}
        self._next = 1

    def __getitem__(self, process_set_id: int) -> tuple[int, ...]:
        return self._pair(process_set_id) if process_set_id < 0 else self._ranks[process_set_id]

    def __contains__(self, process_set_id: object) -> bool:
        return process_set_id in self._ranks or (isinstance(process_set_id, int) and -self._size ** 2 <= process_set_id < 0)

    def among(self, process_set_id: int, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `ranks` that are in a set."""
        if process_set_id == GLOBAL_PROCESS_SET_ID:
            return ranks  # the common case; a search for each would cost ranks x ranks
        members = self[process_set_id]
        if len(ranks) == self._size:
            return members
        return tuple(rank for rank in ranks if rank in members)

    def find(self, ranks: Sequence[int]) -> int | None:
        """Return the id of the set with these members, or None."""
        wanted = tuple(sorted(ranks))
        return next((process_set_id for process_set_id, members in self._ranks.items() if members == wanted), None)

    def add(self, ranks: Sequence[int]) -> int:
        """Add a set and return its id."""
        process_set_id = self._next
        self._next += 1
        self._ranks[process_set_id] = tuple(sorted(ranks))
        return process_set_id

    def remove(self, process_set_id: int) -> None:
        """Forget a set."""
        assert process_set_id != GLOBAL_PROCESS_SET_ID, "all ranks are a set for ever"
        del self._ranks[process_set_id]

    def _pair(self, process_set_id: int) -> tuple[int, ...]:
        return divmod(-1 - process_set_id, self._size)

