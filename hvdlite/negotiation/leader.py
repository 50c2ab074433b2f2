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
  before a rank leaves, everything that is held back is forwarded.
- What is forwarded before all ranks of the host have reported it *passes* from then on: the other ranks' items are forwarded
  as they come, until all have reported it, or it is answered.
- A finished round is forwarded after everything that belongs to it, also requests and buckets that only some ranks have
  reported.
- The ranks that finished a round are a set, so a repetition changes nothing. A rank that has joined finishes no round and is
  not waited for.
- When a layout is evicted or suspended, its buckets that are held back are forwarded rank by rank, because some rank of the
  host will never report them. The leader sees the decision before its ranks apply it.
- When a rank joins or drops a set, or is asked for its status, or reports that it is blocked, everything that is held back
  is forwarded rank by rank first. After a drop the coordinator may forget the set; a stall report is to name single ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from hvdlite.core.types import Collective
from hvdlite.negotiation.gathering import Gathered, Ranks
from hvdlite.negotiation.layouts import unused_members
from hvdlite.negotiation.messages import (
    BucketReady,
    Decision,
    ErrorKind,
    HostReport,
    MergedRequests,
    RankReport,
    Report,
    ReportItem,
    Request,
    Response,
    Retired,
    RoundDone,
)
from hvdlite.negotiation.readiness import Aggregator

HostReportItem = RankReport | MergedRequests | BucketReady | RoundDone
"""An item of a host report."""
_CHANGES_SETS: Final = frozenset({Collective.ADD_PROCESS_SET, Collective.REMOVE_PROCESS_SET})
"""Collectives that change process sets."""


class Leader:
    """Merges the reports of one host's ranks.

    Args:
        ranks: the host's.
        size: ranks of the job.
        in_order: whether the coordinator cuts gradient sets in the order in which a rank makes its requests.
    """

    def __init__(self, ranks: Iterable[int], size: int, *, epoch: int = 0, in_order: bool = False) -> None:
        self.ranks = tuple(ranks)
        self.epoch = epoch
        self._in_order = in_order
        self._applied = dict.fromkeys(self.ranks, 0)
        self._alone: dict[int, Ranks] = {rank: (rank,) for rank in self.ranks}  # each rank as the source of an item
        self._reports = Aggregator(self.ranks, size)
        self._requests = self._reports.requests
        self._buckets = self._reports.buckets
        self._layouts = self._reports.layouts
        self._some_left = False  # a rank of the job has left: requests are not held back any more
        # For the next report, with those that make one item of it together: requests of several ranks, or items of one.
        self._outgoing: list[tuple[Ranks | int | None, list[Any]]] = []
        self._lost: list[tuple[int, str]] = []  # likewise

    def receive(self, rank: int, report: Report) -> None:
        """Handle a report of a rank of the host."""
        if report.epoch != self.epoch:
            return
        self._applied[rank] = report.applied
        for item in report.items:
            if isinstance(item, BucketReady):
                self._receive_bucket(rank, item)
            elif isinstance(item, RoundDone):
                self._receive_round_done(rank, item)
            elif isinstance(item, Request) and item.collective is not Collective.JOIN:
                self._receive_request(rank, item)
            else:
                if isinstance(item, (Request, Retired)):
                    self._release_all()
                self._put(rank, item)
                if isinstance(item, Request):
                    for done in self._reports.join(rank)[1]:
                        self._end_round(done)
                elif isinstance(item, Retired):
                    self._reports.retire(self._alone[rank], item)
        if report.side_message is not None or report.leaving or report.failure is not None or report.blocked is not None:
            if report.blocked is not None or report.leaving:
                self._release_all()
            self._put(None, RankReport(rank, msgspec.structs.replace(report, items=())))
        if self._layouts.evicted:
            self._layouts.forget(min(self._applied.values()))

    def lose(self, rank: int, reason: str) -> None:
        """Report that a rank of the host is gone; the coordinator decides whether it had left."""
        self._lost.append((rank, reason))

    def observe(self, decision: Decision) -> None:
        """Follow a decision before the host's ranks receive it."""
        if decision.epoch != self.epoch:
            return
        if decision.left or not set(self.ranks).isdisjoint(decision.status_requests):
            self._release_all()
        self._some_left |= bool(decision.left)
        if self._requests:
            self._end_requests(decision.responses)
        for held in self._reports.observe(decision):
            if not held.passes:
                self._put_apart(held)

    def take_report(self) -> HostReport | None:
        """Return the report to send to the coordinator, or None."""
        if not (self._outgoing or self._lost):
            return None
        items: list[HostReportItem] = []
        for owner, run in self._outgoing:
            if isinstance(owner, tuple):
                items.append(MergedRequests(owner, tuple(run)))
            elif owner is not None:
                items.append(RankReport(owner, Report(epoch=self.epoch, applied=self._applied[owner], items=tuple(run))))
            else:
                items.extend(run)
        report = HostReport(epoch=self.epoch, applied=min(self._applied.values()), items=tuple(items),
                            lost=tuple(self._lost))
        self._outgoing.clear()
        self._lost.clear()
        return report

    def check_invariants(self) -> None:
        """Fail when an item is held back that all ranks have reported."""
        self._reports.check_invariants()

    # --- what is reported --------------------------------------------------------------------------------------------

    def _receive_request(self, rank: int, request: Request) -> None:
        if request.collective in _CHANGES_SETS:
            if request.collective is Collective.REMOVE_PROCESS_SET:
                self._open_set(request.members[0])
            self._put(rank, request)
            return
        key = request.key
        held = self._requests.get(key)
        if held is None and request.process_set_id not in self._reports.process_sets:
            self._put(rank, request)
            return
        may_wait = request.payload is None and (held is not None or self._may_wait(request))
        if held is not None and not may_wait and not held.passes:
            held.passes = True
            self._put_merged(held)
        gathered = self._requests.add(self._alone[rank], key, request)
        if not may_wait:
            gathered.passes = True
            self._put(rank, request)
        elif gathered.passes:
            self._put(self._alone[rank], request)
        elif not gathered.missing:
            self._put_merged(gathered)

    def _may_wait(self, request: Request) -> bool:
        """Return whether the first request for a tensor may be held back until the host's other ranks make it."""
        if self._some_left or len(self._reports.waited_for(request, self.ranks)) < 2:
            return False
        if not request.label:
            return True
        if self._in_order and self._reports.process_sets[request.process_set_id][0] in self.ranks:
            return False  # the order in which that rank makes them counts
        layout = self._layouts.named(request.label)
        return layout is None or request.round_id < layout.first_round

    def _receive_bucket(self, rank: int, ready: BucketReady) -> None:
        if not self._layouts.usable(ready.bucket_id, ready.round_id):
            self._put(rank, _without_end(ready))
        else:
            gathered = self._buckets.add(self._alone[rank], ready.bucket_id, ready)
            if gathered.passes:
                self._put(rank, _without_end(ready))
            elif not gathered.missing:
                self._put_bucket(gathered)
        if ready.ends_round:
            process_set_id = self._layouts.bucket(ready.bucket_id).response.process_set_id
            done = RoundDone(self._layouts.of_bucket(ready.bucket_id).label, ready.round_id, process_set_id)
            self._receive_round_done(rank, done)

    def _receive_round_done(self, rank: int, done: RoundDone) -> None:
        if self._reports.finish_round(self._alone[rank], done):
            self._end_round(done)

    def _end_round(self, done: RoundDone) -> None:
        """All ranks have finished a round: forward it behind everything that belongs to it."""
        for requests in self._requests.open(lambda held: held.label == done.label and held.round_id <= done.round_id):
            self._put_merged(requests)
        for buckets in self._buckets.open(lambda ready: self._layouts.of_bucket(ready.bucket_id).label == done.label
                                          and ready.round_id <= done.round_id):
            self._put_apart(buckets)
        self._put(None, done)

    # --- what is decided ---------------------------------------------------------------------------------------------

    def _end_requests(self, responses: Iterable[Response]) -> None:
        """Note that tensors are answered; requests that are held back for them are answered again."""
        for response in responses:
            if response.collective is Collective.REMOVE_PROCESS_SET and response.error is ErrorKind.NONE:
                self._open_set(response.rows[0])
            for name in response.names:
                key = response.process_set_id, name, response.round_id
                gathered = self._requests.get(key)
                if gathered is None:
                    continue
                if gathered.passes:
                    del self._requests[key]
                else:  # refused before all ranks have made the request
                    gathered.passes = True
                    self._put_merged(gathered)

    # --- what is forwarded -------------------------------------------------------------------------------------------

    def _release_all(self) -> None:
        """Forward everything that is held back, rank by rank."""
        for requests in self._requests.open():
            self._put_merged(requests)
        for buckets in self._buckets.open():
            self._put_apart(buckets)
        for rounds in self._reports.rounds.values():  # which may be reported twice
            self._put_apart(rounds)

    def _open_set(self, process_set_id: int) -> None:
        """Hold back no more requests in a process set that ends."""
        for requests in self._requests.open(lambda held: held.process_set_id == process_set_id):
            self._put_merged(requests)

    def _put_merged(self, gathered: Gathered[Request]) -> None:
        """Forward requests for one tensor, equal ones as one; a rank that repeats its request is rank 0's to judge."""
        for ranks, request in gathered.parts if gathered.is_repeated else _equal_ones(gathered.parts):
            self._put(ranks, request)

    def _put_bucket(self, gathered: Gathered[BucketReady]) -> None:
        """Forward a bucket that all ranks of the host have reported: as one unless their optimizers' steps differ."""
        last = gathered.parts[-1][1]
        is_unused = False
        for _, ready in gathered.parts:
            if ready.step != last.step or ready.in_step != last.in_step or gathered.is_repeated:
                self._put_apart(gathered)
                return
            is_unused = is_unused or bool(ready.unused)
        if is_unused:
            everywhere, somewhere = unused_members([ready for _, ready in gathered.parts])
            last = msgspec.structs.replace(last, unused=everywhere, unused_somewhere=somewhere)
        self._put(None, _without_end(last))

    def _put_apart(self, gathered: Gathered[BucketReady] | Gathered[RoundDone]) -> None:
        """Forward each rank's item by itself."""
        for (rank,), item in gathered.parts:
            self._put(rank, _without_end(item) if isinstance(item, BucketReady) else item)

    def _put(self, owner: Ranks | int | None, item: ReportItem | HostReportItem) -> None:
        """Add to the next report: a request of some ranks, an item of one rank, or what all ranks of the host report."""
        if owner is not None and self._outgoing and self._outgoing[-1][0] == owner:
            self._outgoing[-1][1].append(item)
        else:
            self._outgoing.append((owner, [item]))


def _equal_ones(parts: Sequence[tuple[Ranks, Request]]) -> list[tuple[Ranks, Request]]:
    """Return equal requests as one, with their ranks."""
    (_, first), *others = parts
    if all(request == first for _, request in others):
        return [(tuple(sorted(rank for (rank,), _ in parts)), first)]
    groups: list[tuple[Request, list[int]]] = []
    for (rank,), request in sorted(parts, key=lambda part: part[0]):
        for other, ranks in groups:
            if request == other:
                ranks.append(rank)
                break
        else:
            groups.append((request, [rank]))
    return [(tuple(ranks), request) for request, ranks in groups]


def _without_end(ready: BucketReady) -> BucketReady:
    """Return a bucket as it is forwarded: the leader reports separately when the round is over."""
    return msgspec.structs.replace(ready, ends_round=False) if ready.ends_round else ready
