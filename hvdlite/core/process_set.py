"""Process sets: the ranks that take part in a collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

GLOBAL_PROCESS_SET_ID = 0


class ProcessSet:
    """A subset of the job's ranks for collectives; registered by `hvd.add_process_set` or `hvd.init`.

    Args:
        ranks: distinct ranks of the job, in any order. Or an mpi4py communicator: each rank passes the one that it is a
            member of, and all parts of a split are registered together.

    Attributes:
        process_set_id: the id, equal on all ranks; None while the set is not registered.
        ranks: the members, ascending. A communicator's members are known after registration; MPI's null communicator has
            none.
        mpi_comm: the communicator, or None.
        registered_ids: the ids of this set and of the other parts of the split.

    Raises:
        ValueError: if ranks are not distinct non-negative integers.
    """

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        self.mpi_comm = ranks if hasattr(ranks, "Get_group") else None
        given = [] if self.mpi_comm is not None else list(ranks)
        if any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in given):
            raise ValueError(f"a process set is made of ranks (integers from 0), not {given}")
        if len(set(given)) != len(given):
            raise ValueError(f"a process set contains each rank once, not {given}")
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(given)
        self.registered_ids: tuple[int, ...] = ()
        self._own_rank: int | None = None

    def size(self) -> int | None:
        """Return the number of members; None while the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank within the set; None while the set is not registered.

        Raises:
            ValueError: if this process is not a member.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        if self._own_rank not in self.ranks:
            raise ValueError(f"rank {self._own_rank} is not a member of {self}")
        return self.ranks.index(self._own_rank)

    def included(self) -> bool | None:
        """Return whether this process is a member; None while the set is not registered."""
        return None if self.process_set_id is None or self.ranks is None else self._own_rank in self.ranks

    def register(self, process_set_id: int | None, own_rank: int | None, registered_ids: Sequence[int] = ()) -> None:
        """Set the id of a registered set, or None for a removed one.

        Args:
            process_set_id: the new id.
            own_rank: this process's rank in the job.
            registered_ids: the ids of this set and of the other parts of the split.
        """
        self.process_set_id, self._own_rank = process_set_id, own_rank
        self.registered_ids = tuple(registered_ids) or (() if process_set_id is None else (process_set_id,))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """The process set of all ranks; `init` sets its members."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = GLOBAL_PROCESS_SET_ID
        self.ranks = None

    def set_members(self, size: int, own_rank: int) -> None:
        """Set the members to the ranks of a job of `size` ranks."""
        self.ranks, self._own_rank = list(range(size)), own_rank


global_process_set = _GlobalProcessSet()
