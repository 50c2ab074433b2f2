"""The controller, every rank's role: collect ready tensors into reports and turn decisions into instructions. Pure.

Rules (docs/protocol.md#decisions)
- Decisions are applied in sequence. A gap or a repetition is an error, never skipped.
- The table of buckets changes only in `apply`.
- A response to a name that this rank has not enqueued is ignored: it refuses the tensor on ranks that have enqueued it.
"""

from __future__ import annotations

import dataclasses

import msgspec

from hvdlite.core.errors import ProtocolError
from hvdlite.core.types import Collective
from hvdlite.negotiation.layouts import LayoutTable, requests_of
from hvdlite.negotiation.messages import (
    Blocked,
    Bucket,
    BucketReady,
    BucketRelease,
    Decision,
    DirectMessage,
    ErrorKind,
    FailureNotice,
    Key,
    Layout,
    LayoutStale,
    Mailbox,
    MailboxFrozen,
    MailboxStale,
    Report,
    ReportItem,
    Request,
    Response,
    Retired,
    RoundDone,
    SideMessage,
)


@dataclasses.dataclass(frozen=True)
class SplitBucket:
    """Continue with the members of a bucket that this rank reported: its layout was evicted or suspended."""

    bucket_id: int
    requests: tuple[Request, ...]


@dataclasses.dataclass(frozen=True)
class EvictLayout:
    """Remove a layout; none of its buckets is pending."""

    layout: Layout


@dataclasses.dataclass(frozen=True)
class SuspendLayout:
    """Do not use a layout until all ranks have joined; none of its buckets is pending."""

    layout: Layout


@dataclasses.dataclass(frozen=True)
class FreezeMailbox:
    """Do not write to a mailbox any more, and confirm that."""

    mailbox_id: int


@dataclasses.dataclass(frozen=True)
class CloseMailbox:
    """No rank writes to a mailbox any more: finish the round that all have written, or make a request of it."""

    mailbox_id: int


@dataclasses.dataclass(frozen=True)
class ParticipateWithoutData:
    """Participate in a collective without contributing data: this rank has joined. Other process sets' are skipped."""

    response: Response


Instruction = (ParticipateWithoutData | Layout | BucketRelease | SplitBucket | SuspendLayout | EvictLayout | Response
               | Mailbox | FreezeMailbox | CloseMailbox)
"""A step of a rank that follows from a decision. The response to a join ends all suspensions."""


class Controller:
    """One rank's side of the negotiation."""

    def __init__(self, rank: int, *, epoch: int = 0) -> None:
        self.rank = rank
        self.epoch = epoch
        self.applied = 0
        self._layouts = LayoutTable()
        self._reported: dict[int, BucketReady] = {}  # buckets reported and not answered
        self._unanswered: set[Key] = set()
        self._joined = False
        # For the next report:
        self._items: list[ReportItem] = []
        self._side_message: SideMessage | None = None
        self._blocked: Blocked | None = None
        self._leaving = False
        self._failure: FailureNotice | None = None
        self.has_news = False

    def enqueue(self, request: Request) -> None:
        """Report a tensor that is ready here. Its name must not be pending (the runtime refuses that at the call)."""
        assert request.key not in self._unanswered, f"'{request.name}' is still being processed"
        self._unanswered.add(request.key)
        self._joined = self._joined or request.collective is Collective.JOIN
        self._items.append(request)
        self.has_news = True

    def enqueue_bucket(self, bucket: Bucket, ready: BucketReady) -> SplitBucket | None:
        """Report a learned bucket whose slices are all filled here.

        When its layout has been evicted or suspended meanwhile, enqueue its members' requests instead and return them.
        """
        self.has_news = True
        if self._layouts.usable(ready.bucket_id, ready.round_id):
            assert ready.bucket_id not in self._reported, f"bucket {ready.bucket_id} is still being processed"
            self._reported[ready.bucket_id] = ready
            self._items.append(ready)
            return None
        requests = tuple(requests_of(bucket, ready))
        for request in requests:
            self.enqueue(request)
        if ready.ends_round:
            self.round_done(RoundDone(requests[0].label, ready.round_id, requests[0].process_set_id))
        return SplitBucket(ready.bucket_id, requests)

    def round_done(self, message: RoundDone) -> None:
        """Report that this rank has enqueued all its members of a round."""
        self._items.append(message)
        self.has_news = True

    def mark_stale(self, layout_id: int) -> None:
        """Report that a layout does not describe this rank's set any more."""
        if layout_id in self._layouts.in_use:
            self._items.append(LayoutStale(layout_id))
            self.has_news = True

    def report_mailbox(self, item: MailboxStale | MailboxFrozen) -> None:
        """Report what concerns a mailbox."""
        self._items.append(item)
        self.has_news = True

    def retire(self, retired: Retired) -> None:
        """Report that this rank has dropped a gradient set."""
        self._items.append(retired)
        self.has_news = True

    def send_side_message(self, side_message: SideMessage) -> None:
        """Report something beside tensors; it is merged with what is not sent yet, where the newer value counts."""
        if self._side_message is not None:
            before = self._side_message
            changed = {field: value for field, value in msgspec.structs.asdict(side_message).items()
                       if value not in (None, False, ())}
            for field in ("trace", "oob_messages", "oob_requests", "oob_withdrawn"):
                changed[field] = getattr(before, field) + getattr(side_message, field)
            side_message = msgspec.structs.replace(before, **changed)
        self._side_message, self.has_news = side_message, True

    def block(self, blocked: Blocked) -> None:
        """Report that threads of this rank have been blocked for long."""
        self._blocked, self.has_news = blocked, True

    def leave(self) -> None:
        """Report that this rank will enqueue nothing more."""
        self._leaving = self.has_news = True

    def fail(self, failure: FailureNotice) -> None:
        """Report that this rank has failed."""
        if self._failure is None:
            self._failure, self.has_news = failure, True

    def report(self) -> Report | None:
        """Return what has not been reported yet, or None."""
        if not self.has_news:
            return None
        report = Report(epoch=self.epoch, applied=self.applied, items=tuple(self._items), side_message=self._side_message,
                        leaving=self._leaving, failure=self._failure, blocked=self._blocked)
        self._items.clear()
        self._side_message = self._blocked = None
        self.has_news = False
        return report

    def is_foreign(self, message: Decision | DirectMessage) -> bool:
        """Return whether a message belongs to another world of an elastic job: it is dropped (docs/protocol.md#epochs)."""
        return message.epoch != self.epoch

    def apply(self, decision: Decision) -> list[Instruction]:
        """Return what the fields from `closed` to `responses` mean for this rank, as instructions in their order.

        Every rank that enqueued the same tensors gets the same list.

        Raises:
            ProtocolError: when a decision is missing or repeated.
        """
        if self.is_foreign(decision):
            return []
        if decision.sequence != self.applied + 1:
            raise ProtocolError(f"decision {decision.sequence} follows {self.applied}")
        self.applied = decision.sequence
        instructions: list[Instruction] = [*map(CloseMailbox, decision.closed), *decision.opened]
        for layout in decision.learned:
            self._layouts.learn(layout)
            instructions.append(layout)
        for release in decision.released:
            if self._reported.pop(release.bucket_id, None) is not None:  # else another process set's
                instructions.append(release)
        for layout_id in decision.suspended:
            layout = self._layouts.suspend(layout_id)
            instructions.extend((*self._withdraw(layout), SuspendLayout(layout)))
        for layout_id in decision.evicted:
            ended = self._layouts.evict(layout_id, decision.sequence)
            self._items = [item for item in self._items
                           if not (isinstance(item, LayoutStale) and item.layout_id == layout_id)]
            instructions.extend((*self._withdraw(ended), EvictLayout(ended)))
        instructions += map(FreezeMailbox, decision.frozen)
        for response in decision.responses:
            keys = [(response.process_set_id, name, response.round_id) for name in response.names]
            if keys[0] in self._unanswered:  # a fused response concerns all of a process set or none
                instructions.append(response)
                self._unanswered.difference_update(keys)
                if response.collective is Collective.JOIN:
                    self._end_join(response)
            elif self._joined and response.error is ErrorKind.NONE:
                instructions.append(ParticipateWithoutData(response))
        self._layouts.forget(self.applied)
        return instructions

    def bucket(self, bucket_id: int) -> Bucket:
        """Return a bucket of a layout in use."""
        return self._layouts.bucket(bucket_id)

    def unanswered(self) -> frozenset[str]:
        """Return the names of pending tensors, including the members of pending buckets."""
        return frozenset(name for _, name, _ in self._unanswered).union(
            *(self._layouts.bucket(bucket_id).response.names for bucket_id in self._reported))

    def _end_join(self, response: Response) -> None:
        """Take part again. When all ranks have joined, use the suspended layouts again."""
        self._joined = False
        if response.error is ErrorKind.NONE:
            self._layouts.resume()

    def _withdraw(self, layout: Layout) -> list[Instruction]:
        """Do not report a layout's buckets any more; return instructions for those that this rank has reported."""
        instructions: list[Instruction] = []
        for bucket in layout.buckets:
            ready = self._reported.pop(bucket.bucket_id, None)
            if ready is None:
                continue
            requests = tuple(requests_of(bucket, ready))
            self._unanswered.update(request.key for request in requests)
            instructions.append(SplitBucket(bucket.bucket_id, requests))
            if ready in self._items:  # not sent yet: a report that acknowledges the eviction must not name the bucket
                at = self._items.index(ready)
                done = RoundDone(layout.label, ready.round_id, bucket.response.process_set_id)
                self._items[at:at + 1] = (*requests, done) if ready.ends_round else requests
        return instructions
