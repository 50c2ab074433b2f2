"""The leader, a role of one rank per host: merge the reports of the host's ranks for the coordinator. Pure.

What all ranks of the host say alike goes up once: buckets that are ready on all of them, rounds that all of them finished,
equal requests for a tensor. Everything else passes through, rank by rank. So in steady state the coordinator's work for a
training step grows with hosts x buckets, whatever the number of ranks and tensors; without buckets, with hosts x tensors.

Rules (docs/protocol.md#leaders, #report-order)
- What one rank said goes up in the order in which it said it, except that buckets, finished rounds and requests wait for the
  host's others: they go up where the last of them said it.
- Requests wait only where nothing can depend on when the coordinator hears of them: a request that carries its tensor, that
  ends a layout or that changes process sets goes up at once, and the others' for that tensor too. Before a join, and before
  a rank leaves, everything that is held back goes up. See `held_requests.py`.
- A finished round goes up after all requests of it, also those that only some ranks of the host have made.
- Who finished a round is remembered as a set of ranks, so reporting it again changes nothing. A rank that has joined
  finishes no round, and is not waited for.
- A finished round goes up after everything that belongs to it, so it waits while a bucket of the round is held back.
- When a layout is evicted or suspended, what was held back of its buckets goes up rank by rank: some rank of the host will
  never report that bucket. The leader sees that before any of its ranks applies it, because decisions pass through it.
- When a rank of the host joins, what is held back goes up rank by rank before that.
- When a rank drops a set, what is held back goes up before that: the coordinator may forget the set then.
- When a rank of the host is asked for its status, or says that it is blocked, what is held back goes up rank by rank too:
  somebody waits for one of them, and a stall report is to name that one.
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
from hvdlite.negotiation.process_sets import ProcessSetTable

HostReportItem = RankReport | MergedRequests | BucketReady | RoundDone
"""An item of a host report."""
CHANGES_SETS: Final = frozenset({Collective.JOIN, Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET})
"""Requests after which other ranks take part than before."""


class Leader:
    """Merges the reports of one host's ranks.

    Args:
        ranks: the host's.
        size: ranks of the job.
        in_order: whether the coordinator arranges layouts by the order in which a rank makes its requests.
    """

    def __init__(self, ranks: Iterable[int], size: int, *, epoch: int = 0, in_order: bool = False) -> None:
        self.ranks = tuple(ranks)
        self._process_sets = ProcessSetTable(size)
        self.epoch = epoch
        self._in_order = in_order
        self._applied = dict.fromkeys(self.ranks, 0)
        self._held: dict[int, dict[int, BucketReady]] = {}  # bucket -> rank -> report; invariant: never all ranks
        self._done_ranks: dict[RoundDone, set[int]] = {}  # the ranks that finished a round; likewise
        self._over: dict[tuple[int, str], int] = {}  # (process set, label) -> the last round that all of them finished
        self._retired: dict[tuple[int, str], set[int]] = {}  # the ranks that take no part in a set any more; likewise
        self._layouts: dict[int, Layout] = {}  # in use
        # Bucket -> its set and process set, as long as a rank may name it
        self._bucket_sets: dict[int, tuple[str, int]] = {}
        self._opened: dict[tuple[int, int], int] = {}  # (bucket, round) that goes up rank by rank -> ranks yet to report it
        self._suspended: set[int] = set()  # buckets
        self._joined: set[int] = set()  # those of the host's ranks that have joined
        self._joins = 0  # how often all ranks have
        self._first_round = first_round(0)  # since then
        self._ended: list[tuple[int, Layout]] = []  # evicted by that decision, which some rank has not applied
        self._postponed: list[RoundDone] = []  # rounds that all of them finished, of which a bucket is held back
        self._requests = HeldRequests(self._taking_part)
        self._some_left = False  # ranks of the job: from then on nothing is worth waiting for
        self._outgoing: list[HostReportItem] = []  # to go up; likewise below
        self._lost: list[tuple[int, str]] = []

    def receive(self, rank: int, report: Report) -> None:
        """Take in what a rank of the host says."""
        self._applied[rank] = report.applied
        alone: list[ReportItem] = []
        for item in report.items:
            together: Sequence[HostReportItem] = ()  # what goes up for several ranks now
            if isinstance(item, BucketReady):
                if self._goes_alone(item):
                    alone.append(_open_ended(item))
                else:
                    together = self._hold(rank, item)
                if item.ends_round:
                    label, process_set_id = self._bucket_sets[item.bucket_id]
                    together = (*together, *self._round_done(rank, RoundDone(label, item.round_id, process_set_id)))
            elif isinstance(item, RoundDone):
                together = self._round_done(rank, item)
            elif isinstance(item, Request) and item.collective is Collective.JOIN:
                if alone:
                    self._pass_on(rank, alone)
                self._open()
                alone = [item]
                together = self._join(rank)
            elif isinstance(item, Retired):
                if alone:
                    self._pass_on(rank, alone)
                self._open()
                self._resume()
                self._retire(rank, item)
                alone = [item]
            elif isinstance(item, Request) and self._is_shared(item):
                together = self._requests.add(rank, item)
            else:
                if isinstance(item, Request):
                    self._outgoing.extend(self._let_pass(item))
                alone.append(item)
            if together:
                if alone:
                    self._pass_on(rank, alone)
                    alone = []
                self._outgoing.extend(together)
        if report.blocked is not None or report.leaving:
            self._open()
        if (alone or report.side_message is not None or report.leaving or report.failure is not None
                or report.blocked is not None):
            self._outgoing.append(RankReport(rank, msgspec.structs.replace(report, items=tuple(alone))))
        self._forget()

    def lose(self, rank: int, reason: str) -> None:
        """A rank of the host is gone; whether it had left, the coordinator knows."""
        self._lost.append((rank, reason))

    def watch(self, decision: Decision) -> None:
        """Take in a decision on its way to the host's ranks, before they get it."""
        if decision.left or not set(self.ranks).isdisjoint(decision.status_requests):
            self._open()
        self._some_left |= bool(decision.left)
        self._outgoing.extend(self._requests.answered(decision.responses))
        for layout in decision.learned:
            self._bucket_sets.update((bucket.bucket_id, (layout.label, bucket.response.process_set_id))
                              for bucket in layout.buckets)
            self._layouts[layout.layout_id] = layout
        for number in decision.suspended:
            self._withdraw(self._layouts[number])
            self._suspended.update(bucket.bucket_id for bucket in self._layouts[number].buckets)
        for number in decision.evicted:
            ended = self._layouts.pop(number)
            self._ended.append((decision.sequence, ended))
            self._withdraw(ended)
            self._suspended.difference_update(bucket.bucket_id for bucket in ended.buckets)
        for response in decision.responses:
            if response.collective is Collective.JOIN:
                self._end_join(response)
            elif response.error is ErrorKind.NONE and response.collective is Collective.ADD_PROCESS_SET:
                self._process_sets.add(response.members)
            elif response.error is ErrorKind.NONE and response.collective is Collective.REMOVE_PROCESS_SET:
                self._remove_set(response.rows[0])

    def report(self) -> HostReport | None:
        """Return what is to go up, or None."""
        self._resume()
        if not (self._outgoing or self._lost):
            return None
        report = HostReport(applied=min(self._applied.values()), items=tuple(_gathered(self._outgoing)),
                            lost=tuple(self._lost))
        self._outgoing.clear()
        self._lost.clear()
        return report

    def check_invariants(self) -> None:
        """Fail when something is held back that all ranks have reported."""
        assert all(0 < len(held) < self._count(self._bucket_sets[bucket][1]) for bucket, held in self._held.items())
        assert all(0 < len(ranks) < self._count(done.process_set_id) for done, ranks in self._done_ranks.items())
        assert all(count > 0 for count in self._opened.values())
        assert self._held.keys().isdisjoint(bucket for bucket, _ in self._opened)
        self._requests.check_invariants()

    def _pass_on(self, rank: int, items: Sequence[ReportItem]) -> None:
        self._outgoing.append(self._alone(rank, items))

    def _alone(self, rank: int, items: Sequence[ReportItem]) -> RankReport:
        return RankReport(rank, Report(epoch=self.epoch, applied=self._applied[rank], items=tuple(items)))

    def _goes_alone(self, ready: BucketReady) -> bool:
        """Return whether a bucket is not to be held back for the others."""
        if self._opened and (ready.bucket_id, ready.round_id) in self._opened:
            self._count_down(ready.bucket_id, ready.round_id, 1)
            return True
        if ready.bucket_id in self._suspended or ready.round_id < self._first_round:
            return True
        if not self._ended:
            return False
        return any(bucket.bucket_id == ready.bucket_id for _, layout in self._ended for bucket in layout.buckets)

    def _is_shared(self, request: Request) -> bool:
        """Return whether a request may wait for those of the host's others."""
        if self._some_left or request.payload is not None or request.collective in CHANGES_SETS:
            return False
        if request.process_set_id not in self._process_sets or self._taking_part(request.process_set_id) < 2:
            return False
        if not request.label:
            return True
        if self._in_order and self._process_sets[request.process_set_id][0] in self.ranks:
            return False  # the order in which that rank makes them counts
        return not any(layout.label == request.label and request.round_id >= layout.first_round
                       for layout in self._layouts.values())

    def _let_pass(self, request: Request) -> Sequence[MergedRequests]:
        """A request goes up by itself; return what goes up before it."""
        before = self._requests.loosen(request)
        if request.collective is Collective.REMOVE_PROCESS_SET:
            before += self._requests.release(lambda held: held.process_set_id == request.members[0])
        return before

    def _taking_part(self, process_set_id: int) -> int:
        """Return how many of the host's ranks belong to a process set and have not joined."""
        ranks = self._process_sets.among(process_set_id, self.ranks)
        return len(ranks) - len(self._joined.intersection(ranks)) if self._joined else len(ranks)

    def _open(self) -> None:
        """Let go of everything that is held back."""
        self._outgoing.extend(self._requests.release())
        for bucket, held in self._held.items():
            for rank, ready in held.items():
                self._pass_on(rank, [_open_ended(ready)])
                self._opened.setdefault((bucket, ready.round_id), self._count(self._bucket_sets[bucket][1]))
            self._count_down(bucket, ready.round_id, len(held))
        self._held.clear()
        for done, ranks in self._done_ranks.items():
            for rank in ranks:
                self._pass_on(rank, [done])

    def _withdraw(self, layout: Layout) -> None:
        """Let go of what is held back of a layout."""
        for bucket in layout.buckets:
            for rank, ready in self._held.pop(bucket.bucket_id, {}).items():
                self._pass_on(rank, [_open_ended(ready)])
            self._opened = {key: count for key, count in self._opened.items() if key[0] != bucket.bucket_id}

    def _resume(self) -> None:
        """Let go of the finished rounds of which no bucket is held back any more."""
        if self._postponed:
            self._outgoing.extend(done for done in self._postponed if not self._holds_back(done))
            self._postponed = [done for done in self._postponed if self._holds_back(done)]

    def _count_down(self, bucket: int, round_id: int, reported: int) -> None:
        self._opened[bucket, round_id] -= reported
        if not self._opened[bucket, round_id]:
            del self._opened[bucket, round_id]

    def _forget(self) -> None:
        """Drop what no rank of the host can name any more."""
        while self._ended and self._ended[0][0] <= min(self._applied.values()):
            for bucket in self._ended.pop(0)[1].buckets:
                del self._bucket_sets[bucket.bucket_id]

    def _holds_back(self, done: RoundDone) -> bool:
        return any(ready.round_id <= done.round_id for bucket, held in self._held.items()
                   if self._bucket_sets[bucket][0] == done.label for ready in held.values())

    def _hold(self, rank: int, ready: BucketReady) -> Sequence[RankReport | BucketReady]:
        """Keep a bucket back; return what goes up when the host's others have reported it."""
        held = self._held.setdefault(ready.bucket_id, {})
        held[rank] = ready
        if len(held) < self._count(self._bucket_sets[ready.bucket_id][1]):
            return ()
        del self._held[ready.bucket_id]
        if any((other.step, other.in_step) != (ready.step, ready.in_step) for other in held.values()):
            return [self._alone(each, [_open_ended(other)]) for each, other in held.items()]
        unused = set(ready.unused).intersection(*(other.unused for other in held.values())) if ready.unused else ()
        return (msgspec.structs.replace(ready, unused=tuple(sorted(unused)), ends_round=False),)

    def _count(self, process_set_id: int) -> int:
        """Return how many of the host's ranks belong to a process set."""
        return len(self._process_sets.among(process_set_id, self.ranks))

    def _round_done(self, rank: int, done: RoundDone) -> Sequence[MergedRequests | RoundDone]:
        """Note that a rank finished a round; return what goes up when the host's others have, too."""
        name = done.process_set_id, done.label
        if (done.process_set_id not in self._process_sets or done.round_id <= self._over.get(name, 0)
                or done.round_id < self._first_round):
            return ()
        ranks = self._done_ranks.get(done)
        if ranks is None:
            ranks = self._done_ranks[done] = self._joined.intersection(self._process_sets[done.process_set_id])
        ranks.add(rank)
        return self._ended_by(done)

    def _ended_by(self, done: RoundDone) -> Sequence[MergedRequests | RoundDone]:
        """Return what goes up when all ranks have finished a round: `done` too, unless a bucket is still held back."""
        if len(self._done_ranks[done]) < self._count(done.process_set_id):
            return ()
        del self._done_ranks[done]
        self._over[done.process_set_id, done.label] = done.round_id
        rest = self._requests.release(lambda held: held.label == done.label and held.round_id <= done.round_id)
        if not self._holds_back(done):
            return (*rest, done)
        self._postponed.append(done)
        return rest

    def _retire(self, rank: int, retired: Retired) -> None:
        """Forget the rounds of a set when no rank of the host takes part in another one."""
        name = retired.process_set_id, retired.label
        if retired.process_set_id not in self._process_sets:
            return
        ranks = self._retired.setdefault(name, set())
        ranks.add(rank)
        if len(ranks) == self._count(retired.process_set_id):
            del self._retired[name]
            self._over.pop(name, None)
            self._done_ranks = {done: ranks for done, ranks in self._done_ranks.items()
                            if (done.process_set_id, done.label) != name}

    def _join(self, rank: int) -> Sequence[MergedRequests | RoundDone]:
        """A rank has joined; return what goes up because it is not waited for any more."""
        self._joined.add(rank)
        ended: list[MergedRequests | RoundDone] = []
        for done in sorted(self._done_ranks, key=lambda done: done.round_id):
            if self._process_sets.includes(done.process_set_id, rank):
                self._done_ranks[done].add(rank)
                ended.extend(self._ended_by(done))
        return ended

    def _end_join(self, response: Response) -> None:
        """All ranks take part again; after they have joined, rounds are numbered anew."""
        self._joined.clear()
        if response.error is ErrorKind.NONE:
            self._joins += 1
            self._first_round = first_round(self._joins)
            self._suspended.clear()
            self._done_ranks.clear()
            self._postponed.clear()

    def _remove_set(self, number: int) -> None:
        """Forget a process set; rounds that were open in it are nobody's business any more."""
        self._outgoing.extend(self._requests.release(lambda held: held.process_set_id == number))
        self._process_sets.remove(number)
        self._done_ranks = {done: ranks for done, ranks in self._done_ranks.items() if done.process_set_id != number}
        self._postponed = [done for done in self._postponed if done.process_set_id != number]
        self._over = {name: round_id for name, round_id in self._over.items() if name[0] != number}
        self._retired = {name: ranks for name, ranks in self._retired.items() if name[0] != number}


def _gathered(items: Iterable[HostReportItem]) -> Iterator[HostReportItem]:
    """Put requests of the same ranks that follow each other together."""
    for ranks, run in itertools.groupby(items, lambda each: each.ranks if isinstance(each, MergedRequests) else None):
        if ranks is None:
            yield from run
        else:
            merged = (each.requests for each in run if isinstance(each, MergedRequests))
            yield MergedRequests(ranks, tuple(itertools.chain.from_iterable(merged)))


def _open_ended(ready: BucketReady) -> BucketReady:
    """Return a bucket as it goes up: its leader tells when the round is over."""
    return msgspec.structs.replace(ready, ends_round=False) if ready.ends_round else ready
