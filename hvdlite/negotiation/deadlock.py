"""Detection of ranks that wait for each other in a circle (docs/protocol.md#circular-waits). Pure.

A rank whose threads are all blocked goes on when one of its waits ends, and a wait ends when every rank has handed in what
it is for. So a rank is stuck when each of its waits needs a rank that is stuck. Ranks tell of their long waits (`Blocked`).
The coordinator knows who has handed in what. This is deadlock detection in the AND-OR model (Knapp, "Deadlock Detection in
Distributed Databases", ACM Computing Surveys 19(4), 1987), on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from hvdlite.negotiation.agreement import named_ranks
from hvdlite.negotiation.messages import Blocked, Wait

Missing = Callable[[int, Wait], Collection[int] | None]
"""For which ranks a rank's wait waits; None when it has been answered."""
_HELP = ("Call the same collectives in the same order on all ranks. Between backward() and step(), call "
         "optimizer.synchronize() on all ranks before collectives and before gradients are read, also on a rank without a "
         "backward(). Let the steps of several optimizers come in the same order everywhere, and all ranks wait for "
         "gradients in the same place (DistributedOptimizer(wait_in=), HVDLITE_WAIT_IN)")


def stuck_ranks(needs: Mapping[int, Sequence[Collection[int]]]) -> frozenset[int]:
    """Return the ranks that can never go on.

    Args:
        needs: for each blocked rank and each of its waits: the ranks that it waits for. Ranks not listed can go on.
    """
    waiting = dict(needs)
    while True:
        free = [rank for rank, waits in waiting.items() if any(waiting.keys().isdisjoint(wait) for wait in waits)]
        if not free:
            return frozenset(waiting)
        for rank in free:
            del waiting[rank]


class BlockedRanks:
    """The ranks that have told of long waits, and what these need.

    Args:
        missing: tells what a wait needs.
    """

    def __init__(self, missing: Missing) -> None:
        self._missing = missing
        self._blocked: dict[int, Blocked] = {}
        self._is_new = False  # since `to_defer` was last asked

    def update(self, rank: int, blocked: Blocked) -> None:
        """Take in what a rank says; it replaces what the rank said before."""
        self._blocked[rank] = blocked
        self._is_new = True

    def answered(self, process_set_id: int, names: Collection[str]) -> None:
        """Tensors are answered: a wait for one of them is over, and the name may be used again."""
        for rank, blocked in list(self._blocked.items()):
            if any(not wait.round_id and wait.process_set_id == process_set_id and wait.name in names
                   for wait in blocked.waits):
                del self._blocked[rank]

    def to_defer(self) -> list[int]:
        """Return the stuck ranks that have a deferrable wait; they count as going on from now on."""
        if not self._is_new:
            return []
        self._is_new = False
        found = [rank for rank in sorted(self._stuck()) if any(wait.deferrable for wait in self._blocked[rank].waits)]
        for rank in found:
            del self._blocked[rank]
        return found

    def deadlock(self, *, certain: bool = True) -> tuple[frozenset[int], str]:
        """Return the ranks that wait for each other, and a text that says so; nobody and "" when there are none.

        Args:
            certain: leave out ranks with other threads, one of which might let others go on.
        """
        stuck = self._stuck(entirely=certain)
        if not stuck:
            return stuck, ""
        lines = [f"  rank {rank} waits for {_told(wait)}, which {named_ranks(sorted(self._missing(rank, wait) or ()))} "
                 f"{'has' if len(self._missing(rank, wait) or ()) == 1 else 'have'} not handed in"
                 for rank in sorted(stuck) for wait in self._blocked[rank].waits]
        more = [f"  and {len(lines) - 16} more"] if len(lines) > 16 else []
        title = "ranks wait for each other in a circle, so that none can go on:"
        return stuck, "\n".join([title, *lines[:16], *more, _HELP])

    def __bool__(self) -> bool:
        return bool(self._blocked)

    def _stuck(self, *, entirely: bool = False) -> frozenset[int]:
        needs: dict[int, list[Collection[int]]] = {}
        for rank, blocked in list(self._blocked.items()):
            missing = [self._missing(rank, wait) for wait in blocked.waits]
            if not missing or any(needed is None for needed in missing):
                del self._blocked[rank]  # it goes on
            elif blocked.entirely or not entirely:
                needs[rank] = [needed for needed in missing if needed is not None]
        return stuck_ranks(needs)


def _told(wait: Wait) -> str:
    return f"the gradients of '{wait.name}' (round {wait.round_id})" if wait.round_id else f"'{wait.name}'"
