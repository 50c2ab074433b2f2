"""Layouts: how a gradient set is cut into buckets, and which layouts there are. Pure.

When they are learned, suspended and evicted is in `gradient_sets.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from hvdlite.core.array import ALIGNMENT, GPU_ALIGNMENT, SUPPORTED_DTYPES
from hvdlite.core.device import CPU
from hvdlite.negotiation.fusion import fusion_key, payload_bytes, ranks_in_step, response_to
from hvdlite.negotiation.gathering import Ranks, first_of, grouped
from hvdlite.negotiation.messages import Bucket, BucketReady, BucketRelease, Layout, Request


@dataclasses.dataclass(frozen=True)
class BucketSizes:
    """The largest sizes of buckets, in bytes; a larger tensor is a bucket of its own.

    The first bucket is small so that communication starts early. The last is small so that little remains to reduce when
    backward ends.

    Attributes:
        edge: of the first and of the last bucket.
        middle: of the others; 0 turns learning off.
        has_one_on_host: whether gradients on the host, of one dtype, are one bucket of any size.
    """

    edge: int
    middle: int
    has_one_on_host: bool = False


def first_round(joins: int) -> int:
    """Return the first round of gradient sets after all ranks have joined `joins` times; higher than every earlier round."""
    return (joins << 32) + 1


class LayoutTable:
    """The layouts of a job, as decisions change them: at rank 0, at a host's leader and on every rank.

    Attributes:
        in_use: by id, suspended ones too; at rank 0 the least recently used first.
        evicted: with the decision that evicted each, oldest first, until `forget`.
        first_round: the least number of a round since all ranks have last joined.
    """

    def __init__(self) -> None:
        self.in_use: dict[int, Layout] = {}
        self.first_round = first_round(0)
        self._joins = 0  # how often all ranks have joined
        self._by_label: dict[str, Layout] = {}  # those in use
        self._buckets: dict[int, tuple[Bucket, Layout]] = {}  # of evicted layouts too, until `forget`
        self._usable: set[int] = set()  # buckets of the layouts that are in use and not suspended
        self.evicted: list[tuple[int, Layout]] = []

    def learn(self, layout: Layout) -> None:
        """Use a layout."""
        self.in_use[layout.layout_id] = self._by_label[layout.label] = layout
        self._buckets.update((bucket.bucket_id, (bucket, layout)) for bucket in layout.buckets)
        self._usable.update(bucket.bucket_id for bucket in layout.buckets)

    def suspend(self, layout_id: int) -> Layout:
        """Do not use a layout until all ranks have joined; return it."""
        layout = self.in_use[layout_id]
        self._usable.difference_update(bucket.bucket_id for bucket in layout.buckets)
        return layout

    def evict(self, layout_id: int, sequence: int) -> Layout:
        """End a layout in decision `sequence`; return it."""
        layout = self.suspend(layout_id)
        del self.in_use[layout_id]
        if self._by_label[layout.label] is layout:  # else the same decision has another one, which is learned first
            del self._by_label[layout.label]
        self.evicted.append((sequence, layout))
        return layout

    def resume(self) -> None:
        """All ranks have joined: number rounds anew, and use the suspended layouts again."""
        self._joins += 1
        self.first_round = first_round(self._joins)
        for layout in self.in_use.values():
            self._usable.update(bucket.bucket_id for bucket in layout.buckets)

    def forget(self, applied: int) -> None:
        """Forget the layouts that were evicted up to decision `applied`, which all ranks that report here have applied."""
        while self.evicted and self.evicted[0][0] <= applied:
            for bucket in self.evicted.pop(0)[1].buckets:
                del self._buckets[bucket.bucket_id]

    def usable(self, bucket_id: int, round_id: int) -> bool:
        """Return whether a bucket of a round is reduced as a bucket; else its report stands for requests."""
        return bucket_id in self._usable and round_id >= self.first_round

    def is_suspended(self, layout: Layout) -> bool:
        """Return whether a layout in use is suspended."""
        return layout.buckets[0].bucket_id not in self._usable

    def named(self, label: str) -> Layout | None:
        """Return the layout of a gradient set, if it has one in use."""
        return self._by_label.get(label)

    def find(self, bucket_id: int) -> tuple[Bucket, Layout] | None:
        """Return a bucket and its layout; None when it was never learned."""
        return self._buckets.get(bucket_id)

    def bucket(self, bucket_id: int) -> Bucket:
        """Return a learned bucket."""
        return self._buckets[bucket_id][0]

    def of_bucket(self, bucket_id: int) -> Layout:
        """Return the layout of a learned bucket."""
        return self._buckets[bucket_id][1]

    def check_invariants(self) -> None:
        """Fail when the tables contradict each other."""
        assert {layout.label: layout for layout in self.in_use.values()} == self._by_label
        layouts = [*self.in_use.values(), *(layout for _, layout in self.evicted)]
        assert self._buckets.keys() == {bucket.bucket_id for layout in layouts for bucket in layout.buckets}
        for layout in layouts:
            usable = self._usable.intersection(bucket.bucket_id for bucket in layout.buckets)
            assert len(usable) == (len(layout.buckets) if layout.layout_id in self.in_use
                                   and not self.is_suspended(layout) else 0), layout.label


def cut(sizes: Sequence[int], limits: BucketSizes) -> list[int]:
    """Return the index at which each bucket ends.

    Args:
        sizes: the members' sizes in bytes, in the order in which they become ready.
    """
    if len(sizes) < 2 or sum(sizes) <= limits.edge:
        return [len(sizes)] if sizes else []
    last = len(sizes) - 1  # first member of the last bucket
    filled = sizes[last]
    while last > 1 and filled + sizes[last - 1] <= limits.edge:
        last -= 1
        filled += sizes[last]
    ends: list[int] = []
    filled = 0
    for index, size in enumerate(sizes[:last]):
        limit = limits.middle if ends else limits.edge
        if filled and filled + size > limit:
            ends.append(index)
            filled = 0
        filled += size
    return [*ends, last, len(sizes)]


def plan_buckets(ready: Iterable[Mapping[int, Request]], ranks: Ranks, limits: BucketSizes,
                 first_id: int) -> tuple[Bucket, ...]:
    """Cut a gradient set into buckets.

    Args:
        ready: each member's requests by rank, in the order in which the members became ready.
        ranks: the ranks of the process set.
        first_id: the first bucket's id; the other buckets get the ids that follow.
    """
    kinds: dict[tuple[object, ...], list[Request]] = {}
    for requests in ready:
        member = _member(requests)
        kinds.setdefault((*fusion_key(response_to({0: member}, ranks)), member.group_id), []).append(member)
    buckets: list[Bucket] = []
    for members in kinds.values():
        begin = 0
        is_one = members[0].group_id or (limits.has_one_on_host and members[0].device == CPU)
        ends = [len(members)] if is_one else cut([payload_bytes(member) for member in members], limits)
        for end in ends:
            buckets.append(_bucket(first_id + len(buckets), members[begin:end], ranks))
            begin = end
    return tuple(buckets)


def carried_over(layout: Layout, label: str, ranks: Ranks, first_round: int, layout_id: int, first_bucket: int) -> Layout:
    """Return a layout of the last world of an elastic job as one of this world.

    Args:
        label: of the gradient set in this world; the names of its members contain it.
        ranks: of the process set.
        first_round: the first round that is reported by it.
        first_bucket: the first bucket's id; the other buckets get the ids that follow.
    """
    def renamed(name: str) -> str:
        return name.replace(layout.label, label, 1)

    buckets = [_bucket(bucket_id, [msgspec.structs.replace(member, name=renamed(member.name), label=label)
                                   for member in bucket.members], ranks)
               for bucket_id, bucket in enumerate(layout.buckets, first_bucket)]
    return Layout(layout_id=layout_id, label=label, first_round=first_round, buckets=tuple(buckets),
                  unbucketed=tuple(map(renamed, layout.unbucketed)))


def _member(requests: Mapping[int, Request]) -> Request:
    """Return the member as it is on all ranks; it is row-major when the ranks' strides differ."""
    first = first_of(requests)
    agreed = all(request.strides == first.strides for _, request in grouped(requests))
    return msgspec.structs.replace(first, absent=False, strides=first.strides if agreed else (), round_id=0, step=0,
                                  in_step=False)


def _bucket(bucket_id: int, members: Sequence[Request], ranks: Ranks) -> Bucket:
    step = (ALIGNMENT if members[0].device == CPU else GPU_ALIGNMENT) // SUPPORTED_DTYPES[members[0].dtype].itemsize
    offsets, elements = [], 0
    for member in members:
        offsets.append(elements)
        count = payload_bytes(member) // SUPPORTED_DTYPES[member.dtype].itemsize
        elements += -(-count // step) * step
    response = msgspec.structs.replace(response_to({0: members[0]}, ranks), names=tuple(member.name for member in members),
                                       contributors=ranks)
    return Bucket(bucket_id=bucket_id, members=tuple(members), offsets=tuple(offsets), elements=elements, response=response)


def requests_of(bucket: Bucket, ready: BucketReady) -> Iterator[Request]:
    """Yield the members' requests that a reported bucket stands for."""
    unused = frozenset(ready.unused)
    for index, member in enumerate(bucket.members):
        yield msgspec.structs.replace(member, absent=index in unused, round_id=ready.round_id, step=ready.step,
                                      in_step=ready.in_step)


def unused_members(reports: Sequence[BucketReady]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of members that are unused in all of the reports, and of those that are in some, but not in all."""
    if not any(ready.unused or ready.unused_somewhere for ready in reports):
        return (), ()
    everywhere = set.intersection(*(set(ready.unused) for ready in reports))
    anywhere = set().union(*(ready.unused for ready in reports), *(ready.unused_somewhere for ready in reports))
    return tuple(sorted(everywhere)), tuple(sorted(anywhere - everywhere))


def release_of(bucket_id: int, parts: Sequence[tuple[Ranks, BucketReady]]) -> BucketRelease:
    """Return the release of a bucket that all ranks have reported."""
    if not any(ready.in_step or ready.unused or ready.unused_somewhere for _, ready in parts):
        return BucketRelease(bucket_id=bucket_id)
    in_step = ranks_in_step({rank: ready.in_step for ranks, ready in parts for rank in ranks})
    everywhere, somewhere = unused_members([ready for _, ready in parts])
    return BucketRelease(bucket_id=bucket_id, globally_unused=everywhere, partly_unused=somewhere, ranks_in_step=in_step)
