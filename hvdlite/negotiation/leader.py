"""A host leader's role: merge the reports of one host's ranks into one report for the coordinator. Pure.

What all ranks of the host report alike is sent once: buckets that are ready on all of them, rounds that all of them
finished, equal requests for a tensor. Everything else is forwarded rank by rank. So in steady state the coordinator's work
for a training step grows with hosts x buckets, whatever the number of ranks and tensors; without buckets, with hosts x
tensors.

Rules (docs/protocol.md#leaders)
- The items of one rank are forwarded in its order, except that buckets, finished rounds and requests are held back until the
  host's other ranks report them too. They are forwarded where the last rank reports them.
- A request is held back only where its arrival time changes nothing. A request that carries its tensor, ends a layout or
  changes process sets is forwarded immediately, and so are the other ranks' requests for that tensor. Before a join, and
  before a rank leaves, everything that is held back is forwarded. See `held_requests.py`.
- A finished round is forwarded after everything that belongs to it: after all requests of the round, including those that
  only some ranks made, and after the buckets of the round that are held back.
- The ranks that finished a round are a set, so a repetition changes nothing. A rank that has joined finishes no round and is
  not waited for.
- When a layout is evicted or suspended, its buckets that are held back are forwarded rank by rank, because some rank of the
  host will never report them. The leader sees the decision before its ranks apply it.
- When a rank joins or drops a set, or is asked for its status, or reports that it is blocked, everything that is held back
  is forwarded rank by rank first. After a drop the coordinator may forget the set; a stall report is to name single ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from hvdlite.core.types import Collective
from hvdlite.negotiation.held_requests import HeldRequests
from hvdlite.negotiation.layouts import first_round
from hvdlite.negotiation.messages import (
    BucketReady,
    Decision,
    ErrorKind,
    HostReport,
    Layout,
    MergedRequests,
    RankReport,
    Report,
    ReportItem,
    Request,
    Response,
    Retired,
    RoundDone,
)
from hvdlite.negotiation.pending_buckets import unused_members
from hvdlite.negotiation.process_sets import ProcessSetTable

HostReportItem = RankReport | MergedRequests | BucketReady | RoundDone
"""An item of a host report."""
_CHANGES_SETS: Final = frozenset({Collective.JOIN, Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET})
"""Collectives that change which ranks participate."""


class Leader:
    """Merges the reports of one host's ranks.

    Args:
        ranks: the host's.
        size: ranks of the job.
        in_order: whether the coordinator cuts gradient sets in the order in which a rank makes its requests.
    """

    def __init__(self, ranks: Iterable[int], size: int, *, epoch: int = 0, in_order: bool = False) -> None:
        self.ranks = tuple(ranks)
        self._process_sets = ProcessSetTable(size)
        self.epoch = epoch
        self._in_order = in_order
        self._applied = dict.fromkeys(self.ranks, 0)
        self._held: dict[int, dict[int, BucketReady]] = {}  # bucket -> rank -> report; invariant: never all ranks
        self._done_ranks: dict[RoundDone, set[int]] = {}  # the ranks that finished a round; likewise
        # (process set, label) -> the last round that all of them finished
        self._last_complete_rounds: dict[tuple[int, str], int] = {}
        self._retired: dict[tuple[int, str], set[int]] = {}  # the ranks that take no part in a set any more; likewise
        self._layouts: dict[int, Layout] = {}  # in use
        # Bucket -> its set and process set, as long as a rank may name it
        self._bucket_sets: dict[int, tuple[str, int]] = {}
        # (bucket, round) that is forwarded rank by rank -> ranks yet to report it
        self._unmerged: dict[tuple[int, int], int] = {}
        self._suspended: set[int] = set()  # buckets
        self._joined: set[int] = set()  # ranks of the host that have joined
        self._joins = 0  # how often all ranks have
        self._first_round = first_round(0)  # since then
        self._evicted: list[tuple[int, Layout]] = []  # with its decision, which some rank has not applied
        self._held_rounds: list[RoundDone] = []  # all ranks finished them, but a bucket of the round is held back
        self._requests = HeldRequests(self._active_count)
        self._some_left = False  # a rank of the job has left: requests are not held back any more
        self._outgoing: list[HostReportItem] = []  # for the next report, like `_lost`
        self._lost: list[tuple[int, str]] = []

    def receive(self, rank: int, report: Report) -> None:
        """Handle a report of a rank of the host."""
        if report.epoch != self.epoch:
            return
        self._applied[rank] = report.applied
        alone: list[ReportItem] = []
        for item in report.items:
            together: Sequence[HostReportItem] = ()  # for several ranks
            if isinstance(item, BucketReady):
                if self._bypasses_merging(item):
                    alone.append(_without_end(item))
                else:
                    together = self._hold_bucket(rank, item)
                if item.ends_round:
                    label, process_set_id = self._bucket_sets[item.bucket_id]
                    together = (*together, *self._round_done(rank, RoundDone(label, item.round_id, process_set_id)))
            elif isinstance(item, RoundDone):
                together = self._round_done(rank, item)
            elif isinstance(item, Request) and item.collective is Collective.JOIN:
                self._forward(rank, alone)
                self._release_all()
                alone = [item]
                together = self._join(rank)
            elif isinstance(item, Retired):
                self._forward(rank, alone)
                self._release_all()
                self._release_rounds()
                self._retire(rank, item)
                alone = [item]
            elif isinstance(item, Request) and self._can_be_held(item):
                together = self._requests.add(rank, item)
            else:
                if isinstance(item, Request):
                    self._outgoing.extend(self._stop_holding(item))
                alone.append(item)
            if together:
                self._forward(rank, alone)
                alone = []
                self._outgoing.extend(together)
        if report.blocked is not None or report.leaving:
            self._release_all()
        if (alone or report.side_message is not None or report.leaving or report.failure is not None
                or report.blocked is not None):
            self._outgoing.append(RankReport(rank, msgspec.structs.replace(report, items=tuple(alone))))
        self._forget_evicted()

    def lose(self, rank: int, reason: str) -> None:
        """Report that a rank of the host is gone; the coordinator knows whether it had left."""
        self._lost.append((rank, reason))

    def observe(self, decision: Decision) -> None:
        """Follow a decision before the host's ranks receive it."""
        if decision.epoch != self.epoch:
            return
        if decision.left or not set(self.ranks).isdisjoint(decision.status_requests):
            self._release_all()
        self._some_left |= bool(decision.left)
        self._outgoing.extend(self._requests.answered(decision.responses))
        for layout in decision.learned:
            self._bucket_sets.update((bucket.bucket_id, (layout.label, bucket.response.process_set_id))
                              for bucket in layout.buckets)
            self._layouts[layout.layout_id] = layout
        for layout_id in decision.suspended:
            self._withdraw(self._layouts[layout_id])
            self._suspended.update(bucket.bucket_id for bucket in self._layouts[layout_id].buckets)
        for layout_id in decision.evicted:
            ended = self._layouts.pop(layout_id)
            self._evicted.append((decision.sequence, ended))
            self._withdraw(ended)
            self._suspended.difference_update(bucket.bucket_id for bucket in ended.buckets)
        for response in decision.responses:
            if response.collective is Collective.JOIN:
                self._end_join(response)
            elif response.error is ErrorKind.NONE and response.collective is Collective.ADD_PROCESS_SET:
                self._process_sets.add(response.members)
            elif response.error is ErrorKind.NONE and response.collective is Collective.REMOVE_PROCESS_SET:
                self._remove_set(response.rows[0])

    def take_report(self) -> HostReport | None:
        """Return the report to send to the coordinator, or None."""
        self._release_rounds()
        if not (self._outgoing or self._lost):
            return None
        report = HostReport(epoch=self.epoch, applied=min(self._applied.values()),
                            items=tuple(_merged_runs(self._outgoing)), lost=tuple(self._lost))
        self._outgoing.clear()
        self._lost.clear()
        return report

    def check_invariants(self) -> None:
        """Fail when an item is held back that all ranks have reported."""
        assert all(0 < len(held) < self._count(self._bucket_sets[bucket][1]) for bucket, held in self._held.items())
        assert all(0 < len(ranks) < self._count(done.process_set_id) for done, ranks in self._done_ranks.items())
        assert all(count > 0 for count in self._unmerged.values())
        assert self._held.keys().isdisjoint(bucket for bucket, _ in self._unmerged)
        self._requests.check_invariants()

    def _forward(self, rank: int, items: Sequence[ReportItem]) -> None:
        if items:
            self._outgoing.append(self._rank_report(rank, items))

    def _rank_report(self, rank: int, items: Sequence[ReportItem]) -> RankReport:
        return RankReport(rank, Report(epoch=self.epoch, applied=self._applied[rank], items=tuple(items)))

    def _bypasses_merging(self, ready: BucketReady) -> bool:
        """Return whether a bucket is forwarded immediately, for one rank."""
        if self._unmerged and (ready.bucket_id, ready.round_id) in self._unmerged:
            self._count_down(ready.bucket_id, ready.round_id, 1)
            return True
        if ready.bucket_id in self._suspended or ready.round_id < self._first_round:
            return True
        if not self._evicted:
            return False
        return any(bucket.bucket_id == ready.bucket_id for _, layout in self._evicted for bucket in layout.buckets)

    def _can_be_held(self, request: Request) -> bool:
        """Return whether a request may be held back until the host's other ranks make it."""
        if self._some_left or request.payload is not None or request.collective in _CHANGES_SETS:
            return False
        if request.process_set_id not in self._process_sets or self._active_count(request.process_set_id) < 2:
            return False
        if not request.label:
            return True
        if self._in_order and self._process_sets[request.process_set_id][0] in self.ranks:
            return False  # the order in which that rank makes them counts
        return not any(layout.label == request.label and request.round_id >= layout.first_round
                       for layout in self._layouts.values())

    def _stop_holding(self, request: Request) -> Sequence[MergedRequests]:
        """Forward a request immediately; return the held requests to forward before it."""
        before = self._requests.release(request)
        if request.collective is Collective.REMOVE_PROCESS_SET:
            before += self._requests.release_if(lambda held: held.process_set_id == request.members[0])
        return before

    def _active_count(self, process_set_id: int) -> int:
        """Return the number of the host's ranks that belong to a process set and have not joined."""
        ranks = self._process_sets.among(process_set_id, self.ranks)
        return len(ranks) - len(self._joined.intersection(ranks)) if self._joined else len(ranks)

    def _release_all(self) -> None:
        """Forward everything that is held back, rank by rank."""
        self._outgoing.extend(self._requests.release_if())
        for bucket, held in self._held.items():
            for rank, ready in held.items():
                self._forward(rank, [_without_end(ready)])
                self._unmerged.setdefault((bucket, ready.round_id), self._count(self._bucket_sets[bucket][1]))
            self._count_down(bucket, ready.round_id, len(held))
        self._held.clear()
        for done, ranks in self._done_ranks.items():
            for rank in ranks:
                self._forward(rank, [done])

    def _withdraw(self, layout: Layout) -> None:
        """Forward the buckets of a layout that are held back, rank by rank."""
        for bucket in layout.buckets:
            for rank, ready in self._held.pop(bucket.bucket_id, {}).items():
                self._forward(rank, [_without_end(ready)])
            self._unmerged = {key: count for key, count in self._unmerged.items() if key[0] != bucket.bucket_id}

    def _release_rounds(self) -> None:
        """Forward the finished rounds of which no bucket is held back any more."""
        if self._held_rounds:
            self._outgoing.extend(done for done in self._held_rounds if not self._holds_bucket_of(done))
            self._held_rounds = [done for done in self._held_rounds if self._holds_bucket_of(done)]

    def _count_down(self, bucket: int, round_id: int, reported: int) -> None:
        self._unmerged[bucket, round_id] -= reported
        if not self._unmerged[bucket, round_id]:
            del self._unmerged[bucket, round_id]

    def _forget_evicted(self) -> None:
        """Forget the buckets that no rank of the host can report any more."""
        while self._evicted and self._evicted[0][0] <= min(self._applied.values()):
            for bucket in self._evicted.pop(0)[1].buckets:
                del self._bucket_sets[bucket.bucket_id]

    def _holds_bucket_of(self, done: RoundDone) -> bool:
        return any(ready.round_id <= done.round_id for bucket, held in self._held.items()
                   if self._bucket_sets[bucket][0] == done.label for ready in held.values())

    def _hold_bucket(self, rank: int, ready: BucketReady) -> Sequence[RankReport | BucketReady]:
        """Hold back a bucket; return the merged one when all ranks of the host have reported it."""
        held = self._held.setdefault(ready.bucket_id, {})
        held[rank] = ready
        if len(held) < self._count(self._bucket_sets[ready.bucket_id][1]):
            return ()
        del self._held[ready.bucket_id]
        if any((other.step, other.in_step) != (ready.step, ready.in_step) for other in held.values()):
            return [self._rank_report(each, [_without_end(other)]) for each, other in held.items()]
        everywhere, somewhere = unused_members(list(held.values()))
        return (msgspec.structs.replace(ready, unused=everywhere, unused_somewhere=somewhere, ends_round=False),)

    def _count(self, process_set_id: int) -> int:
        """Return the number of the host's ranks that belong to a process set."""
        return len(self._process_sets.among(process_set_id, self.ranks))

    def _round_done(self, rank: int, done: RoundDone) -> Sequence[MergedRequests | RoundDone]:
        """Note that a rank finished a round; return what to forward when all ranks of the host have."""
        name = done.process_set_id, done.label
        if (done.process_set_id not in self._process_sets or done.round_id <= self._last_complete_rounds.get(name, 0)
                or done.round_id < self._first_round):
            return ()
        ranks = self._done_ranks.get(done)
        if ranks is None:
            ranks = self._done_ranks[done] = self._joined.intersection(self._process_sets[done.process_set_id])
        ranks.add(rank)
        return self._ended_by(done)

    def _ended_by(self, done: RoundDone) -> Sequence[MergedRequests | RoundDone]:
        """Return what to forward when all ranks have finished a round: `done` too, unless a bucket of it is held back."""
        if len(self._done_ranks[done]) < self._count(done.process_set_id):
            return ()
        del self._done_ranks[done]
        self._last_complete_rounds[done.process_set_id, done.label] = done.round_id
        rest = self._requests.release_if(lambda held: held.label == done.label and held.round_id <= done.round_id)
        if not self._holds_bucket_of(done):
            return (*rest, done)
        self._held_rounds.append(done)
        return rest

    def _retire(self, rank: int, retired: Retired) -> None:
        """Forget a set's rounds when all ranks of the host have dropped it."""
        name = retired.process_set_id, retired.label
        if retired.process_set_id not in self._process_sets:
            return
        ranks = self._retired.setdefault(name, set())
        ranks.add(rank)
        if len(ranks) == self._count(retired.process_set_id):
            del self._retired[name]
            self._last_complete_rounds.pop(name, None)
            self._done_ranks = {done: ranks for done, ranks in self._done_ranks.items()
                            if (done.process_set_id, done.label) != name}

    def _join(self, rank: int) -> Sequence[MergedRequests | RoundDone]:
        """Do not wait for a rank that has joined; return what to forward for that."""
        self._joined.add(rank)
        ended: list[MergedRequests | RoundDone] = []
        for done in sorted(self._done_ranks, key=lambda done: done.round_id):
            if self._process_sets.includes(done.process_set_id, rank):
                self._done_ranks[done].add(rank)
                ended.extend(self._ended_by(done))
        return ended

    def _end_join(self, response: Response) -> None:
        """All ranks take part again. When all have joined, rounds are numbered anew."""
        self._joined.clear()
        if response.error is ErrorKind.NONE:
            self._joins += 1
            self._first_round = first_round(self._joins)
            self._suspended.clear()
            self._done_ranks.clear()
            self._held_rounds.clear()

    def _remove_set(self, process_set_id: int) -> None:
        """Forget a process set and the rounds that were open in it."""
        self._outgoing.extend(self._requests.release_if(lambda held: held.process_set_id == process_set_id))
        self._process_sets.remove(process_set_id)
        self._done_ranks = {done: ranks for done, ranks in self._done_ranks.items() if done.process_set_id != process_set_id}
        self._held_rounds = [done for done in self._held_rounds if done.process_set_id != process_set_id]
        self._last_complete_rounds = {name: round_id for name,
                                      round_id in self._last_complete_rounds.items() if name[0] != process_set_id}
        self._retired = {name: ranks for name, ranks in self._retired.items() if name[0] != process_set_id}


def _merged_runs(items: Iterable[HostReportItem]) -> Iterator[HostReportItem]:
    """Merge consecutive requests of the same ranks."""
    for ranks, run in itertools.groupby(items, lambda each: each.ranks if isinstance(each, MergedRequests) else None):
        if ranks is None:
            yield from run
        else:
            merged = (each.requests for each in run if isinstance(each, MergedRequests))
            yield MergedRequests(ranks, tuple(itertools.chain.from_iterable(merged)))


def _without_end(ready: BucketReady) -> BucketReady:
    """Return a bucket as it is forwarded: the leader reports separately when the round is over."""
    return msgspec.structs.replace(ready, ends_round=False) if ready.ends_round else ready
