"""Learned buckets at the coordinator: layouts planned from a round of single tensors, one id per bucket. Pure.

The life of a declared set
    LEARNING   its members are reported one by one; when every rank has finished the round, the order in which they became
               ready everywhere gives a layout, which one decision announces.
    LEARNED    a rank reports one id when a bucket is full; all ranks' ids release it with one id.
    SUSPENDED  from the time when a rank of its process set joins until all ranks have joined. Members go one by one.
    LEARNING   after an eviction: some rank's set changed (`LayoutStale`), a rank left, or the table is full.
    When a layout is evicted or suspended, ids already reported, or still under way, are taken as their members' requests,
    so nobody is asked to repeat anything.

Rules (docs/protocol.md#learning, #rounds, #layouts, #join)
- The table changes only by `Decision.learned`, `suspended` and `evicted` and by the answer to a join, which every rank
  applies at the same point.
- Ids are never used again. An evicted layout stays readable until every rank has applied its eviction.
- When all ranks have joined, rounds are numbered anew and higher (`first_round`), and suspended layouts are used again. So
  a reported id whose round has an older number is one of before, and is taken as its members' requests.
- A layout learned from round r is used from round r + 2: a rank may be in round r + 1 when the decision reaches it, but to
  finish that round it needs answers that come after (or with) that decision. So no round is half one and half the other.
- A member missing on a rank does not break a bucket: its place there holds the op's identity. So an id always means
  "all places are filled", and an expanded id contributes every member that it does not list as missing.
- Ranks are never more than one round apart in a set: a round ends for a rank when all its members are answered.
- A set that a rank has dropped (`Retired`: its optimizer is gone) ends its layout and learns no other, because no round can
  become complete. When all ranks have dropped it, it is forgotten; its label is never used again.
- Nothing is learned from a round of which a part went by bucket, or was refused, or in which a rank had joined.
- A member that was sparse once on some rank goes by itself for ever. Layouts name such members (`Layout.unbucketed`).
- A set that keeps going stale is learned again ever more rarely: after 1, 2, 4, ... complete rounds. A layout that was in
  use for long does not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from hvdlite.core.array import ALIGNMENT, GPU_ALIGNMENT, SUPPORTED_DTYPES
from hvdlite.core.device import CPU
from hvdlite.core.errors import ProtocolError
from hvdlite.core.types import Collective
from hvdlite.negotiation.fusion import fusion_key, payload_bytes, ranks_in_step, response_to
from hvdlite.negotiation.messages import Bucket, BucketReady, BucketRelease, Layout, Request, Response, Retired, RoundDone
from hvdlite.negotiation.process_sets import ProcessSetTable
from hvdlite.negotiation.requests import Ranks, first_of, grouped

MAX_BACKOFF_ROUNDS = 64
"""Rounds; also how long a layout must be in use so that its end does not count."""


@dataclasses.dataclass(frozen=True)
class BucketSizes:
    """How sets are cut, in bytes; a tensor above a limit is a bucket of its own.

    The first bucket is small, so that communication starts early; the last, so that little remains when backward ends.
    """

    edge: int
    middle: int


def first_round(joins: int) -> int:
    """Return the first round of declared sets once all ranks have joined so many times: higher than every one before."""
    return (joins << 32) + 1


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


def plan(ready: Iterable[Mapping[int, Request]], ranks: Ranks, limits: BucketSizes, first: int) -> tuple[Bucket, ...]:
    """Cut a set into buckets.

    Args:
        ready: each member's requests by rank, in the order the members became ready.
        ranks: the members of the process set.
        first: the first bucket's id; the others' follow.
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
            buckets.append(_bucket(first + len(buckets), members[begin:end], ranks))
            begin = end
    return tuple(buckets)


def _place(order: Mapping[str, int], requests: Mapping[int, Request]) -> int:
    return order.get(first_of(requests).name, 0)


def _member(requests: Mapping[int, Request]) -> Request:
    """Return the member as all ranks know it; laid out row-major when they lay it out differently."""
    first = first_of(requests)
    agreed = all(request.strides == first.strides for _, request in grouped(requests))
    return msgspec.structs.replace(first, absent=False, strides=first.strides if agreed else (), round_id=0, step=0,
                                  in_step=False)


def _bucket(number: int, members: Sequence[Request], ranks: Ranks) -> Bucket:
    step = (ALIGNMENT if members[0].device == CPU else GPU_ALIGNMENT) // SUPPORTED_DTYPES[members[0].dtype].itemsize
    offsets, elements = [], 0
    for member in members:
        offsets.append(elements)
        count = payload_bytes(member) // SUPPORTED_DTYPES[member.dtype].itemsize
        elements += -(-count // step) * step
    response = msgspec.structs.replace(response_to({0: members[0]}, ranks), names=tuple(member.name for member in members),
                                       contributors=ranks)
    return Bucket(number, tuple(members), tuple(offsets), elements, response)


def expand(bucket: Bucket, ready: BucketReady) -> Iterator[Request]:
    """Yield the requests that a reported bucket stands for."""
    unused = frozenset(ready.unused)
    for index, member in enumerate(bucket.members):
        yield msgspec.structs.replace(member, absent=index in unused, round_id=ready.round_id, step=ready.step,
                                      in_step=ready.in_step)


@dataclasses.dataclass
class _Set:
    """One declared set."""

    process_set_id: int
    ready: dict[str, Mapping[int, Request]] = dataclasses.field(default_factory=dict)  # this round, in ready order
    invalid: bool = False  # a member of this round was refused: nothing is learned from it
    by_bucket: int = 0  # the last round of which a bucket was released; likewise
    sparse: set[str] = dataclasses.field(default_factory=set)  # members that always go by themselves
    done_ranks: dict[int, set[int]] = dataclasses.field(default_factory=dict)  # round -> who finished it; never all ranks
    over: int = 0  # the last round that all ranks finished
    layout: Layout | None = None
    members: frozenset[str] = frozenset()  # of the layout
    served: int = 0  # rounds that ended since it was learned
    evictions: int = 0
    order: dict[str, int] = dataclasses.field(default_factory=dict)  # by `arrange`; empty: ready order counts
    backoff_rounds: int = 1  # complete rounds still to see before learning
    retired: set[int] = dataclasses.field(default_factory=set)  # ranks without it; never all ranks


@dataclasses.dataclass
class BucketWaiting:
    """One learned bucket that some ranks have reported."""

    since: float
    bucket: Bucket
    step: int  # as in the reports
    reported: dict[Ranks, BucketReady] = dataclasses.field(default_factory=dict)  # invariant: never all ranks
    count: int = 0  # of those ranks
    in_step: bool = False  # some rank reported it from within its step
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
        process_sets: who belongs to which process set.
        joined: the ranks that have joined; the caller's, who calls `join` after each that it adds.
        limits: how sets are cut; a `middle` of 0 turns learning off.
        capacity: layouts that may exist at a time; the least recently used is evicted.

    Attributes:
        first_round: the least number of a round since all ranks have last joined.
    """

    def __init__(self, process_sets: ProcessSetTable, joined: Collection[int], limits: BucketSizes, capacity: int) -> None:
        self._process_sets, self._joined, self._limits, self._capacity = process_sets, joined, limits, capacity
        self._sets: dict[str, _Set] = {}
        self._layouts: dict[int, Layout] = {}  # least recently used first
        self._buckets: dict[int, tuple[Bucket, int]] = {}  # every readable bucket and its layout
        self._waiting: dict[int, BucketWaiting] = {}
        self._tombstones: dict[int, _Tombstone] = {}
        self._suspended: set[int] = set()  # layouts
        self.first_round = first_round(0)
        self._next_layout = self._next_bucket = 1

    def observe(self, requests: Mapping[int, Request]) -> int | None:
        """A member was answered by itself; return a layout that is to be evicted for it, or None."""
        request = first_of(requests)
        declared = self._set(request)
        declared.ready.pop(request.name, None)
        if request.collective is Collective.ALLGATHER:
            declared.sparse.add(request.name)
            return declared.layout.layout_id if declared.layout is not None and request.name in declared.members else None
        if request.name not in declared.sparse:
            declared.ready[request.name] = requests
        return None

    def arrange(self, request: Request) -> None:
        """Let the order in which members come to this call give the layout, instead of that in which they get ready."""
        order = self._set(request).order
        order.setdefault(request.name, len(order))

    def invalidate(self, request: Request) -> None:
        """A member was refused."""
        self._set(request).invalid = True

    def rank_done(self, ranks: Ranks, done: RoundDone) -> bool:
        """These ranks have reported all they have in a round; return whether that ends the round, now.

        It ends when every member of the process set that has not joined has finished it. Ranks that are not in the process
        set do not count. Reporting it again changes nothing.
        """
        declared = self._set(done)
        if done.round_id <= declared.over or done.round_id < self.first_round:
            return False
        ranks_done = declared.done_ranks.get(done.round_id)
        if ranks_done is None:
            members = self._process_sets[done.process_set_id] if self._joined else ()
            ranks_done = declared.done_ranks[done.round_id] = {rank for rank in members if rank in self._joined}
        ranks_done.update(self._process_sets.among(done.process_set_id, ranks))
        return self._ends(declared, done.round_id)

    def join(self, rank: int) -> list[RoundDone]:
        """A rank has joined: it finishes no rounds; return those that end by that."""
        ended = []
        for label, declared in self._sets.items():
            if self._process_sets.includes(declared.process_set_id, rank):
                for number in sorted(declared.done_ranks):
                    declared.done_ranks[number].add(rank)
                    if self._ends(declared, number):
                        ended.append(RoundDone(label, number, declared.process_set_id))
        return ended

    def ranks_done_with(self, label: str, number: int) -> frozenset[int]:
        """Return the ranks that have finished round `number` of a set, or had joined.

        Those of a host with a leader count when all of them have, or when one of them is asked for its status.
        """
        declared = self._sets.get(label)
        if declared is None:
            return frozenset()
        if number <= declared.over:
            return frozenset(self._process_sets[declared.process_set_id])
        return frozenset(declared.done_ranks.get(number, ()))

    def learn(self, label: str, number: int) -> tuple[Layout | None, list[int]]:
        """After a round that all finished: return the layout to announce, if any, and the layouts to evict for it."""
        declared = self._sets[label]
        ranks = self._process_sets[declared.process_set_id]
        ready, incomplete = declared.ready, declared.invalid or declared.by_bucket >= number
        declared.ready, declared.invalid = {}, False
        declared.served += 1
        if declared.layout is not None or declared.retired or incomplete or not ready or not self._limits.middle:
            return None, []
        if self._joined and any(rank in self._joined for rank in ranks):
            return None, []
        declared.backoff_rounds -= 1
        if declared.backoff_rounds > 0:
            return None, []
        members = sorted(ready.values(), key=lambda requests: _place(declared.order, requests))
        declared.order = {}
        buckets = plan(members, ranks, self._limits, self._next_bucket)
        layout = Layout(self._next_layout, label, number + 2, buckets, tuple(sorted(declared.sparse)))
        self._next_layout += 1
        self._next_bucket += len(buckets)
        crowd = [number for number in self._layouts if not self._is_waited_for(number)]
        evicted = crowd[:max(0, len(self._layouts) + 1 - self._capacity)]
        declared.layout = self._layouts[layout.layout_id] = layout
        declared.members, declared.served = frozenset(ready), 0
        self._buckets.update((bucket.bucket_id, (bucket, layout.layout_id)) for bucket in layout.buckets)
        return layout, evicted

    def ready(self, ranks: Ranks, ready: BucketReady,
              now: float) -> tuple[BucketRelease | None, list[Request], Ranks, RoundDone]:
        """Take in a reported bucket; return its release when nobody is missing now, the requests that it stands for when it
        was evicted or suspended, those of `ranks` that it concerns, and what the end of the round means for its set.

        Raises:
            ProtocolError: for an id that was never learned, or is reported twice.
        """
        if ready.bucket_id not in self._buckets:
            raise ProtocolError(f"names bucket {ready.bucket_id}, which was never learned")
        bucket, number = self._buckets[ready.bucket_id]
        evicted = self._tombstones.get(number)
        layout = self._layouts[number] if evicted is None else evicted.layout
        done = RoundDone(layout.label, ready.round_id, bucket.response.process_set_id)
        if len(ranks) > 1:
            ranks = self._among(bucket.response, ranks)
        if evicted is not None or number in self._suspended or ready.round_id < self.first_round:
            return None, list(expand(bucket, ready)), ranks, done
        waiting = self._waiting.get(ready.bucket_id)
        if waiting is None:
            waiting = self._waiting[ready.bucket_id] = BucketWaiting(now, bucket, ready.step)
        if ranks in waiting.reported:
            raise ProtocolError(f"reported bucket {ready.bucket_id} of '{layout.label}' twice before it was answered")
        waiting.reported[ranks] = ready
        waiting.count += len(ranks)
        waiting.in_step = waiting.in_step or ready.in_step
        if waiting.count < len(bucket.response.contributors):
            return None, [], ranks, done
        del self._waiting[ready.bucket_id]
        self._layouts[number] = self._layouts.pop(number)
        self._sets[layout.label].by_bucket = ready.round_id
        in_step: tuple[int, ...] = ()
        if waiting.in_step:
            in_step = ranks_in_step({rank: other.in_step for those, other in waiting.reported.items() for rank in those})
        globally_unused: tuple[int, ...] = ()
        if ready.unused:
            common = set(ready.unused).intersection(*(other.unused for other in waiting.reported.values()))
            globally_unused = tuple(sorted(common))
        return BucketRelease(ready.bucket_id, globally_unused, in_step), [], ranks, done

    def out_of_step(self, ready: BucketReady) -> int | None:
        """Return the layout of a bucket that others have reported between other steps of the optimizer, or None."""
        waiting = self._waiting.get(ready.bucket_id)
        if waiting is None or waiting.step == ready.step:
            return None
        return self._buckets[ready.bucket_id][1]

    def evict(self, layout: int, sequence: int, *, back_off: bool = True) -> list[tuple[Ranks, Request]] | None:
        """End a layout in decision `sequence`; return what ranks have reported of it, as (ranks, request).

        None when it is not in use any more.

        Args:
            back_off: whether its set is to be learned again later than last time.
        """
        if layout not in self._layouts:
            return None
        ended = self._layouts.pop(layout)
        self._tombstones[layout] = _Tombstone(ended, sequence)
        self._suspended.discard(layout)
        declared = self._sets[ended.label]
        declared.layout, declared.members = None, frozenset()
        if declared.served >= MAX_BACKOFF_ROUNDS:
            declared.evictions = 0
        declared.evictions += back_off
        declared.backoff_rounds = min(1 << max(0, declared.evictions - 1), MAX_BACKOFF_ROUNDS)
        return self._withdraw(ended)

    def suspend(self, layout: int) -> list[tuple[Ranks, Request]] | None:
        """Do not use a layout until all ranks have joined; return what ranks have reported of it, as (ranks, request).

        None when it is suspended already.
        """
        if layout in self._suspended:
            return None
        self._suspended.add(layout)
        return self._withdraw(self._layouts[layout])

    def forget(self, applied: int) -> None:
        """Every rank has applied the decisions up to `applied`: evicted layouts before it are not named any more."""
        for number in [number for number, stone in self._tombstones.items() if stone.sequence <= applied]:
            for bucket in self._tombstones.pop(number).layout.buckets:
                del self._buckets[bucket.bucket_id]

    def layout_of(self, request: Request) -> int | None:
        """Return the layout by whose buckets `request` should have been reported, or None."""
        declared = self._sets.get(request.label)
        if declared is None or declared.layout is None or request.name not in declared.members:
            return None
        if (request.round_id < max(declared.layout.first_round, self.first_round)
                or declared.layout.layout_id in self._suspended):
            return None
        return declared.layout.layout_id

    @property
    def has_tombstones(self) -> bool:
        """Whether `forget` has anything to do."""
        return bool(self._tombstones)

    @property
    def suspended(self) -> frozenset[int]:
        """The layouts that are suspended."""
        return frozenset(self._suspended)

    def resume(self, joins: int) -> None:
        """All ranks have joined, so many times by now. What was seen of unfinished rounds teaches nothing."""
        self.first_round = first_round(joins)
        self._suspended.clear()
        for declared in self._sets.values():
            declared.done_ranks.clear()
            declared.ready.clear()
            declared.invalid = False

    def remove(self, process_set_id: int) -> None:
        """A process set ends; its layouts are evicted already."""
        self._sets = {label: declared for label, declared in self._sets.items() if declared.process_set_id != process_set_id}

    def in_use(self, label: str) -> int | None:
        """Return the layout of a set, if it has one."""
        declared = self._sets.get(label)
        return None if declared is None or declared.layout is None else declared.layout.layout_id

    def retire(self, rank: int, retired: Retired) -> bool:
        """A rank takes part in no further round of a set, which has no layout; return whether now no rank does."""
        declared = self._sets.setdefault(retired.label, _Set(retired.process_set_id))
        declared.retired.add(rank)
        return len(declared.retired) == len(self._process_sets[retired.process_set_id])

    def drop(self, label: str) -> None:
        """Forget a set without a layout."""
        del self._sets[label]

    @property
    def labels(self) -> frozenset[str]:
        """The sets that are remembered."""
        return frozenset(self._sets)

    def retune(self, limits: BucketSizes) -> None:
        """Cut sets differently from now on; layouts in use stay as they are."""
        self._limits = limits

    def nbytes(self, bucket: int) -> int:
        """Return the size of a learned bucket, padding included."""
        definition = self._buckets[bucket][0]
        return definition.elements * SUPPORTED_DTYPES[definition.response.dtype].itemsize

    def layouts(self) -> list[int]:
        """Return all layouts in use."""
        return list(self._layouts)

    def layouts_in(self, process_set_id: int) -> list[int]:
        """Return the layouts in use of a process set."""
        return [number for number, layout in self._layouts.items()
                if layout.buckets[0].response.process_set_id == process_set_id]

    def layouts_of(self, ranks: Iterable[int]) -> list[int]:
        """Return the layouts in use that one of these ranks takes part in."""
        wanted = frozenset(ranks)
        return [number for number, layout in self._layouts.items()
                if not wanted.isdisjoint(layout.buckets[0].response.contributors)]

    def waiting(self) -> Collection[BucketWaiting]:
        """Return the incomplete buckets, oldest first."""
        return self._waiting.values()

    def check_invariants(self) -> None:
        """Fail when the tables contradict each other."""
        for number, waiting in self._waiting.items():
            assert 0 < waiting.count == len(waiting.ranks) < len(waiting.bucket.response.contributors), waiting
            assert self._buckets[number][1] in self._layouts, "an evicted bucket waits"
        for label, declared in self._sets.items():
            assert declared.layout is None or self._layouts[declared.layout.layout_id].label == label
            assert all(len(ranks) < len(self._process_sets[declared.process_set_id])
                       for ranks in declared.done_ranks.values())
            assert all(number > declared.over for number in declared.done_ranks)
        assert not set(self._tombstones) & set(self._layouts)
        assert self._suspended <= self._layouts.keys()
        assert bool(self._suspended) <= bool(self._joined), "a layout stays suspended"
        assert {number for _, number in self._buckets.values()} <= set(self._tombstones) | set(self._layouts)

    def _set(self, about: Request | RoundDone) -> _Set:
        declared = self._sets.get(about.label)
        if declared is None:
            declared = self._sets[about.label] = _Set(about.process_set_id)
        return declared

    def _ends(self, declared: _Set, number: int) -> bool:
        """Return whether all ranks have finished a round; it is over then."""
        if len(declared.done_ranks[number]) < len(self._process_sets[declared.process_set_id]):
            return False
        declared.over = number
        for past in [past for past in declared.done_ranks if past <= number]:
            del declared.done_ranks[past]
        return True

    def _withdraw(self, layout: Layout) -> list[tuple[Ranks, Request]]:
        """Remove and return what ranks have reported of a layout, as (ranks, request)."""
        expanded: list[tuple[Ranks, Request]] = []
        for bucket in layout.buckets:
            waiting = self._waiting.pop(bucket.bucket_id, None)
            for ranks, ready in waiting.reported.items() if waiting else ():
                expanded.extend((ranks, request) for request in expand(bucket, ready))
        return expanded

    def _among(self, response: Response, ranks: Ranks) -> Ranks:
        """Return those of `ranks` that have a bucket; also when its process set has been removed, which evicted it."""
        if response.process_set_id in self._process_sets:
            return self._process_sets.among(response.process_set_id, ranks)
        return tuple(rank for rank in ranks if rank in response.contributors)

    def _is_waited_for(self, layout: int) -> bool:
        return any(bucket.bucket_id in self._waiting for bucket in self._layouts[layout].buckets)
