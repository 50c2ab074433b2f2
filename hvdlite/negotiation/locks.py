"""Locks at the coordinator: which gradient sets on GPUs are reduced without reports. Pure.

When every rank reports the same full buckets in the same order round after round, the coordinator opens a *lock* for their
layout. It is a mailbox (`mailboxes.py`) without values: ranks *announce* full buckets in it, in the order of the layout, and
each rank launches a bucket when all have announced it. See `handoff/locked_rounds.py` for a rank's side.

Rules (docs/protocol.md#locked-rounds)
- All ranks launch work on GPUs in the same order. Before a lock opens, that is the order of decisions; while it is open, its
  members launch nothing but announced buckets; after it is closed, the order of decisions again.
- So whatever could make a member launch something else ends the lock first, and waits until it is closed: requests for
  tensors on GPUs, buckets and members that are reported, rounds after which a layout on GPUs may be learned (its buffers
  need calls of NCCL), joins, leaves, stale layouts, tuning. What ranks report meanwhile waits, too, in its order.
- A lock ends in two decisions, like any mailbox. After the first, no rank announces or launches. After the second, memory
  does not change, so all ranks find the same buckets complete. They launch those, and report the others.
- What all ranks have announced can be launched without any script: the buckets are full. So ranks never wait for each
  other's scripts between the two decisions.
- A lock is used from the second round after the one that opened it, for the reason for which layouts are.
- There is one lock at a time, because there is one order of launches.
"""

from __future__ import annotations

from typing import Final

from hvdlite.core.device import CPU
from hvdlite.core.types import Collective
from hvdlite.negotiation.gradient_sets import GradientSetTable
from hvdlite.negotiation.mailboxes import MailboxTable, OpenMailbox
from hvdlite.negotiation.messages import (
    BucketReady,
    BucketRelease,
    Layout,
    MailboxFrozen,
    MailboxStale,
    MergedRequests,
    RankReport,
    ReportItem,
    Request,
    RoundDone,
)
from hvdlite.negotiation.process_sets import ProcessSetTable

OPENS_AFTER: Final = 4
"""Plain rounds after which a lock opens: every bucket was reported full by all ranks, with a gradient for each member."""


class Locks:
    """The lock of a job.

    Args:
        is_enabled: whether there are any.
        mailboxes: has the lock's memory, and what is said about it.
    """

    def __init__(self, mailboxes: MailboxTable, gradient_sets: GradientSetTable, process_sets: ProcessSetTable, *,
                 is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._mailboxes, self._gradient_sets, self._process_sets = mailboxes, gradient_sets, process_sets
        self._odd: set[str] = set()  # labels of which something but plain buckets was reported in this round
        self._rounds: dict[str, int] = {}  # plain ones, one after the other
        self._layout: Layout | None = None  # that of the lock
        self._buckets: frozenset[int] = frozenset()  # likewise

    @property
    def is_ending(self) -> bool:
        """Whether ranks have been told to end the lock, and have not all done so."""
        lock = self._mailboxes.lock
        return lock is not None and lock.awaited is not None

    # --- learning ------------------------------------------------------------------------------------------------------

    def requested(self, request: Request) -> None:
        """A member of a gradient set goes by itself."""
        if self._is_enabled:
            self._odd.add(request.label)

    def released(self, ready: BucketReady, release: BucketRelease) -> None:
        """A bucket is released; its last report was `ready`."""
        if self._is_enabled and (ready.in_step or release.globally_unused or release.partly_unused or release.ranks_in_step):
            self._odd.add(self._gradient_sets.layouts.of_bucket(release.bucket_id).label)

    def end_round(self, label: str, round_id: int, *, has_joined: bool) -> None:
        """A round is over on all ranks: perhaps open a lock.

        Args:
            has_joined: whether some rank has joined.
        """
        if not self._is_enabled:
            return
        layout = self._gradient_sets.layout_named(label)
        is_odd = label in self._odd
        self._odd.discard(label)
        if is_odd or has_joined or layout is None or round_id < layout.first_round or layout.unbucketed or any(
                bucket.response.device == CPU for bucket in layout.buckets):
            self._rounds.pop(label, None)
            return
        self._rounds[label] = rounds = self._rounds.get(label, 0) + 1
        if self._mailboxes.open_lock(layout, round_id + 2, rounds, OPENS_AFTER):
            self._layout, self._buckets = layout, frozenset(bucket.bucket_id for bucket in layout.buckets)
            self._gradient_sets.locked = layout.layout_id
            self._rounds.clear()

    # --- the end -------------------------------------------------------------------------------------------------------

    def holds(self, item: ReportItem | MergedRequests | RankReport, now: float) -> bool:
        """Return whether an item has to wait until the lock is closed; end the lock if it is the first one."""
        lock = self._mailboxes.lock
        if lock is None or isinstance(item, (MailboxFrozen, MailboxStale)):
            return False
        if lock.awaited is None:
            if not self._ends(item):
                return False
            self.end(now)
        return True

    def end(self, now: float) -> None:
        """End the lock, if there is one: something is to be launched in the order of decisions."""
        self._rounds.clear()
        self._mailboxes.freeze_lock(now)

    def closed(self, lock: OpenMailbox) -> None:
        """All ranks have said what they have announced."""
        assert self._layout is not None
        slots = lock.last_round - lock.mailbox.first_round
        if slots >= 0:
            self._gradient_sets.reduced_by_bucket(self._layout.label,
                                                  lock.mailbox.layout_round + slots // len(self._layout.buckets))
        self._gradient_sets.locked = 0

    def _ends(self, item: ReportItem | MergedRequests | RankReport) -> bool:
        assert self._layout is not None and self._mailboxes.lock is not None
        match item:
            case Request(label=self._layout.label) | Request(collective=Collective.JOIN | Collective.REMOVE_PROCESS_SET):
                return True
            case Request(process_set_id=number, device=device):
                return device != CPU and number in self._process_sets and not set(self._process_sets[number]).isdisjoint(
                    self._mailboxes.lock.members)
            case BucketReady(bucket_id=bucket_id, round_id=round_id):  # the round before the first one is reported
                is_early = round_id < self._mailboxes.lock.mailbox.layout_round
                return self._gradient_sets.is_on_gpu(bucket_id) and not (is_early and bucket_id in self._buckets)
            case RoundDone(label=self._layout.label, round_id=round_id):
                return round_id >= self._mailboxes.lock.mailbox.layout_round
            case RoundDone(label=label):
                return self._gradient_sets.may_learn_on_gpu(label)
        return True
