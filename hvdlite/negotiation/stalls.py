"""What some ranks wait for, as the stall inspector sees it: tensors, buckets, and calls of groups. Pure.

`BlockedRanks` finds ranks that wait for each other in a circle (docs/protocol.md#circular-waits). A rank whose threads are
all blocked continues when one of its waits ends, and a wait ends when every rank has enqueued the tensor. So a rank is stuck
when each of its waits needs a rank that is stuck. Ranks report their long waits (`Blocked`); the coordinator knows which
ranks have enqueued which tensor. Calls of groups are not negotiated: a rank that reports its waits reports how far it is in
each group, too, and a wait in a group needs the ranks that had not begun the call when they were blocked themselves. This is
deadlock detection in the AND-OR model (Knapp, "Deadlock Detection in Distributed Databases", ACM Computing Surveys 19(4),
1987), on one rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hvdlite.negotiation.agreement import named_ranks
from hvdlite.negotiation.gathering import Gathered, Gathering
from hvdlite.negotiation.layouts import LayoutTable
from hvdlite.negotiation.messages import (
    Blocked,
    BucketReady,
    CallWait,
    GpuProgress,
    GroupCalls,
    Key,
    OverdueWork,
    Request,
    Wait,
)

NO_STALL = ".no-stall"
"""Ends the names of tensors that nobody needs: ranks may leave them out, and they never count as stalled."""
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


@dataclasses.dataclass(frozen=True)
class Stall:
    """A tensor, or a bucket, that waits for some ranks."""

    name: str
    waited: float  # seconds
    enqueued: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return (f"'{self.name}' has waited {self.waited:.0f} s: enqueued by ranks {list(self.enqueued)}, "
                f"not yet by ranks {list(self.missing)}")

    def fault(self, rank: int) -> str:
        """Say what a missing rank has not done to it, for "rank 2 ... 'name'"."""
        return "never enqueued"


@dataclasses.dataclass(frozen=True)
class MessageStall(Stall):
    """A message of a group, for which a thread of `enqueued` waits; one of `missing` sends or receives it."""

    def __str__(self) -> str:
        return f"'{self.name}' has waited {self.waited:.0f} s for {named_ranks(self.missing)}"

    def fault(self, rank: int) -> str:
        return "has not taken part in"


@dataclasses.dataclass(frozen=True)
class GpuStall(Stall):
    """A launched collective that GPUs do not finish.

    `enqueued` are the ranks that have launched it, and `missing` those that hold it up, as far as known: ranks that have not
    launched it, else those whose GPU has not come to it, else those that are at it.
    """

    process_set_id: int
    sequence: int
    late: tuple[int, ...] = ()  # ranks that have launched it, and whose GPU is not there yet

    def __str__(self) -> str:
        absent = [rank for rank in self.missing if rank not in self.enqueued]
        return (f"'{self.name}' was launched {self.waited:.0f} s ago, and GPUs have not finished it: launched by ranks "
                f"{list(self.enqueued)}" + (f", not yet by ranks {absent}" if absent else "")
                + (f"; the GPUs of ranks {list(self.late)} are busy with something before it" if self.late else ""))

    def fault(self, rank: int) -> str:
        if rank not in self.enqueued:
            return "has not launched"
        return "has launched, but its GPU has not come to," if rank in self.late else "has not finished"

    def with_progress(self, progress: Mapping[int, Iterable[GpuProgress]], ranks: Iterable[int]) -> GpuStall | None:
        """Return this with what ranks answered; None if all of them have finished it.

        Args:
            progress: of the ranks that answered.
            ranks: the ranks of the process set. One that did not answer counts as one that has not launched it.
        """
        mine = {rank: each for rank, all_sets in progress.items() for each in all_sets
                if each.process_set_id == self.process_set_id}
        absent = [rank for rank in ranks if rank not in mine or mine[rank].launched < self.sequence]
        launched = tuple(rank for rank in ranks if rank not in absent)
        late = tuple(rank for rank in launched if mine[rank].reached < self.sequence)
        unfinished = [rank for rank in launched if mine[rank].done < self.sequence]
        missing = tuple(absent or late or unfinished)
        return dataclasses.replace(self, enqueued=launched, missing=missing, late=late) if missing else None


def circle_of_messages(stalls: Iterable[Stall]) -> frozenset[int]:
    """Return the ranks that wait for each other in sends and receives.

    Other threads, of which rank 0 is not aware, may still help them. A receive from any rank is in no circle.
    """
    needs: dict[int, list[tuple[int, ...]]] = {}
    for stall in stalls:
        if isinstance(stall, MessageStall) and len(stall.missing) == 1:
            for rank in stall.enqueued:
                needs.setdefault(rank, []).append(stall.missing)
    found = stuck_ranks(needs)
    while True:
        needed = found & {peer for rank in found for wait in needs[rank] for peer in wait}
        if needed == found:
            return found
        found = needed


def gpu_stall(work: OverdueWork) -> GpuStall:
    """Describe what a rank's GPU has not finished; ranks are to be asked how far they are."""
    return GpuStall(work.name, work.seconds, (), work.ranks, work.process_set_id, work.sequence)


def tensor_stall(requests: Gathering[Key, Request], tensor: Gathered[Request], now: float) -> Stall:
    """Describe an incomplete tensor."""
    return Stall(tensor.first.name, now - tensor.since, tuple(sorted(tensor.ranks)), tuple(requests.missing_ranks(tensor)))


def bucket_stall(buckets: Gathering[int, BucketReady], reported: Gathered[BucketReady], layouts: LayoutTable,
                 now: float) -> Stall:
    """Describe an incomplete bucket; it is called after its first member."""
    first, *more = layouts.bucket(reported.first.bucket_id).members
    name = first.name + (f"' and {len(more)} more of '{first.label}" if more else "")
    return Stall(name, now - reported.since, tuple(sorted(reported.ranks)), tuple(buckets.missing_ranks(reported)))


class _Reported(NamedTuple):
    wait: CallWait
    since: float  # on the caller's clock


_Key = tuple[str, str]
"""A group and the name of a call."""


class CallWaits:
    """Calls of groups in which ranks have waited for long.

    They are not negotiated, so rank 0 has only the reports of the ranks that wait: which call, and for whom. Each rank
    reports all of it again when something changes.
    """

    def __init__(self) -> None:
        self._reported: dict[int, dict[_Key, _Reported]] = {}
        self._warned: set[_Key] = set()

    def update(self, rank: int, groups: Iterable[GroupCalls], now: float) -> None:
        """Record a rank's report; it replaces the one before."""
        reported = {(calls.group, wait.name): _Reported(wait, now - wait.seconds)
                    for calls in groups for wait in calls.waits}
        self._reported[rank] = reported
        if not reported:
            del self._reported[rank]
        self._warned.intersection_update({key for each in self._reported.values() for key in each})

    def __bool__(self) -> bool:
        return bool(self._reported)

    def pending(self, now: float) -> list[Stall]:
        """Return every call for which some ranks wait, however short."""
        return [stall for _, stall in self._stalls(now)]

    def new_stalls(self, now: float, after: float) -> list[Stall]:
        """Return what has waited at least `after` seconds and was not returned before."""
        found = [(key, stall) for key, stall in self._stalls(now) if stall.waited >= after and key not in self._warned]
        self._warned.update(key for key, _ in found)
        return [stall for _, stall in found]

    def _stalls(self, now: float) -> Iterator[tuple[_Key, Stall]]:
        for key in dict.fromkeys(key for waits in self._reported.values() for key in waits):
            waiting = {rank: waits[key] for rank, waits in self._reported.items() if key in waits}
            missing = set.intersection(*(set(each.wait.missing) for each in waiting.values())).difference(waiting)
            if missing:
                ranks = {rank for each in waiting.values() for rank in each.wait.ranks}
                kind = Stall if any(each.wait.sequence for each in waiting.values()) else MessageStall
                yield key, kind(key[1], now - min(each.since for each in waiting.values()),
                                tuple(sorted(ranks - missing)), tuple(sorted(missing)))
