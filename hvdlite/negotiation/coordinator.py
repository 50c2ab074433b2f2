"""The coordinator, rank 0's role: turn reports into decisions. Pure: no sockets, threads, clock or environment.

It decides about tensors only; `negotiator.py` has the rules for them. Side messages (`Report.side_message`) do not pass
through it: the host of the coordinator handles them, and gives as orders (`order`, `tune`) what all ranks are to do for
them.

Rules (docs/protocol.md#decisions, #report-order)
- Decisions are numbered without gaps. There is no decision without content.
- The first failure ends the job. It names its origin; failures that arrive later are consequences and are dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from hvdlite.core.errors import ProtocolError
from hvdlite.negotiation.fusion import fuse
from hvdlite.negotiation.gathering import Gathered, Ranks
from hvdlite.negotiation.layouts import BucketSizes
from hvdlite.negotiation.messages import (
    BucketReady,
    Decision,
    DirectMessage,
    FailureNotice,
    HostReport,
    Layout,
    LayoutStale,
    MailboxFrozen,
    MailboxStale,
    MergedRequests,
    RankReport,
    Report,
    ReportItem,
    Request,
    Retired,
    RoundDone,
)
from hvdlite.negotiation.negotiator import Negotiator, Policy, ReduceEagerly
from hvdlite.negotiation.stalls import NO_STALL, BlockedRanks, CallWaits, Stall, bucket_stall, tensor_stall


@dataclasses.dataclass
class _Orders:
    """What the next decision carries beside tensors; the fields are those of `Decision`."""

    status_requests: list[int] = dataclasses.field(default_factory=list)
    left: list[int] = dataclasses.field(default_factory=list)
    pong: list[int] = dataclasses.field(default_factory=list)
    timeline: bool | None = None
    tuned: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.left or self.pong or self.status_requests or self.tuned or self.timeline is not None)


class Coordinator:
    """Collects the ranks' reports and decides what all of them do next.

    Attributes:
        blocked: the ranks that have reported long waits; detects deadlocks.
        negotiator: decides about tensors; for reading.
        has_news: whether anything has happened since the last call of `decide`, which may then have content for a decision.
        tuned: the knobs that have been changed.

    Args:
        reduce_eagerly: executes allreduces of the eager lane; None when no rank sends payloads.
    """

    def __init__(self, size: int, policy: Policy, reduce_eagerly: ReduceEagerly | None = None, *, epoch: int = 0) -> None:
        self.size = size
        self.epoch = epoch
        self.negotiator = Negotiator(size, policy, reduce_eagerly)
        self.has_news = False
        self.blocked = BlockedRanks(self.negotiator.reports.missing_for)
        self.tuned: dict[str, int] = {}
        self._call_waits = CallWaits()
        self._sequence = 0
        self._applied: dict[Ranks, int] = {(rank,): 0 for rank in range(size)}
        self.negotiator.mailboxes.applied = lambda: min(self._applied.values())
        self._orders = _Orders()
        self._failure: FailureNotice | None = None
        self._failure_sent = False
        self._last_merged: tuple[Request, ...] = ()  # of a host; the next one's are often equal, and these are in the cache

    # --- what is reported --------------------------------------------------------------------------------------------

    def receive(self, rank: int, report: Report, now: float) -> None:
        """Handle a report of one rank, except its side message; `now` is seconds on any monotonic clock."""
        if report.epoch != self.epoch:
            return
        self.has_news = True
        self._note_applied((rank,), report.applied)
        self._receive(rank, report, now)

    def receive_host(self, ranks: Ranks, report: HostReport, now: float) -> None:
        """Handle a report of the leader of the host of `ranks`; a host has a leader from the beginning, or never."""
        if report.epoch != self.epoch:
            return
        self.has_news = True
        self._note_applied(ranks, report.applied)
        self._receive_items(ranks, report.items, now)
        for rank, reason in report.lost:
            self.lose(rank, reason)

    def fail(self, failure: FailureNotice) -> None:
        """End the job for `failure`, unless it ends already."""
        if self._failure is None:
            self._failure, self.has_news = failure, True

    def lose(self, rank: int, reason: str, *, is_silent: bool = False) -> None:
        """End the job because a rank is gone, or does not answer, unless it had left."""
        if rank not in self.negotiator.left:
            self.fail(FailureNotice(rank, "lost", reason, blamed=(rank,) if is_silent else ()))

    # --- what is ordered ---------------------------------------------------------------------------------------------

    def order(self, *, status_requests: Iterable[int] = (), pong: Iterable[int] = (), timeline: bool | None = None,
              now: float = 0.0) -> None:
        """Let the next decision carry orders that are not about tensors; see the fields of `Decision`."""
        self.has_news = True
        orders = self._orders
        if timeline is not None:  # it shows requests, and the decisions that answer them
            self.negotiator.mailboxes.is_suspended = timeline
            if timeline:
                self.negotiator.mailboxes.freeze_of(range(self.size), now)
        orders.status_requests.extend(status_requests)
        orders.pong.extend(pong)
        orders.timeline = orders.timeline if timeline is None else timeline

    def tune(self, settings: Mapping[str, int], now: float) -> None:
        """Change knobs on all ranks with the next decision; layouts are learned again when the sizes of buckets change."""
        self.has_news = True
        self._orders.tuned.extend(settings.items())
        self.tuned.update(settings)
        policy = self.negotiator.policy
        sizes = BucketSizes(settings.get("bucket_edge", policy.bucket_sizes.edge),
                            settings.get("bucket_size", policy.bucket_sizes.middle))
        self.negotiator.change_policy(dataclasses.replace(
            policy, bucket_sizes=sizes, fusion_threshold=settings.get("fusion_threshold", policy.fusion_threshold)), now)

    def carry_over(self, layouts: Mapping[str, Layout]) -> None:
        """Begin with layouts of the last world of an elastic job: they are in the first decision.

        Args:
            layouts: by the labels of their gradient sets in this world.
        """
        self.has_news = True
        self.negotiator.outcome.learned += self.negotiator.gradient_sets.carry_over(layouts)

    # --- what is decided ---------------------------------------------------------------------------------------------

    def decide(self) -> Decision | None:
        """Return the next decision, or None when it would be empty."""
        self.has_news = False
        failure = None if self._failure_sent else self._failure
        deferred = tuple(self.blocked.to_defer())
        mailboxes = self.negotiator.mailboxes
        if not (self.negotiator.outcome or self._orders or failure or deferred or mailboxes):
            return None
        self._sequence += 1
        opened, mailboxes.opened = tuple(mailboxes.opened), []
        frozen, mailboxes.frozen = tuple(mailboxes.frozen), []
        closed, mailboxes.closed = tuple(mailboxes.closed), []
        outcome, orders, policy = self.negotiator.take_outcome(), self._orders, self.negotiator.policy
        responses = (*outcome.refused, *fuse(outcome.ready, 0 if policy.deterministic else policy.fusion_threshold))
        if self.blocked:
            for response in responses:
                self.blocked.answered(response.process_set_id, response.names)
        if orders:
            self._orders = _Orders()
        self._failure_sent = self._failure is not None
        return Decision(
            epoch=self.epoch, sequence=self._sequence, learned=tuple(outcome.learned), released=tuple(outcome.released),
            suspended=tuple(outcome.suspended), evicted=tuple(outcome.evicted), opened=opened, frozen=frozen, closed=closed,
            responses=responses,
            status_requests=tuple(orders.status_requests), left=tuple(orders.left), pong=tuple(orders.pong),
            timeline=orders.timeline, tuned=tuple(orders.tuned), failure=failure, deferred=deferred)

    def take_direct_messages(self) -> tuple[DirectMessage, ...]:
        """Return what single ranks need to apply the decision that was returned last; send it before the decision."""
        return tuple(DirectMessage(epoch=self.epoch, rank=rank, receive_splits=tuple(splits))
                     for rank, splits in sorted(self.negotiator.take_receive_splits().items()))

    # --- what is pending ---------------------------------------------------------------------------------------------

    @property
    def is_anything_pending(self) -> bool:
        """Whether a tensor or a bucket waits for some ranks."""
        negotiator = self.negotiator
        return bool(negotiator.reports.requests or negotiator.reports.buckets or negotiator.mailboxes.is_ending
                    or self._call_waits)

    def pending(self, now: float) -> list[Stall]:
        """Return every tensor and bucket that waits for some ranks, however short."""
        reports = self.negotiator.reports
        return self._tensor_stalls(reports.requests.values(), now) + [
            bucket_stall(reports.buckets, bucket, reports.layouts, now) for bucket in reports.buckets.values()
        ] + self.negotiator.mailboxes.stalls(now) + self._call_waits.pending(now)

    def new_stalls(self, now: float, after: float) -> list[Stall]:
        """Return what has waited at least `after` seconds and was not returned before."""
        reports = self.negotiator.reports
        found = self._tensor_stalls(reports.requests.newly_overdue(now, after), now)
        found += [bucket_stall(reports.buckets, bucket, reports.layouts, now)
                  for bucket in reports.buckets.newly_overdue(now, after)]
        return found + self.negotiator.mailboxes.new_stalls(now, after) + self._call_waits.new_stalls(now, after)

    def _tensor_stalls(self, tensors: Iterable[Gathered[Request]], now: float) -> list[Stall]:
        return [tensor_stall(self.negotiator.reports.requests, tensor, now) for tensor in tensors
                if not tensor.first.name.endswith(NO_STALL)]

    def missing(self, now: float, after: float) -> set[int]:
        """Return the ranks for which something has waited at least `after` seconds."""
        return {rank for stall in self.pending(now) if stall.waited >= after for rank in stall.missing}

    # --- facts -------------------------------------------------------------------------------------------------------

    def state(self, rank: int) -> str:
        """Return "alive", "joined" or "left"."""
        return "left" if rank in self.negotiator.left else "joined" if rank in self.negotiator.joins.ranks else "alive"

    @property
    def rounds(self) -> int:
        """Rounds of gradient sets that are over on all ranks."""
        return self.negotiator.rounds

    @property
    def reduced_bytes(self) -> int:
        """Bytes reduced on each rank since the beginning."""
        return self.negotiator.reduced_bytes

    # -----------------------------------------------------------------------------------------------------------------

    def _receive(self, rank: int, report: Report, now: float) -> None:
        if report.failure is not None:
            self.fail(report.failure)
        self._receive_items((rank,), report.items, now)
        if report.blocked is not None:
            self._call_waits.update(rank, report.blocked.groups, now)
            self.blocked.update(rank, report.blocked)
        if report.leaving:
            self._call_waits.update(rank, (), now)
            if rank not in self.negotiator.left:
                self._orders.left.append(rank)
                self.negotiator.leave(rank, now)

    def _receive_items(self, ranks: Ranks, items: Iterable[ReportItem | MergedRequests | RankReport], now: float) -> None:
        """Handle the items of a report in order; a host's are of all its ranks, unless they name some."""
        negotiator = self.negotiator
        try:
            for item in items:
                if isinstance(item, BucketReady):
                    negotiator.receive_bucket(ranks, item, now)
                elif isinstance(item, Request):
                    negotiator.receive_request(ranks, item, now)
                elif isinstance(item, LayoutStale):
                    negotiator.evict(item.layout_id, now)
                elif isinstance(item, Retired):
                    negotiator.receive_retired(ranks[0], item, now)
                elif isinstance(item, RoundDone):
                    negotiator.receive_round_done(ranks, item, now)
                elif isinstance(item, MailboxFrozen):
                    negotiator.receive_frozen(ranks[0], item)
                elif isinstance(item, MailboxStale):
                    negotiator.mailboxes.stale(ranks[0], item, now)
                elif isinstance(item, MergedRequests):
                    if item.requests != self._last_merged:
                        self._last_merged = item.requests
                    self._receive_items(item.ranks, self._last_merged, now)
                elif item.report.epoch == self.epoch:
                    self._receive(item.rank, item.report, now)
        except ProtocolError as error:
            self.fail(FailureNotice(ranks[0], "ProtocolError", str(error)))

    def _note_applied(self, ranks: Ranks, applied: int) -> None:
        if ranks not in self._applied:  # the first report of a host's leader
            for rank in ranks:
                del self._applied[(rank,)]
        self._applied[ranks] = applied
        if self.negotiator.reports.layouts.evicted:
            self.negotiator.reports.layouts.forget(min(self._applied.values()))
