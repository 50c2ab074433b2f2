"""What some ranks wait for, as the stall inspector sees it: tensors, buckets, and calls of groups. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from hvdlite.negotiation.agreement import named_ranks
from hvdlite.negotiation.deadlock import stuck_ranks
from hvdlite.negotiation.gathering import Gathered, Gathering
from hvdlite.negotiation.layouts import LayoutTable
from hvdlite.negotiation.messages import BucketReady, CallWait, GpuProgress, GroupCalls, Key, OverdueWork, Request


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
