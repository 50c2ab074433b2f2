"""Tensors and buckets that some ranks have reported and others have not, as the stall inspector sees them. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hvdlite.negotiation.agreement import named_ranks
from hvdlite.negotiation.deadlock import stuck_ranks
from hvdlite.negotiation.gathering import Gathered, Gathering
from hvdlite.negotiation.layouts import LayoutTable
from hvdlite.negotiation.messages import BucketReady, GpuProgress, Key, OverdueWork, Request


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
    """A message of an ordered group, for which a thread of `enqueued` waits; one of `missing` sends or receives it."""

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

    Other threads, which rank 0 does not know of, may still help them. A receive from any rank is in no circle.
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
