"""The coordinator, rank 0's role: turn reports into decisions. Pure: no sockets, threads, clock or environment.

Rules (docs/protocol.md#decisions, #report-order, #agreement, #join)
- A tensor is answered exactly once, when every rank has reported it: with an operation, or with an error for all.
- Error responses are never remembered: the name is free again, and the job goes on with other tensors.
- Decisions are numbered without gaps; nothing is decided while nothing was reported.
- The first failure ends the job. It names its origin; failures that arrive later are consequences and are dropped.
- A rank that left cannot report any more, so whatever still waits for it is answered with an error.
- A rank that has joined is not waited for, and contributes nothing, until all ranks have joined. Until then nothing is
  learned in its process sets, and layouts learned before are suspended.
- The last rank to join is told to all. When no rank has missed anything in the meantime, it is the last one of the join
  before: its parameters are as new as any other's, and joins that are nested (of several optimizers) name the same rank.
- When every rank has finished a round of a declared set, a member that only some reported is refused: nobody else has it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from hvdlite.core.errors import ProtocolError
from hvdlite.core.types import ROOTED, Collective
from hvdlite.negotiation.agreement import disagreement, named_ranks, reconciled
from hvdlite.negotiation.buckets import BucketSizes, BucketWaiting, DeclaredSets
from hvdlite.negotiation.deadlock import BlockedRanks
from hvdlite.negotiation.fusion import fuse, payload_bytes, receive_splits, response_to
from hvdlite.negotiation.messages import (
    BucketReady,
    BucketRelease,
    Decision,
    DirectMessage,
    ErrorKind,
    FailureNotice,
    HostReport,
    Key,
    Layout,
    LayoutStale,
    MergedRequests,
    RankReport,
    RankStatus,
    ReceiveSplits,
    Report,
    ReportItem,
    Request,
    Response,
    Retired,
    RoundDone,
    SideMessage,
    Wait,
)
from hvdlite.negotiation.oob_store import OobStore
from hvdlite.negotiation.process_sets import ProcessSetTable
from hvdlite.negotiation.readiness import ReadinessTable
from hvdlite.negotiation.requests import Ranks, first_of, grouped

ReduceEagerly = Callable[[Response, Sequence[bytes], int], bytes]
"""Carry out an allreduce on the contributors' bytes, in ascending rank order, in a process set of that many ranks."""


@dataclasses.dataclass(frozen=True)
class Stall:
    """A tensor that waits for some ranks."""

    name: str
    waited: float  # seconds
    submitted: tuple[int, ...]
    missing: tuple[int, ...]

    def __str__(self) -> str:
        return (f"'{self.name}' has waited {self.waited:.0f} s: submitted by ranks {list(self.submitted)}, "
                f"not yet by ranks {list(self.missing)}")


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a coordinator decides, where it has a choice; sizes in bytes.

    `fusion_threshold` bounds a fused response (0: no fusion), `bucket_sizes` and `layout_capacity` are those of
    `DeclaredSets`. The defaults turn everything off; what a job runs with comes from `core.config`.
    """

    fusion_threshold: int = 0
    bucket_sizes: BucketSizes = dataclasses.field(default_factory=lambda: BucketSizes(0, 0))
    layout_capacity: int = 1
    join_divides_by_active: bool = False  # whether Average divides by the ranks that have not joined
    deterministic: bool = False  # whether what travels together must not depend on timing


class Coordinator:
    """Collects the ranks' reports and decides what all of them do next.

    Args:
        reduce_eagerly: executes allreduces of the eager lane; None when no rank offers payloads.
    """

    def __init__(self, size: int, policy: Policy, reduce_eagerly: ReduceEagerly | None = None, *, epoch: int = 0) -> None:
        self.size = size
        self.epoch = epoch
        self._policy = policy
        self._reduce_eagerly = reduce_eagerly
        self._process_sets = ProcessSetTable(size)
        self._joined: dict[int, None] = {}  # in the order in which they did
        self._joins = 0  # how often all ranks have
        self._last_joined: int | None = None  # the last one of the last join
        self._has_missed = False  # something was carried out without a rank that has joined
        self._table = ReadinessTable(self._process_sets, self._joined)
        self._sets = DeclaredSets(self._process_sets, self._joined, policy.bucket_sizes, policy.layout_capacity)
        self._sequence = 0
        # What the next decision says:
        self._learned: list[Layout] = []
        self._released: list[BucketRelease] = []
        self._suspended: list[int] = []
        self._evicted: list[int] = []
        self._ready: list[tuple[Response, int]] = []
        self._refused: list[Response] = []
        self._leaving: list[int] = []
        self._left: set[int] = set()
        self._applied: dict[Ranks, int] = {(rank,): 0 for rank in range(size)}
        self._status_requests: list[int] = []
        self._pings: list[int] = []  # ranks that asked whether rank 0 is there
        self._timeline: bool | None = None  # to be told
        self._tuned: list[tuple[str, int]] = []
        self._latest: tuple[Request, ...] = ()  # of a host; the next one's are often equal, and these are in the cache
        self._oob = OobStore()
        self._receive_splits: defaultdict[int, list[ReceiveSplits]] = defaultdict(list)  # by rank; not told yet
        self.rounds = 0  # of declared sets, over on all ranks
        self.reduced_bytes = 0  # on each rank, since the beginning
        self.statuses: dict[int, RankStatus] = {}  # what ranks answered when they were last asked
        self.suspects: set[int] = set()  # ranks that hold up others in a collective; the stall inspector clears it
        self.report_requested = False  # by some rank's user; likewise
        self.blocked = BlockedRanks(self._missing_for)
        self._failure: FailureNotice | None = None
        self._failure_told = False

    @property
    def declared_sets(self) -> frozenset[str]:
        """The labels of the declared sets that are remembered."""
        return self._sets.labels

    @property
    def left(self) -> frozenset[int]:
        """The ranks that have left."""
        return frozenset(self._left)

    def receive(self, rank: int, report: Report, now: float) -> None:
        """Take in what `rank` says; `now` is seconds on any monotonic clock."""
        if report.epoch != self.epoch:
            return
        self._note_applied((rank,), report.applied)
        self._receive(rank, report, now)

    def receive_host(self, ranks: Ranks, report: HostReport, now: float) -> None:
        """Take in what the leader of the host of `ranks` passes on; a host does so for ever, or never."""
        self._note_applied(ranks, report.applied)
        self._hear(ranks, report.items, now)
        for rank, reason in report.lost:
            self.lose(rank, reason)

    def fail(self, failure: FailureNotice) -> None:
        """End the job for `failure`, unless it ends already."""
        if self._failure is None:
            self._failure = failure

    def lose(self, rank: int, reason: str) -> None:
        """A rank is gone without having left: end the job, naming it."""
        if rank not in self._left:
            self.fail(FailureNotice(rank, "lost", reason))

    def decide(self) -> Decision | None:
        """Return the next decision, or None when there is nothing to say."""
        failure = None if self._failure_told else self._failure
        deferred = tuple(self.blocked.to_defer())
        news = (self._learned, self._released, self._suspended, self._evicted, self._ready, self._refused,
                self._status_requests, self._leaving, self._pings, self._tuned)
        if not (any(news) or failure or deferred or self._timeline is not None):
            return None
        self._sequence += 1
        responses = (*self._refused, *fuse(self._ready, 0 if self._policy.deterministic else self._policy.fusion_threshold))
        if self.blocked:
            for response in responses:
                self.blocked.answered(response.process_set_id, response.names)
        decision = Decision(self.epoch, self._sequence, tuple(self._learned), tuple(self._released),
                            tuple(self._suspended), tuple(self._evicted), responses, tuple(self._status_requests),
                            tuple(self._leaving), tuple(self._pings), self._timeline, tuple(self._tuned), failure,
                            deferred)
        for item in news:
            item.clear()
        self._timeline = None
        self._failure_told = self._failure is not None
        return decision

    def take_direct_messages(self) -> tuple[DirectMessage, ...]:
        """Return what is to be told to single ranks, in their order, before the decision that was returned last."""
        oob_messages = self._oob.take_outgoing()
        messages = tuple(DirectMessage(rank, tuple(self._receive_splits.get(rank, ())), oob_messages.get(rank, ()))
                        for rank in sorted({*oob_messages, *self._receive_splits}))
        self._receive_splits.clear()
        return messages

    def stalls(self, now: float, after: float) -> list[Stall]:
        """Return the tensors that have waited at least `after` seconds and were not returned before."""
        found = []
        for key, tensor in self._table.waiting().items():
            if now - tensor.since >= after and not tensor.warned:
                tensor.warned = True
                found.append(self._stall(key, now))
        for bucket in self._sets.waiting():
            if now - bucket.since >= after and not bucket.warned:
                bucket.warned = True
                found.append(_bucket_stall(bucket, now))
        return found

    def waiting(self, now: float) -> list[Stall]:
        """Return all that waits for some ranks, however short."""
        return [self._stall(key, now) for key in self._table.waiting()] + [
            _bucket_stall(bucket, now) for bucket in self._sets.waiting()]

    def missing(self, now: float, after: float) -> set[int]:
        """Return the ranks for which something has waited at least `after` seconds."""
        return {rank for stall in self.waiting(now) if stall.waited >= after for rank in stall.missing}

    def request_status(self, ranks: Iterable[int]) -> None:
        """Ask ranks for their status; their earlier answers are forgotten."""
        for rank in ranks:
            self.statuses.pop(rank, None)
            self._status_requests.append(rank)

    def state(self, rank: int) -> str:
        """Return "alive", "joined" or "left"."""
        return "left" if rank in self._left else "joined" if rank in self._joined else "alive"

    def ranks_done_with(self, label: str, number: int) -> frozenset[int]:
        """See `DeclaredSets.ranks_done_with`."""
        return self._sets.ranks_done_with(label, number)

    def tune(self, settings: Mapping[str, int], now: float) -> None:
        """Give knobs new values, on all ranks at the next decision; layouts are learned anew when their sizes change."""
        self._tuned.extend(settings.items())
        policy, sizes = self._policy, self._policy.bucket_sizes
        new = BucketSizes(settings.get("bucket_edge", sizes.edge), settings.get("bucket_size", sizes.middle))
        self._policy = dataclasses.replace(policy, bucket_sizes=new,
                                           fusion_threshold=settings.get("fusion_threshold", policy.fusion_threshold))
        if new != sizes:
            self._sets.retune(new)
            for layout in self._sets.layouts():
                self._evict(layout, now, back_off=False)

    def order_timeline(self, on: bool) -> None:
        """Let all ranks trace what they do from the next decision on, or stop that."""
        self._timeline = on

    @property
    def anything_waits(self) -> bool:
        """Whether a tensor or a bucket waits for some ranks."""
        return bool(self._table.waiting() or self._sets.waiting())

    def check_invariants(self) -> None:
        """Fail when the state contradicts the rules at the top of this file."""
        self._table.check_invariants()
        self._sets.check_invariants()
        for number, name, _ in self._table.waiting():
            assert not self._left & set(self._process_sets[number]), f"'{name}' waits for a rank that left"
        for pending in self._sets.waiting():
            assert not self._left & set(pending.bucket.response.contributors), "a bucket waits for a rank that left"

    def _receive(self, rank: int, report: Report, now: float) -> None:
        if report.failure is not None:
            self.fail(report.failure)
        if report.side_message is not None:
            self._receive_side_message(rank, report.side_message)
        self._hear((rank,), report.items, now)
        if report.blocked is not None:
            self.blocked.tell(rank, report.blocked)
        if report.leaving and rank not in self._left:
            self._left.add(rank)
            self._leaving.append(rank)
            self._refuse_waiting(now)

    def _missing_for(self, rank: int, wait: Wait) -> frozenset[int] | None:
        """Return the ranks for which a rank's wait waits; None when it has been answered."""
        if wait.process_set_id not in self._process_sets:
            return None
        if wait.round_id:
            ranks_done = self._sets.ranks_done_with(wait.name, wait.round_id)
            members = frozenset(self._process_sets[wait.process_set_id])
            return members.difference(ranks_done, self._joined) if rank in ranks_done else None
        key = (wait.process_set_id, wait.name, wait.round_id)
        tensor = self._table.waiting().get(key)
        if tensor is None or rank not in tensor.requests:
            return None
        return frozenset(self._table.missing(key))

    def _receive_side_message(self, rank: int, side_message: SideMessage) -> None:
        if side_message.status is not None:
            self.statuses[rank] = side_message.status
        if side_message.ping:
            self._pings.append(rank)
        self.suspects.update(side_message.slow_peers)
        self._oob.receive(rank, side_message)
        self.report_requested |= side_message.requests_report

    def _hear(self, ranks: Ranks, what: Iterable[ReportItem | MergedRequests | RankReport], now: float) -> None:
        """Take in what a rank said, or all ranks of a host alike or some of them, in its order."""
        try:
            for item in what:
                if isinstance(item, BucketReady):
                    self._take_bucket(ranks, item, now)
                elif isinstance(item, Request):
                    self._take(ranks, item, now)
                elif isinstance(item, LayoutStale):
                    self._evict(item.layout_id, now)
                elif isinstance(item, Retired):
                    self._retire(ranks[0], item, now)
                elif isinstance(item, RoundDone):
                    self._round_done(ranks, item)
                elif isinstance(item, MergedRequests):
                    if item.requests != self._latest:
                        self._latest = item.requests
                    self._hear(item.ranks, self._latest, now)
                elif item.report.epoch == self.epoch:
                    self._receive(item.rank, item.report, now)
        except ProtocolError as error:
            self.fail(FailureNotice(ranks[0], "ProtocolError", str(error)))

    def _take(self, ranks: Ranks, request: Request, now: float) -> None:
        """Take in what some ranks request; several do so together when their leader has merged it."""
        if request.label and request.collective is Collective.ALLREDUCE:
            layout = self._sets.layout_of(request)
            if layout is not None:
                self._evict(layout, now)
        if request.process_set_id not in self._process_sets:
            self._refuse(request, ErrorKind.MISMATCH,
                         f"'{request.name}' was called on process set {request.process_set_id}, "
                         "which has been removed")
            return
        if request.label and request.round_id < self._sets.first_round:
            self._refuse(request, ErrorKind.MISMATCH, f"'{request.name}' belongs to a round that was under way on "
                         f"{named_ranks(ranks)} when all ranks had joined; wait for the gradients before join()")
            return
        members = self._process_sets[request.process_set_id]
        if request.label and self._policy.deterministic and members[0] in ranks:
            self._sets.arrange(request)
        if self._process_sets.among(request.process_set_id, ranks) != ranks:
            raise ProtocolError(f"reported '{request.name}' in process set {request.process_set_id}, which it is not in")
        requests = self._table.add(ranks, request, now)
        if request.collective is Collective.JOIN:
            for rank in ranks:
                self._join(rank, now)
        if requests is not None:
            self._complete(requests, now)
        elif self._left and not self._left.isdisjoint(members):
            self._refuse_waiting(now)

    def _complete(self, requests: Mapping[int, Request], now: float) -> None:
        """Answer a tensor that every rank that takes part has reported."""
        if first_of(requests).label:
            requests = reconciled(requests)
        request = first_of(requests)
        problem = disagreement(requests)
        if problem is not None:
            self._refuse(request, ErrorKind.MISMATCH, problem)
            return
        members = self._process_sets[request.process_set_id]
        if request.collective is Collective.SEND and len(requests) < len(members):
            (joined,) = set(members) - requests.keys()
            self._refuse(request, ErrorKind.MISMATCH, f"'{request.name}' needs rank {joined}, which has joined and neither "
                         "sends nor receives")
            return
        if request.collective in ROOTED and request.root_rank not in requests:
            self._refuse(request, ErrorKind.MISMATCH, f"'{request.name}' has root rank {request.root_rank}, which has "
                         "joined and contributes nothing; choose a root that is still active")
            return
        self._has_missed = self._has_missed or len(requests) < len(members)
        response = response_to(requests, members)
        if self._joined and self._policy.join_divides_by_active:
            response = msgspec.structs.replace(response, divisor=len(requests))
        if request.collective is Collective.ALLTOALL:
            for rank, splits in zip(members, receive_splits(requests, members), strict=True):
                self._receive_splits[rank].append(splits)
        nbytes = payload_bytes(request)
        self._ready.append((self._answered(response, requests), nbytes))
        if request.collective is Collective.ALLREDUCE:
            self.reduced_bytes += nbytes
        if request.collective is Collective.JOIN:
            self._joined.clear()
            self._has_missed = False
            self._joins += 1
            self._sets.resume(self._joins)
        if request.collective is Collective.REMOVE_PROCESS_SET:
            self._remove_set(request.members[0], now)
        if request.label:
            layout = self._sets.observe(requests)
            if layout is not None:
                self._evict(layout, now)

    def _take_bucket(self, ranks: Ranks, ready: BucketReady, now: float) -> None:
        layout = self._sets.out_of_step(ready)
        if layout is not None:
            self._evict(layout, now)  # its members are answered one by one: with an error
        release, expanded, ranks, done = self._sets.ready(ranks, ready, now)
        if release is not None:
            self._released.append(release)
            self.reduced_bytes += self._sets.nbytes(release.bucket_id)
        for request in expanded:
            self._take(ranks, request, now)
        if ready.ends_round:
            self._round_done(ranks, done)

    def _round_done(self, ranks: Ranks, done: RoundDone) -> None:
        if done.process_set_id in self._process_sets and self._sets.rank_done(ranks, done):
            self._end_round(done)

    def _end_round(self, done: RoundDone) -> None:
        """All ranks that have not joined have finished a round."""
        self.rounds += 1
        for requests in self._table.take_if(lambda request: request.label == done.label
                                            and request.round_id <= done.round_id):
            self._refuse_unshared(first_of(requests), requests)
        layout, evicted = self._sets.learn(done.label, done.round_id)
        for number in evicted:
            self._sets.evict(number, self._sequence + 1, back_off=False)
            self._evicted.append(number)
        if layout is not None:
            self._learned.append(layout)

    def _retire(self, rank: int, retired: Retired, now: float) -> None:
        """A rank takes no part in a set any more: no round can go by its layout. When no rank does, it is forgotten."""
        if retired.process_set_id not in self._process_sets:
            return
        layout = self._sets.in_use(retired.label)
        if layout is not None:
            self._evict(layout, now, back_off=False)
        if not self._sets.retire(rank, retired):
            return
        for requests in self._table.take_if(lambda request: request.label == retired.label):
            self._refuse_unshared(next(iter(requests.values())), requests)
        self._sets.drop(retired.label)

    def _evict(self, layout: int, now: float, *, back_off: bool = True) -> None:
        expanded = self._sets.evict(layout, self._sequence + 1, back_off=back_off)
        if expanded is None:
            return
        self._evicted.append(layout)
        for ranks, request in expanded:
            self._take(ranks, request, now)

    def _suspend(self, layout: int, now: float) -> None:
        expanded = self._sets.suspend(layout)
        if expanded is None:
            return
        self._suspended.append(layout)
        for ranks, request in expanded:
            self._take(ranks, request, now)

    def _note_applied(self, ranks: Ranks, applied: int) -> None:
        if ranks not in self._applied:  # a host that speaks with one voice from now on
            for rank in ranks:
                del self._applied[(rank,)]
        self._applied[ranks] = applied
        if self._sets.has_tombstones:
            self._sets.forget(min(self._applied.values()))

    def _answered(self, response: Response, requests: Mapping[int, Request]) -> Response:
        """Attach the result when the ranks sent their tensors along (the eager lane), or the coordinator makes it itself."""
        if response.collective is Collective.ADD_PROCESS_SET:
            members = first_of(requests).members
            return msgspec.structs.replace(response, rows=(self._process_sets.add(members),), members=members)
        if response.collective is Collective.JOIN:
            if self._has_missed or self._last_joined is None:
                self._last_joined = next(reversed(self._joined))
            return msgspec.structs.replace(response, rows=(self._last_joined,))
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

    def _join(self, rank: int, now: float) -> None:
        """Do without a rank from now on."""
        self._joined[rank] = None
        complete = self._table.join(rank)
        for layout in self._sets.layouts_of([rank]):
            self._suspend(layout, now)
        for requests in complete:
            self._complete(requests, now)
        for done in self._sets.join(rank):
            self._end_round(done)

    def _end_join(self) -> None:
        """A join has failed, because a rank left: those that had joined take part again."""
        self._joined.clear()
        self._table.recount()
        for layout in self._sets.suspended:  # ranks have made different numbers of rounds
            self._sets.evict(layout, self._sequence + 1)
            self._evicted.append(layout)

    def _remove_set(self, number: int, now: float) -> None:
        """Forget a process set; what still waits in it never becomes complete."""
        for layout in self._sets.layouts_in(number):
            self._evict(layout, now)
        for requests in self._table.take_if(lambda request: request.process_set_id == number):
            request = first_of(requests)
            self._refuse(request, ErrorKind.MISMATCH, f"'{request.name}' was under way on {named_ranks(sorted(requests))} "
                         f"when process set {number} was removed; wait for everything on a set before removing it")
        self._sets.remove(number)
        self._process_sets.remove(number)

    def _refuse(self, request: Request, kind: ErrorKind, text: str) -> None:
        self._refused.append(Response(names=(request.name,), collective=request.collective, dtype=request.dtype,
                                      process_set_id=request.process_set_id, round_id=request.round_id, error=kind,
                                      error_text=text))
        if request.collective is Collective.JOIN:
            self._end_join()
        if request.label and request.process_set_id in self._process_sets:
            self._sets.invalidate(request)

    def _refuse_unshared(self, request: Request, requests: Mapping[int, Request]) -> None:
        """Answer a member of a declared set that some ranks do not have."""
        missing = [rank for rank in self._process_sets[request.process_set_id]
                   if rank not in requests and rank not in self._joined]
        self._refuse(request, ErrorKind.MISMATCH, f"ranks disagree about the members of '{request.label}': "
                     f"{named_ranks(sorted(requests))}: reduces '{request.name}' in round {request.round_id}; "
                     f"{named_ranks(missing)}: does not have it. Give the optimizer the same parameters on all ranks "
                     "(add_param_group and requires_grad too)")

    def _refuse_waiting(self, now: float) -> None:
        """Answer what waits for a rank that left; ranks still to report it are answered when they do."""
        for layout in self._sets.layouts_of(self._left):
            self._evicted.append(layout)
            for ranks, request in self._sets.evict(layout, self._sequence + 1) or ():
                requests = self._table.add(ranks, request, now)
                if requests is not None:
                    self._refuse_left(request)
        for requests in self._table.take_if(
                lambda request: not self._left.isdisjoint(self._process_sets[request.process_set_id])):
            self._refuse_left(first_of(requests))

    def _refuse_left(self, request: Request) -> None:
        members = self._process_sets[request.process_set_id]
        needed = "all ranks" if len(members) == self.size else f"ranks {list(members)}"
        self._refuse(request, ErrorKind.LEFT, f"'{request.name}' needs {needed}, but "
                     f"{named_ranks(sorted(self._left.intersection(members)))} left the job normally "
                     "(script ended, or shutdown() called)")

    def _stall(self, key: Key, now: float) -> Stall:
        tensor = self._table.waiting()[key]
        return Stall(key[1], now - tensor.since, tuple(sorted(tensor.requests)), tuple(self._table.missing(key)))


def _bucket_stall(waiting: BucketWaiting, now: float) -> Stall:
    first, *more = waiting.bucket.members
    name = first.name + (f"' and {len(more)} more of '{first.label}" if more else "")
    present = frozenset(waiting.ranks)
    return Stall(name, now - waiting.since, tuple(sorted(present)),
                 tuple(rank for rank in waiting.bucket.response.contributors if rank not in present))
