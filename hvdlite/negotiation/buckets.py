"""Learned buckets at the coordinator: from a round of single tensors to one id per bucket, and back. Pure.

The life of a declared set
    LEARNING   its members are reported one by one; when every rank has closed the round, the order in which they became
               ready everywhere gives a layout, which one decision announces.
    LEARNED    a rank reports one id when a bucket is full; all ranks' ids release it with one id.
    LEARNING   after an eviction: some rank's set changed (`stale`), a rank left, or the table is full. Ids already
               reported, or still under way, are taken as their members' requests, so nobody is asked to repeat anything.

Rules (PROTOCOL rules 6, 10; docs/decisions/0005)
- The table changes only by `Decision.learned` and `Decision.evicted`, which every rank applies at the same point.
- Ids are never used again. An evicted layout stays readable until every rank has applied its eviction.
- A layout learned from round r is used from round r + 2: a rank may be in round r + 1 when the decision reaches it, but to
  finish that round it needs answers that come after (or with) that decision. So no round is half one and half the other.
- A member missing on a rank does not break a bucket: its place there holds the op's identity. So an id always means
  "all places are filled", and an expanded id contributes every member that it does not list as missing.
- Ranks are never more than one round apart in a set: a round ends for a rank when all its members are answered.
- A set that keeps going stale is learned again ever more rarely: after 1, 2, 4, ... complete rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.errors import ProtocolError
from hvdlite.negotiation.fusion import fusion_key, payload_bytes, response_to
from hvdlite.negotiation.messages import Bucket, BucketReady, BucketRelease, Layout, Request

ALIGNMENT = 64
"""Bytes; members begin at multiples of it within a bucket, so that vector code and cache lines meet them aligned."""
_MOST_PATIENCE = 64
Ranks = tuple[int, ...]
"""Who says something: one rank, or all ranks of a host when their leader has merged it."""


@dataclasses.dataclass(frozen=True)
class BucketSizes:
    """How sets are cut, in bytes; a tensor above a limit is a bucket of its own.

    The first bucket is small, so that communication starts early; the last, so that little remains when backward ends.
    """

    edge: int
    middle: int


def cut(sizes: Sequence[int], limits: BucketSizes) -> list[int]:
    """Return where the buckets of members of these sizes end, in ready order."""
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


def plan(ready: Iterable[Mapping[int, Request]], size: int, limits: BucketSizes, first: int) -> tuple[Bucket, ...]:
    """Cut a set into buckets.

    Args:
        ready: each member's requests by rank, in the order the members became ready.
        first: the first bucket's id; the others' follow.
    """
    kinds: dict[tuple[object, ...], list[Request]] = {}
    for requests in ready:
        member = _member(requests)
        kinds.setdefault(fusion_key(response_to({0: member})), []).append(member)
    buckets: list[Bucket] = []
    for members in kinds.values():
        begin = 0
        for end in cut([payload_bytes(member) for member in members], limits):
            buckets.append(_bucket(first + len(buckets), members[begin:end], size))
            begin = end
    return tuple(buckets)


def _member(requests: Mapping[int, Request]) -> Request:
    """Return the member as all ranks know it; laid out row-major when they lay it out differently."""
    first = next(iter(requests.values()))
    agreed = all(request.strides == first.strides for request in requests.values())
    return msgspec.structs.replace(first, absent=False, strides=first.strides if agreed else (), round=0)


def _bucket(number: int, members: Sequence[Request], size: int) -> Bucket:
    step = ALIGNMENT // SUPPORTED_DTYPES[members[0].dtype].itemsize
    offsets, elements = [], 0
    for member in members:
        offsets.append(elements)
        count = payload_bytes(member) // SUPPORTED_DTYPES[member.dtype].itemsize
        elements += -(-count // step) * step
    response = msgspec.structs.replace(response_to({0: members[0]}), names=tuple(member.name for member in members),
                                       contributors=tuple(range(size)))
    return Bucket(number, tuple(members), tuple(offsets), elements, response)


def expand(bucket: Bucket, ready: BucketReady) -> Iterator[Request]:
    """Yield the requests that a reported bucket stands for."""
    missing = frozenset(ready.missing)
    for index, member in enumerate(bucket.members):
        yield msgspec.structs.replace(member, absent=index in missing, round=ready.round)


@dataclasses.dataclass
class _Set:
    """One declared set."""

    ready: dict[str, Mapping[int, Request]] = dataclasses.field(default_factory=dict)  # this round, in ready order
    spoiled: bool = False  # a member of this round was refused: nothing is learned from it
    closed: dict[int, int] = dataclasses.field(default_factory=dict)  # round -> how many ranks; never all of them
    layout: Layout | None = None
    evictions: int = 0
    patience: int = 1  # complete rounds still to see before learning


@dataclasses.dataclass
class BucketWaiting:
    """One learned bucket that some ranks have reported."""

    since: float
    bucket: Bucket
    reported: dict[Ranks, BucketReady]  # invariant: never all ranks
    count: int = 0  # of those ranks
    warned: bool = False

    @property
    def ranks(self) -> list[int]:
        """The ranks that have reported it."""
        return [rank for ranks in self.reported for rank in ranks]


@dataclasses.dataclass
class _Tombstone:
    layout: Layout
    sequence: int  # of the decision that evicted it


class DeclaredSets:
    """The coordinator's half of learned buckets.

    Args:
        size: ranks of the world.
        limits: how sets are cut; a `middle` of 0 turns learning off.
        capacity: layouts that may exist at a time; the least recently used is evicted.
    """

    def __init__(self, size: int, limits: BucketSizes, capacity: int) -> None:
        self._size, self._limits, self._capacity = size, limits, capacity
        self._sets: dict[str, _Set] = {}
        self._layouts: dict[int, Layout] = {}  # least recently used first
        self._buckets: dict[int, tuple[Bucket, int]] = {}  # every readable bucket and its layout
        self._waiting: dict[int, BucketWaiting] = {}
        self._tombstones: dict[int, _Tombstone] = {}
        self._next_layout = self._next_bucket = 1

    def observe(self, label: str, requests: Mapping[int, Request]) -> None:
        """A member was answered by itself."""
        declared = self._sets.setdefault(label, _Set())
        name = next(iter(requests.values())).name
        declared.ready.pop(name, None)
        declared.ready[name] = requests

    def spoil(self, label: str) -> None:
        """A member was refused."""
        self._sets.setdefault(label, _Set()).spoiled = True

    def close(self, ranks: Ranks, label: str, number: int) -> bool:
        """These ranks have reported all they have in a round; return whether every rank has."""
        closed = self._sets.setdefault(label, _Set()).closed
        closed[number] = closed.get(number, 0) + len(ranks)
        if closed[number] < self._size:
            return False
        for past in [past for past in closed if past <= number]:
            del closed[past]
        return True

    def learn(self, label: str, number: int) -> tuple[Layout | None, list[int]]:
        """After a round that all closed: return the layout to announce, if any, and the layouts to evict for it."""
        declared = self._sets[label]
        ready, spoiled = declared.ready, declared.spoiled
        declared.ready, declared.spoiled = {}, False
        if declared.layout is not None or spoiled or not ready or not self._limits.middle:
            return None, []
        declared.patience -= 1
        if declared.patience > 0:
            return None, []
        buckets = plan(ready.values(), self._size, self._limits, self._next_bucket)
        layout = Layout(self._next_layout, label, number + 2, buckets)
        self._next_layout += 1
        self._next_bucket += len(buckets)
        crowd = [number for number in self._layouts if not self._is_waited_for(number)]
        evicted = crowd[:max(0, len(self._layouts) + 1 - self._capacity)]
        declared.layout = self._layouts[layout.layout] = layout
        self._buckets.update((bucket.bucket, (bucket, layout.layout)) for bucket in layout.buckets)
        return layout, evicted

    def ready(self, ranks: Ranks, ready: BucketReady, now: float) -> tuple[BucketRelease | None, list[Request], str]:
        """Take in a reported bucket; return its release when nobody is missing now, the requests that it stands for (on each
        of the ranks) when it was evicted, and its set's label.

        Raises:
            ProtocolError: for an id that was never learned, or is reported twice.
        """
        if ready.bucket not in self._buckets:
            raise ProtocolError(f"names bucket {ready.bucket}, which was never learned")
        bucket, number = self._buckets[ready.bucket]
        if number in self._tombstones:
            return None, list(expand(bucket, ready)), self._tombstones[number].layout.label
        label = self._layouts[number].label
        waiting = self._waiting.get(ready.bucket)
        if waiting is None:
            waiting = self._waiting[ready.bucket] = BucketWaiting(now, bucket, {})
        if ranks in waiting.reported:
            raise ProtocolError(f"reported bucket {ready.bucket} of '{label}' twice before it was answered")
        waiting.reported[ranks] = ready
        waiting.count += len(ranks)
        if waiting.count < self._size:
            return None, [], label
        del self._waiting[ready.bucket]
        self._layouts[number] = self._layouts.pop(number)
        nobody: tuple[int, ...] = ()
        if ready.missing:
            common = set(ready.missing).intersection(*(other.missing for other in waiting.reported.values()))
            nobody = tuple(sorted(common))
        return BucketRelease(ready.bucket, nobody), [], label

    def evict(self, layout: int, sequence: int, *, spoilt: bool = True) -> list[tuple[int, Request]] | None:
        """End a layout in decision `sequence`; return what ranks have reported of it, as (rank, request).

        None when it is not in use any more.

        Args:
            spoilt: whether its set is to be learned again later than last time.
        """
        if layout not in self._layouts:
            return None
        ended = self._layouts.pop(layout)
        self._tombstones[layout] = _Tombstone(ended, sequence)
        declared = self._sets[ended.label]
        declared.layout = None
        declared.evictions += spoilt
        declared.patience = min(1 << max(0, declared.evictions - 1), _MOST_PATIENCE)
        expanded: list[tuple[int, Request]] = []
        for bucket in ended.buckets:
            waiting = self._waiting.pop(bucket.bucket, None)
            for ranks, ready in waiting.reported.items() if waiting else ():
                expanded.extend((rank, request) for rank in ranks for request in expand(bucket, ready))
        return expanded

    def forget(self, applied: int) -> None:
        """Every rank has applied the decisions up to `applied`: evicted layouts before it are not named any more."""
        for number in [number for number, stone in self._tombstones.items() if stone.sequence <= applied]:
            for bucket in self._tombstones.pop(number).layout.buckets:
                del self._buckets[bucket.bucket]

    def layout_of(self, request: Request) -> int | None:
        """Return the layout by whose buckets `request` should have been reported, or None."""
        declared = self._sets.get(request.label)
        if declared is None or declared.layout is None or request.round < declared.layout.first_round:
            return None
        return declared.layout.layout

    @property
    def has_tombstones(self) -> bool:
        """Whether `forget` has anything to do."""
        return bool(self._tombstones)

    def layouts(self) -> list[int]:
        """Return the layouts in use."""
        return list(self._layouts)

    def waiting(self) -> Collection[BucketWaiting]:
        """Return the incomplete buckets, oldest first."""
        return self._waiting.values()

    def check_invariants(self) -> None:
        """Fail when the tables contradict each other."""
        for number, waiting in self._waiting.items():
            assert 0 < waiting.count == len(waiting.ranks) < self._size, waiting
            assert self._buckets[number][1] in self._layouts, "an evicted bucket waits"
        for label, declared in self._sets.items():
            assert declared.layout is None or self._layouts[declared.layout.layout].label == label
            assert all(count < self._size for count in declared.closed.values())
        assert not set(self._tombstones) & set(self._layouts)
        assert {number for _, number in self._buckets.values()} <= set(self._tombstones) | set(self._layouts)

    def _is_waited_for(self, layout: int) -> bool:
        return any(bucket.bucket in self._waiting for bucket in self._layouts[layout].buckets)
