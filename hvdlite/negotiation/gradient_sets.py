"""Gradient sets at the coordinator: their rounds, and the layouts by which they are reported. Pure.

The life of a gradient set
    LEARNING   Each rank reports the members one by one. When every rank has finished the round, the order in which the
               members became ready everywhere gives a layout, which one decision announces.
    LEARNED    A rank reports one id when a bucket is full. When all ranks have reported it, one id releases it.
    SUSPENDED  From the time when a rank of the process set joins until all have joined. Members are reported one by one.
    LEARNING   After an eviction: a rank's set changed (`LayoutStale`), a rank left, or the table is full.
    When a layout is evicted or suspended, the coordinator takes each bucket id that ranks have reported, or report later, as
    the requests of the bucket's members. No rank repeats a report.

Rules (docs/protocol.md#learning, #rounds, #layouts, #join)
- The table of layouts changes only by `Decision.learned`, `suspended` and `evicted` and by the answer to a join. Every rank
  applies these at the same point.
- Ids are never used again. An evicted layout stays readable until every rank has applied its eviction.
- When all ranks have joined, rounds are numbered anew and higher (`first_round`), and suspended layouts are used again. A
  bucket that is reported with a lower round is taken as its members' requests.
- A layout learned from round r is used from round r + 2. A rank may be in round r + 1 when the decision reaches it, but it
  cannot finish that round before it has applied the decision. So no round is reported partly by member, partly by bucket.
- A later world of an elastic job begins with the layouts of rank 0 in the one before (`carry_over`). They are in the first
  decision, so every rank has them before its first round. A rank whose set they do not describe lets them be evicted.
- A member that is unused on a rank does not break a bucket: its slice holds the reduction's identity element. So a bucket
  id always means that all slices are filled.
- Ranks are at most one round apart in a set: a round ends on a rank when all its members are answered.
- A set that a rank has dropped (`Retired`) loses its layout and learns no other, because no round can become complete. When
  all ranks have dropped it, it is forgotten. Its label is never used again.
- Nothing is learned from a round of which a bucket was released or a member refused, or in which a rank had joined.
- A member that was sparse once on some rank is never put into a bucket. Layouts name such members (`Layout.unbucketed`).
- A set whose layouts keep going stale is learned again after 1, 2, 4, ... complete rounds. The end of a layout that was in
  use for long does not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective
from hvdlite.negotiation.gathering import Ranks, first_of
from hvdlite.negotiation.layouts import BucketSizes, carried_over, plan_buckets, requests_of
from hvdlite.negotiation.messages import Layout, Request, RoundDone
from hvdlite.negotiation.readiness import Aggregator

MAX_BACKOFF_ROUNDS = 64
"""Rounds; also how long a layout must be in use so that its end does not count."""


@dataclasses.dataclass
class _GradientSet:
    """The state of one gradient set."""

    process_set_id: int
    ready: dict[str, Mapping[int, Request]] = dataclasses.field(default_factory=dict)  # this round, in ready order
    invalid: bool = False  # a member of this round was refused, or a join failed: nothing is learned from it
    last_bucket_round: int = 0  # the last round of which a bucket was released; likewise
    sparse: set[str] = dataclasses.field(default_factory=set)  # members that are never put into a bucket
    members: frozenset[str] = frozenset()  # of its layout
    rounds_in_use: int = 0  # rounds that ended since it was learned
    evictions: int = 0
    order: dict[str, int] = dataclasses.field(default_factory=dict)  # set by `record_order`; empty: ready order counts
    backoff_rounds: int = 1  # complete rounds still to see before learning


class GradientSetTable:
    """All gradient sets of the job and their layouts, at the coordinator.

    Args:
        reports: has the table of layouts, and what ranks have reported of their buckets, and who belongs to which process
            set, who has joined, and which sets ranks have dropped.
        limits: how sets are cut; a `middle` of 0 turns learning off.
        capacity: layouts that may exist at a time; the least recently used is evicted.

    Attributes:
        layouts: those of all sets.
    """

    def __init__(self, reports: Aggregator, limits: BucketSizes, capacity: int) -> None:
        self._reports = reports
        self._process_sets = reports.process_sets
        self._joined = reports.joins.ranks
        self.layouts = reports.layouts
        self.limits = limits
        self._capacity = capacity
        self._gradient_sets: dict[str, _GradientSet] = {}
        self._next_layout = self._next_bucket = 1

    def observe(self, requests: Mapping[int, Request]) -> int | None:
        """Record that a member was answered by itself; return a layout to evict for that, or None."""
        request = first_of(requests)
        gradient_set = self._set(request)
        gradient_set.ready.pop(request.name, None)
        if request.collective is Collective.ALLGATHER:
            gradient_set.sparse.add(request.name)
            layout = self.layouts.named(request.label)
            return layout.layout_id if layout is not None and request.name in gradient_set.members else None
        if request.name not in gradient_set.sparse:
            gradient_set.ready[request.name] = requests
        return None

    def record_order(self, request: Request) -> None:
        """Cut the set in the order of these calls, instead of the order in which the members become ready."""
        order = self._set(request).order
        order.setdefault(request.name, len(order))

    def invalidate(self, request: Request) -> None:
        """Learn nothing from this round: a member was refused."""
        self._set(request).invalid = True

    def abort_join(self) -> None:
        """Learn nothing from the rounds under way: ranks had joined in them, which take part again."""
        for gradient_set in self._gradient_sets.values():
            gradient_set.invalid = True

    def learn(self, done: RoundDone) -> tuple[Layout | None, list[int]]:
        """Return the layout learned from a round that all ranks have finished, if any, and the layouts to evict for it."""
        label, round_id = done.label, done.round_id
        gradient_set = self._set(done)
        ranks = self._process_sets[done.process_set_id]
        ready, incomplete = gradient_set.ready, gradient_set.invalid or gradient_set.last_bucket_round >= round_id
        gradient_set.ready, gradient_set.invalid = {}, False
        gradient_set.rounds_in_use += 1
        if self.layouts.named(label) is not None or incomplete or not ready or not self.limits.middle:
            return None, []
        if (done.process_set_id, label) in self._reports.retired:
            return None, []
        if self._joined and any(rank in self._joined for rank in ranks):
            return None, []
        gradient_set.backoff_rounds -= 1
        if gradient_set.backoff_rounds > 0:
            return None, []
        order = gradient_set.order
        members = sorted(ready.values(), key=lambda requests: order.get(first_of(requests).name, 0))
        gradient_set.order = {}
        buckets = plan_buckets(members, ranks, self.limits, self._next_bucket)
        layout = Layout(layout_id=self._next_layout, label=label, first_round=round_id + 2, buckets=buckets,
                        unbucketed=tuple(sorted(gradient_set.sparse)))
        in_use = self.layouts.in_use
        idle = [layout_id for layout_id, other in in_use.items()
                if not any(bucket.bucket_id in self._reports.buckets for bucket in other.buckets)]
        evicted = idle[:max(0, len(in_use) + 1 - self._capacity)]
        self._use(gradient_set, layout)
        return layout, evicted

    def carry_over(self, layouts: Mapping[str, Layout]) -> list[Layout]:
        """Begin with layouts of the last world of an elastic job, which are used from the first round on; return them.

        Args:
            layouts: of the process set of all ranks, by the labels of their gradient sets in this world.
        """
        carried = []
        for label, layout in list(layouts.items())[:self._capacity if self.limits.middle else 0]:
            gradient_set = self._gradient_sets[label] = _GradientSet(GLOBAL_PROCESS_SET_ID)
            carried.append(carried_over(layout, label, self._process_sets[GLOBAL_PROCESS_SET_ID], self.layouts.first_round,
                                        self._next_layout, self._next_bucket))
            gradient_set.sparse = set(carried[-1].unbucketed)
            self._use(gradient_set, carried[-1])
        return carried

    def _use(self, gradient_set: _GradientSet, layout: Layout) -> None:
        """Take a new layout into the tables."""
        self._next_layout += 1
        self._next_bucket += len(layout.buckets)
        self.layouts.learn(layout)
        gradient_set.members = frozenset(member.name for bucket in layout.buckets for member in bucket.members)
        gradient_set.rounds_in_use = 0

    def released(self, layout: Layout, round_id: int) -> None:
        """Note that a bucket of a round is released."""
        self.layouts.in_use[layout.layout_id] = self.layouts.in_use.pop(layout.layout_id)  # used most recently
        self._gradient_sets[layout.label].last_bucket_round = round_id

    def note_rounds(self, label: str, rounds: int) -> None:
        """Note rounds that ranks have finished by themselves, in a mailbox that has ended, perhaps with its layout."""
        gradient_set = self._gradient_sets.get(label)
        if gradient_set is not None:
            gradient_set.rounds_in_use += rounds
            if gradient_set.rounds_in_use >= MAX_BACKOFF_ROUNDS:
                gradient_set.evictions, gradient_set.backoff_rounds = 0, min(gradient_set.backoff_rounds, 1)

    def evict(self, layout_id: int, sequence: int, *, back_off: bool = True) -> list[tuple[Ranks, Request]] | None:
        """End a layout in decision `sequence`; return what ranks have reported of it, as (ranks, request).

        Returns None when the layout is not in use.

        Args:
            back_off: whether the set waits for more rounds than last time before it is learned again.
        """
        if layout_id not in self.layouts.in_use:
            return None
        layout = self.layouts.evict(layout_id, sequence)
        gradient_set = self._gradient_sets[layout.label]
        gradient_set.members = frozenset()
        if gradient_set.rounds_in_use >= MAX_BACKOFF_ROUNDS:
            gradient_set.evictions = 0
        gradient_set.evictions += back_off
        gradient_set.backoff_rounds = min(1 << max(0, gradient_set.evictions - 1), MAX_BACKOFF_ROUNDS)
        return self._withdraw(layout)

    def suspend(self, layout_id: int) -> list[tuple[Ranks, Request]] | None:
        """Do not use a layout until all ranks have joined; return what ranks have reported of it, as (ranks, request).

        Returns None when the layout is suspended already.
        """
        if self.layouts.is_suspended(self.layouts.in_use[layout_id]):
            return None
        return self._withdraw(self.layouts.suspend(layout_id))

    def _withdraw(self, layout: Layout) -> list[tuple[Ranks, Request]]:
        """Gather a layout's buckets no more; return the requests that their reports stand for, as (ranks, request)."""
        return [(ranks, request) for gathered in self._reports.withdraw(layout) for ranks, ready in gathered.parts
                for request in requests_of(self.layouts.bucket(ready.bucket_id), ready)]

    def layout_of(self, request: Request) -> int | None:
        """Return the layout in whose buckets `request` should have been reported, or None."""
        layout = self.layouts.named(request.label)
        if layout is None or request.name not in self._gradient_sets[request.label].members:
            return None
        if request.round_id < max(layout.first_round, self.layouts.first_round) or self.layouts.is_suspended(layout):
            return None
        return layout.layout_id

    def resume(self) -> None:
        """Go on after all ranks have joined. Nothing is learned from unfinished rounds."""
        for gradient_set in self._gradient_sets.values():
            gradient_set.ready.clear()
            gradient_set.invalid = False

    def remove(self, process_set_id: int) -> None:
        """Forget the sets of a process set that ends; their layouts are evicted already."""
        self._gradient_sets = {label: gradient_set for label, gradient_set in self._gradient_sets.items()
                               if gradient_set.process_set_id != process_set_id}

    def drop(self, label: str) -> None:
        """Forget a set without a layout."""
        self._gradient_sets.pop(label, None)

    @property
    def labels(self) -> frozenset[str]:
        """The sets that are remembered."""
        return frozenset(self._gradient_sets)

    def nbytes(self, bucket_id: int) -> int:
        """Return the size of a learned bucket, padding included."""
        bucket = self.layouts.bucket(bucket_id)
        return bucket.elements * SUPPORTED_DTYPES[bucket.response.dtype].itemsize

    def layouts_in(self, process_set_id: int) -> list[int]:
        """Return the layouts in use of a process set."""
        return [layout_id for layout_id, layout in self.layouts.in_use.items()
                if layout.buckets[0].response.process_set_id == process_set_id]

    def layouts_of(self, ranks: Iterable[int]) -> list[int]:
        """Return the layouts in use that one of these ranks takes part in."""
        wanted = frozenset(ranks)
        return [layout_id for layout_id, layout in self.layouts.in_use.items()
                if not wanted.isdisjoint(layout.buckets[0].response.contributors)]

    def check_invariants(self) -> None:
        """Fail when the tables contradict each other."""
        for layout in self.layouts.in_use.values():
            members = self._gradient_sets[layout.label].members
            assert members == {member.name for bucket in layout.buckets for member in bucket.members}, layout.label
            assert self._joined or not self.layouts.is_suspended(layout), "a layout stays suspended"

    def _set(self, about: Request | RoundDone) -> _GradientSet:
        gradient_set = self._gradient_sets.get(about.label)
        if gradient_set is None:
            gradient_set = self._gradient_sets[about.label] = _GradientSet(about.process_set_id)
        return gradient_set
