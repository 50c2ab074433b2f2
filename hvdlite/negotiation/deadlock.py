"""Detection of ranks that wait for each other in a circle (docs/protocol.md#circular-waits). Pure.

A rank whose threads are all blocked continues when one of its waits ends, and a wait ends when every rank has enqueued the
tensor. So a rank is stuck when each of its waits needs a rank that is stuck. Ranks report their long waits (`Blocked`); the
coordinator knows which ranks have enqueued which tensor. Calls of groups are not negotiated: a rank that reports its
waits reports how far it is in each group, too, and a wait in a group needs the ranks that had not begun the call when they
were blocked themselves. This is deadlock detection in the AND-OR model (Knapp, "Deadlock
Detection in Distributed Databases", ACM Computing Surveys 19(4), 1987), on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from hvdlite.negotiation.agreement import named_ranks
from hvdlite.negotiation.messages import Blocked, CallWait, GroupCalls, Wait

Missing = Callable[[int, Wait], Collection[int] | None]
"""Returns the ranks for which a wait of a rank waits; None when it is over."""
_HELP = "Call the same collectives in the same order on all ranks"
_HELP_WITH_GRADIENTS = (". Between backward() and step(), call "
         "optimizer.synchronize() on all ranks before collectives and before gradients are read, also on a rank without a "
         "backward(). Let the steps of several optimizers come in the same order everywhere, and all ranks wait for "
         "gradients in the same place (DistributedOptimizer(wait_in=), HVDLITE_WAIT_IN)")
_HELP_WITH_KERAS = (". With Keras, call fit, evaluate, predict and the other methods of a model of a MirroredStrategy on "
                    "all ranks, also in callbacks: not on rank 0 alone")


def stuck_ranks(needs: Mapping[int, Sequence[Collection[int]]]) -> frozenset[int]:
    """Return the ranks that can never continue.

    Args:
        needs: for each blocked rank and each of its waits: the ranks that it waits for. Other ranks can continue.
    """
    waiting = dict(needs)
    while True:
        free = [rank for rank, waits in waiting.items() if any(waiting.keys().isdisjoint(wait) for wait in waits)]
        if not free:
            return frozenset(waiting)
        for rank in free:
            del waiting[rank]


class BlockedRanks:
    """The ranks that have reported long waits, and the ranks that these waits need.

    Args:
        missing: returns the ranks that a wait needs.
    """

    def __init__(self, missing: Missing) -> None:
        self._missing = missing
        self._blocked: dict[int, Blocked] = {}
        self._is_new = False  # since `to_defer` was last asked

    def update(self, rank: int, blocked: Blocked) -> None:
        """Record what a rank reports; it replaces the rank's earlier report."""
        self._blocked[rank] = blocked
        self._is_new = True

    def answered(self, process_set_id: int, names: Collection[str]) -> None:
        """End the waits for tensors that have been answered; their names may be used again."""
        for rank, blocked in list(self._blocked.items()):
            if any(not wait.round_id and wait.process_set_id == process_set_id and wait.name in names
                   for wait in blocked.waits):
                del self._blocked[rank]

    def to_defer(self) -> list[int]:
        """Return the stuck ranks that have a deferrable wait; from now on they count as not blocked."""
        if not self._is_new:
            return []
        self._is_new = False
        found = [rank for rank in sorted(self._stuck()) if any(wait.deferrable for wait in self._blocked[rank].waits)]
        for rank in found:
            del self._blocked[rank]
        return found

    def deadlock(self, *, certain: bool = True) -> tuple[frozenset[int], str]:
        """Return the ranks that wait for each other in a circle, and a description; no ranks and "" when there is no circle.

        Args:
            certain: leave out ranks with other threads, one of which could call what the others wait for.
        """
        stuck = self._stuck(all_threads=certain)
        if not stuck:
            return stuck, ""
        lines = [f"  rank {rank} waits for {what}, which {named_ranks(sorted(missing))} "
                 f"{'has' if len(missing) == 1 else 'have'} not enqueued"
                 for rank in sorted(stuck) for what, missing in self._described(rank)]
        more = [f"  and {len(lines) - 16} more"] if len(lines) > 16 else []
        title = "ranks wait for each other in a circle, so that none can go on:"
        waits = [wait for rank in stuck for wait in self._blocked[rank].waits]
        more_help = (_HELP_WITH_KERAS if any(wait.name.startswith("keras.") for wait in waits) else
                     _HELP_WITH_GRADIENTS if any(wait.round_id for wait in waits) else "")
        return stuck, "\n".join([title, *lines[:16], *more, _HELP + more_help])

    def _described(self, rank: int) -> Iterator[tuple[str, Collection[int]]]:
        """Iterate over what a rank waits for, with the ranks that it needs."""
        blocked = self._blocked[rank]
        for wait in blocked.waits:
            yield _described(wait), self._missing(rank, wait) or ()
        for calls in blocked.groups:
            for call in calls.waits:
                if call.sequence:
                    yield f"'{call.name}'", call.missing

    def __bool__(self) -> bool:
        return bool(self._blocked)

    def _stuck(self, *, all_threads: bool = False) -> frozenset[int]:
        needs: dict[int, list[Collection[int]]] = {}
        for rank, blocked in list(self._blocked.items()):
            missing = [self._missing(rank, wait) for wait in blocked.waits]
            calls = [self._needed(group, call) for group in blocked.groups for call in group.waits if call.sequence]
            if not (missing or calls) or any(needed is None for needed in missing):
                del self._blocked[rank]  # it is not blocked any more
            elif blocked.all_threads or not (all_threads or calls):  # calls: only where it is certain
                needs[rank] = [*(needed for needed in missing if needed is not None), *calls]
        return stuck_ranks(needs)

    def _needed(self, group: GroupCalls, call: CallWait) -> Collection[int]:
        """Return the ranks that a call of a group needs, and that had not begun it when all their threads were blocked."""
        return [rank for rank in call.missing if rank in self._blocked and self._blocked[rank].all_threads and any(
            each.group == group.group and each.begun < call.sequence for each in self._blocked[rank].groups)]


def _described(wait: Wait) -> str:
    return f"the gradients of '{wait.name}' (round {wait.round_id})" if wait.round_id else f"'{wait.name}'"
