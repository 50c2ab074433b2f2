"""The negotiation of tensors: which are ready on all ranks, whether ranks agree, and what they do. Pure.

`Coordinator` hands it what ranks report, item by item, and sends its outcome with the next decision.

Rules (docs/protocol.md#agreement, #join, #rounds)
- A tensor is answered exactly once, when every rank has reported it: with an operation, or with an error for all.
- An error is not remembered: the name is free again, and the job goes on with other tensors.
- A tensor that waits for a rank that has left is answered with an error.
- A rank that has joined is not waited for, and contributes nothing, until all ranks have joined. Until then nothing is
  learned in its process sets, and their layouts are suspended.
- When every rank has finished a round of a gradient set, a member that only some ranks reported is refused.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from hvdlite.core.errors import ProtocolError
from hvdlite.core.types import ROOTED, Collective
from hvdlite.negotiation import agreement
from hvdlite.negotiation.fusion import payload_bytes, receive_splits, response_to
from hvdlite.negotiation.gathering import Gathered, Ranks, Requests, first_of, grouped
from hvdlite.negotiation.gradient_sets import GradientSetTable
from hvdlite.negotiation.layouts import BucketSizes, release_of, requests_of
from hvdlite.negotiation.mailboxes import BLOCKING_KINDS, MailboxTable
from hvdlite.negotiation.messages import (
    BucketReady,
    BucketRelease,
    ErrorKind,
    Layout,
    MailboxFrozen,
    ReceiveSplits,
    Request,
    Response,
    Retired,
    RoundDone,
)
from hvdlite.negotiation.readiness import Aggregator

ReduceEagerly = Callable[[Response, Sequence[bytes], int], bytes]
"""Carry out an allreduce on the contributors' bytes, in ascending rank order, in a process set of that many ranks."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """How tensors are decided about where there is a choice; sizes in bytes.

    `fusion_threshold` bounds a fused response (0: no fusion), `bucket_sizes` and `layout_capacity` are those of
    `GradientSetTable`, `mailbox_limit` is that of `MailboxTable`. The defaults turn everything off; what a job runs with
    comes from `core.config`.
    """

    fusion_threshold: int = 0
    bucket_sizes: BucketSizes = dataclasses.field(default_factory=lambda: BucketSizes(0, 0))
    layout_capacity: int = 1
    join_divides_by_active: bool = False  # whether Average divides by the ranks that have not joined
    mailbox_limit: int = 0
    is_tuned: bool = False  # whether all buckets come here, because they are counted
    deterministic: bool = False  # whether the cut into buckets and fused responses must not depend on timing


@dataclasses.dataclass
class Outcome:
    """What has been decided about tensors since the last decision; the fields are those of `Decision`."""

    learned: list[Layout] = dataclasses.field(default_factory=list)
    released: list[BucketRelease] = dataclasses.field(default_factory=list)
    suspended: list[int] = dataclasses.field(default_factory=list)
    evicted: list[int] = dataclasses.field(default_factory=list)
    refused: list[Response] = dataclasses.field(default_factory=list)
    ready: list[tuple[Response, int]] = dataclasses.field(default_factory=list)  # with their bytes, not fused yet

    def __bool__(self) -> bool:
        return bool(self.released or self.ready or self.refused or self.learned or self.evicted or self.suspended)


class Negotiator:
    """The tensors, process sets, joins and gradient sets of a job.

    Attributes:
        policy: as given, or as changed by `change_policy`.
        joins: which ranks have joined.
        layouts: which buckets there are.
        left: the ranks that have left.
        gradient_sets: rounds and layouts.
        reports: what some ranks have reported, and others have not.
        mailboxes: through which blocking calls go without requests.
        rounds: rounds of gradient sets that are over on all ranks.
        reduced_bytes: bytes reduced on each rank since the beginning.

    Args:
        reduce_eagerly: executes allreduces of the eager lane; None when no rank sends payloads.
    """

    def __init__(self, size: int, policy: Policy, reduce_eagerly: ReduceEagerly | None) -> None:
        self.policy = policy
        self.reports = Aggregator(tuple(range(size)), size)
        self.joins = self.reports.joins
        self.layouts = self.reports.layouts
        self.left: set[int] = set()
        self._process_sets = self.reports.process_sets
        self.gradient_sets = GradientSetTable(self.reports, policy.bucket_sizes, policy.layout_capacity)
        self.mailboxes = MailboxTable(policy.mailbox_limit)
        self.rounds = 0
        self.reduced_bytes = 0
        self._size = size
        self._reduce_eagerly = reduce_eagerly
        self._sequence = 1  # of the decision that will carry the outcome
        self.outcome = Outcome()
        self._receive_splits: defaultdict[int, list[ReceiveSplits]] = defaultdict(list)  # by rank, not taken yet

    def take_outcome(self) -> Outcome:
        """Return what has been decided, for the next decision; called once for every decision."""
        outcome, self.outcome = self.outcome, Outcome()
        self._sequence += 1
        return outcome

    def take_receive_splits(self) -> Mapping[int, Sequence[ReceiveSplits]]:
        """Return what ranks receive in the alltoalls that have been decided, by rank."""
        if not self._receive_splits:
            return {}
        splits, self._receive_splits = self._receive_splits, defaultdict(list)
        return splits

    def receive_request(self, ranks: Ranks, request: Request, now: float) -> None:
        """Handle a request that one rank makes, or several ranks of a host together."""
        if request.label and request.collective is Collective.ALLREDUCE:
            layout_id = self.gradient_sets.layout_of(request)
            if layout_id is not None:
                self.evict(layout_id, now)
        if request.process_set_id not in self._process_sets:
            self._refuse(request, agreement.in_removed_set(request))
            return
        if request.label and request.round_id < self.layouts.first_round:
            self._refuse(request, agreement.of_round_before_join(request, ranks))
            return
        members = self._process_sets[request.process_set_id]
        if request.label and self.policy.deterministic and members[0] in ranks:
            self.gradient_sets.record_order(request)
        if self._process_sets.among(request.process_set_id, ranks) != ranks:
            raise ProtocolError(f"reported '{request.name}' in process set {request.process_set_id}, which it is not in")
        gathered = self._add(ranks, request, now)
        if request.collective is Collective.JOIN:
            self.mailboxes.freeze_of(ranks, now)
            for rank in ranks:
                self._join(rank, now)
        elif request.collective is Collective.REMOVE_PROCESS_SET:
            self.mailboxes.freeze_in(request.members[0], now)
        if not gathered.missing:
            self._complete(Requests(gathered), now)
        elif self.left and not self.left.isdisjoint(members):
            self._refuse_pending(now)

    def receive_bucket(self, ranks: Ranks, ready: BucketReady, now: float) -> None:
        """Handle a bucket that one rank reports, or all ranks of a host together."""
        found = self.layouts.find(ready.bucket_id)
        if found is None:
            raise ProtocolError(f"names bucket {ready.bucket_id}, which was never learned")
        bucket, layout = found
        others = self.reports.buckets.get(ready.bucket_id)
        if others is not None and others.first.step != ready.step:
            self.evict(layout.layout_id, now)  # its members are answered one by one: with an error
        ranks = self.reports.among_bucket(bucket, ranks)
        if self.layouts.usable(ready.bucket_id, ready.round_id):
            gathered = self.reports.buckets.add(ranks, ready.bucket_id, ready, now)
            if gathered.is_repeated:
                raise ProtocolError(f"reported bucket {ready.bucket_id} of '{layout.label}' twice before it was answered")
            if not gathered.missing:
                self._release(ready, layout, gathered, now)
        else:
            for request in requests_of(bucket, ready):
                self.receive_request(ranks, request, now)
        if ready.ends_round:
            self.receive_round_done(ranks, RoundDone(layout.label, ready.round_id, bucket.response.process_set_id), now)

    def receive_round_done(self, ranks: Ranks, done: RoundDone, now: float) -> None:
        """Handle the end of a round on some ranks."""
        if self.reports.finish_round(ranks, done):
            self._end_round(done, now)

    def receive_retired(self, rank: int, retired: Retired, now: float) -> None:
        """Handle that a rank has dropped a gradient set: its layout ends. When all ranks have, the set is forgotten."""
        if retired.process_set_id not in self._process_sets:
            return
        layout = self.layouts.named(retired.label)
        if layout is not None:
            self.evict(layout.layout_id, now, back_off=False)
        if not self.reports.retire((rank,), retired):
            return
        for gathered in self.reports.requests.take_if(lambda request: request.label == retired.label):
            self._refuse_not_shared(gathered)
        self.gradient_sets.drop(retired.label)

    def receive_frozen(self, rank: int, frozen: MailboxFrozen) -> None:
        """Handle that a rank does not write to a mailbox any more."""
        ended = self.mailboxes.member_frozen(rank, frozen, self._sequence)
        if ended is not None:
            self.gradient_sets.note_rounds(*ended)

    def leave(self, rank: int, now: float) -> None:
        """Handle that a rank leaves: what waits for it is refused."""
        self.left.add(rank)
        self.mailboxes.leave(rank, self._sequence, now)
        self._refuse_pending(now)

    def change_policy(self, policy: Policy, now: float) -> None:
        """Continue with another policy; all layouts are learned again when the sizes of buckets change."""
        old, self.policy = self.policy, policy
        if policy.bucket_sizes != old.bucket_sizes:
            self.gradient_sets.limits = policy.bucket_sizes
            for layout_id in list(self.layouts.in_use):
                self.evict(layout_id, now, back_off=False)

    def evict(self, layout_id: int, now: float, *, back_off: bool = True) -> None:
        """End a layout; what ranks have reported of it is handled member by member."""
        for ranks, request in self._end_layout(layout_id, now, back_off=back_off):
            self.receive_request(ranks, request, now)

    def check_invariants(self) -> None:
        """Fail when the state contradicts the rules at the top of this file."""
        self.reports.check_invariants()
        self.gradient_sets.check_invariants()
        for process_set_id, name, _ in self.reports.requests:
            assert not self.left & set(self._process_sets[process_set_id]), f"'{name}' waits for a rank that left"
        for bucket_id in self.reports.buckets:
            members = self.layouts.bucket(bucket_id).response.contributors
            assert not self.left & set(members), "a bucket waits for a rank that left"

    def _release(self, last: BucketReady, layout: Layout, gathered: Gathered[BucketReady], now: float) -> None:
        """Release a bucket that every rank has reported."""
        release = release_of(last.bucket_id, gathered.parts)
        self.outcome.released.append(release)
        self.gradient_sets.released(layout, last.round_id)
        self.reduced_bytes += self.gradient_sets.nbytes(release.bucket_id)
        if not self.policy.is_tuned:
            self.mailboxes.observe_bucket(self.layouts.bucket(last.bucket_id), now,
                                          all_blocking=all(ready.blocking for _, ready in gathered.parts))

    def _add(self, ranks: Ranks, request: Request, now: float) -> Gathered[Request]:
        """Record a request of some ranks; return all ranks' requests when nothing is missing any more."""
        gathered = self.reports.requests.add(ranks, request.key, request, now)
        if gathered.is_repeated:
            raise ProtocolError(f"reported '{request.name}' twice before it was answered")
        return gathered

    def _complete(self, requests: Mapping[int, Request], now: float) -> None:
        """Answer a tensor that every rank that takes part has reported."""
        if first_of(requests).label:
            requests = agreement.reconciled(requests)
        request = first_of(requests)
        problem = agreement.disagreement(requests)
        if problem is not None:
            self._refuse(request, problem)
            return
        members = self._process_sets[request.process_set_id]
        if request.collective is Collective.SEND and len(requests) < len(members):
            (joined,) = set(members) - requests.keys()
            self._refuse(request, agreement.send_to_joined(request, joined))
            return
        if request.collective in ROOTED and request.root_rank not in requests:
            self._refuse(request, agreement.root_has_joined(request))
            return
        self.joins.was_missed = self.joins.was_missed or len(requests) < len(members)
        response = response_to(requests, members)
        if self.joins.ranks and self.policy.join_divides_by_active:
            response = msgspec.structs.replace(response, divisor=len(requests))
        if request.collective is Collective.ALLTOALL:
            for rank, splits in zip(members, receive_splits(requests, members), strict=True):
                self._receive_splits[rank].append(splits)
        nbytes = payload_bytes(request)
        self.outcome.ready.append((self._with_result(response, requests), nbytes))
        if request.collective is Collective.ALLREDUCE:
            self.reduced_bytes += nbytes
        if request.collective in BLOCKING_KINDS and not request.label:
            each_of = [each for _, each in grouped(requests)]
            most = max(payload_bytes(each) + 8 * len(each.splits) for each in each_of)
            self.mailboxes.observe(request, members, most, now, all_blocking=not self.joins.ranks and all(
                each.blocking and not each.absent for each in each_of))
        if request.collective is Collective.JOIN:
            self.reports.end_join(succeeded=True)
            self.gradient_sets.resume()
        if request.collective is Collective.REMOVE_PROCESS_SET:
            self._remove_set(request.members[0], now)
        if request.label:
            layout_id = self.gradient_sets.observe(requests)
            if layout_id is not None:
                self.evict(layout_id, now)

    def _with_result(self, response: Response, requests: Mapping[int, Request]) -> Response:
        """Attach the result when the ranks sent their tensors along (the eager lane), or the coordinator makes it itself."""
        if response.collective is Collective.ADD_PROCESS_SET:
            members = first_of(requests).members
            return msgspec.structs.replace(response, rows=(self._process_sets.add(members),), members=members)
        if response.collective is Collective.JOIN:
            return msgspec.structs.replace(response, rows=(self.joins.name_last(),))
        if response.collective is Collective.REMOVE_PROCESS_SET:
            return msgspec.structs.replace(response, rows=first_of(requests).members)
        result = None
        if response.collective in (Collective.BROADCAST, Collective.SEND):
            result = requests[response.root_rank].payload
        elif (response.collective in (Collective.ALLREDUCE, Collective.ALLGATHER) and response.contributors
              and all(request.absent or request.payload is not None for _, request in grouped(requests))):
            payloads = [requests[rank].payload or b"" for rank in response.contributors]
            if response.collective is Collective.ALLGATHER:
                result = b"".join(payloads)
            elif self._reduce_eagerly is not None:
                result = self._reduce_eagerly(response, payloads, len(self._process_sets[response.process_set_id]))
        return response if result is None else msgspec.structs.replace(response, result=result)

    def _end_layout(self, layout_id: int, now: float, *, back_off: bool = True) -> list[tuple[Ranks, Request]]:
        """End a layout; return what ranks have reported of it."""
        if layout_id in self.layouts.in_use:
            self.mailboxes.freeze_buckets(self.layouts.in_use[layout_id], now)
        reported = self.gradient_sets.evict(layout_id, self._sequence, back_off=back_off)
        if reported is None:
            return []
        self.outcome.evicted.append(layout_id)
        return reported

    def _end_round(self, done: RoundDone, now: float) -> None:
        """Every rank that has not joined has finished a round: refuse what only some have, and learn a layout."""
        self.rounds += 1
        for gathered in self.reports.requests.take_if(lambda request: request.label == done.label
                                                      and request.round_id <= done.round_id):
            self._refuse_not_shared(gathered)
        layout, evicted = self.gradient_sets.learn(done)
        for layout_id in evicted:
            self._end_layout(layout_id, now, back_off=False)
        if layout is not None:
            self.outcome.learned.append(layout)

    def _join(self, rank: int, now: float) -> None:
        """Do not wait for a rank any more."""
        complete, ended = self.reports.join(rank)
        for layout_id in self.gradient_sets.layouts_of([rank]):
            self._suspend(layout_id, now)
        for gathered in complete:
            self._complete(Requests(gathered), now)
        for done in ended:
            self._end_round(done, now)

    def _suspend(self, layout_id: int, now: float) -> None:
        self.mailboxes.freeze_buckets(self.layouts.in_use[layout_id], now)
        reported = self.gradient_sets.suspend(layout_id)
        if reported is None:
            return
        self.outcome.suspended.append(layout_id)
        for ranks, request in reported:
            self.receive_request(ranks, request, now)

    def _abort_join(self) -> None:
        """A join has failed because a rank left: the ranks that had joined take part again."""
        self.reports.end_join(succeeded=False)
        self.gradient_sets.abort_join()
        layouts = self.layouts
        for layout in [layout for layout in layouts.in_use.values() if layouts.is_suspended(layout)]:
            self._end_layout(layout.layout_id, 0.0)  # ranks have made different numbers of rounds; mailboxes have ended

    def _remove_set(self, process_set_id: int, now: float) -> None:
        """Forget a process set; what is still pending in it never becomes complete."""
        self.mailboxes.freeze_in(process_set_id, now)
        for layout_id in self.gradient_sets.layouts_in(process_set_id):
            self.evict(layout_id, now)
        for gathered in self.reports.requests.take_if(lambda request: request.process_set_id == process_set_id):
            request = gathered.first
            self._refuse(request, agreement.set_removed_under_way(request, gathered.ranks))
        self.gradient_sets.remove(process_set_id)
        self.reports.remove_set(process_set_id)

    def _refuse(self, request: Request, text: str, kind: ErrorKind = ErrorKind.MISMATCH) -> None:
        self.outcome.refused.append(agreement.refusal(request, text, kind))
        if request.collective is Collective.JOIN:
            self._abort_join()
        if request.label and request.process_set_id in self._process_sets:
            self.gradient_sets.invalidate(request)

    def _refuse_not_shared(self, gathered: Gathered[Request]) -> None:
        """Refuse a member of a gradient set that some ranks do not have."""
        missing = self.reports.requests.missing_ranks(gathered)
        self._refuse(gathered.first, agreement.not_shared(gathered.first, gathered.ranks, missing))

    def _refuse_pending(self, now: float) -> None:
        """Refuse what waits for a rank that left; ranks that report it later get the same answer."""
        for layout_id in self.gradient_sets.layouts_of(self.left):
            for ranks, request in self._end_layout(layout_id, now):
                if not self._add(ranks, request, now).missing:
                    self._refuse_left(request)
        for gathered in self.reports.requests.take_if(
                lambda request: not self.left.isdisjoint(self._process_sets[request.process_set_id])):
            self._refuse_left(gathered.first)

    def _refuse_left(self, request: Request) -> None:
        members = self._process_sets[request.process_set_id]
        self._refuse(request, agreement.needs_left_rank(request, members, self.left, self._size), ErrorKind.LEFT)
