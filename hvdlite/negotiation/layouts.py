"""Layouts: how a gradient set is cut into buckets. Pure functions; `gradient_sets.py` decides when they are used."""

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
    """

    edge: int
    middle: int


def first_round(joins: int) -> int:
    """Return the first round of gradient sets after all ranks have joined `joins` times; higher than every earlier round."""
    return (joins << 32) + 1


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
        ends = [len(members)] if members[0].group_id else cut([payload_bytes(member) for member in members], limits)
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
    """Return the member as all ranks know it; it is row-major when the ranks' strides differ."""
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
    in_step: tuple[int, ...] = ()
    if any(ready.in_step for _, ready in parts):
        in_step = ranks_in_step({rank: ready.in_step for ranks, ready in parts for rank in ranks})
    everywhere, somewhere = unused_members([ready for _, ready in parts])
    return BucketRelease(bucket_id=bucket_id, globally_unused=everywhere, partly_unused=somewhere, ranks_in_step=in_step)
