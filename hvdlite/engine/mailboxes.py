"""The mailboxes of a rank: opened, frozen and closed as decisions say."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

from hvdlite.core.errors import HorovodInternalError
from hvdlite.handoff.buckets import BucketEntry, LearnedLayout
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.handle import BlockedWaiters
from hvdlite.handoff.job_state import JobState
from hvdlite.handoff.locked_rounds import Launch, LockedRounds
from hvdlite.handoff.mailbox import MailboxCall, MailboxEnd
from hvdlite.memory.mailbox_area import MailboxArea
from hvdlite.negotiation.messages import Mailbox, MailboxFrozen, MailboxStale, RoundDone
from hvdlite.planes.arithmetic import Casts

Areas = Callable[[int, Sequence[int]], MailboxArea | None]
"""Returns the next area of that capacity for some ranks, None on other ranks; all ranks make the same calls in order."""


class Mailboxes:
    """One rank's ends of mailboxes. Only the background thread calls it.

    Attributes:
        waiting: tensors for which threads wait in mailboxes that are to end, by mailbox.

    Args:
        areas: None where the ranks share no memory; then no mailbox is ever opened.
        state: gets the mailboxes that user threads may use.
        report: tells the coordinator.
        tell: called by user threads, like `report`.
        finished: called by any thread when a call is done, or has failed.
        later: called by any thread: lets this one call a function.
        enqueue: lets this thread take what is to be reported.
        launch: launches a full bucket; called by any thread.
        failed: called by any thread when that has failed.
        enter: called first by a thread that launches.
    """

    def __init__(self, rank: int, areas: Areas | None, state: JobState,
                 report: Callable[[MailboxStale | MailboxFrozen], None],
                 tell: Callable[[MailboxStale], None], finished: Callable[[MailboxCall], None],
                 later: Callable[[Callable[[], None]], None],
                 enqueue: Callable[[Entry | BucketEntry | RoundDone | BlockedWaiters], None],
                 launch: Launch = lambda entry: None, failed: Callable[[Exception], None] = lambda error: None,
                 enter: Callable[[], None] = lambda: None) -> None:
        self.waiting: dict[int, str] = {}
        self._rank = rank
        self._make_area, self._state, self._report = areas, state, report
        self._tell, self._finished, self._later, self._enqueue = tell, finished, later, enqueue
        self._launch, self._failed, self._enter = launch, failed, enter
        self._last: dict[int, MailboxEnd | LockedRounds] = {}  # by area
        self._areas: dict[int, MailboxArea | None] = {}
        self._ends: dict[int, MailboxEnd] = {}
        self._locks: dict[int, LockedRounds] = {}
        self._waiters: BlockedWaiters | None = None  # to be told to the coordinator when the lock is closed
        self._unusable: dict[int, int] = {}  # mailboxes without memory here, and the round before their first

    @property
    def in_use(self) -> bool:
        """Whether a call is under way in some mailbox; then a thread most likely waits for it."""
        return any(end.has_call for end in self._ends.values())

    def open(self, mailbox: Mailbox) -> None:
        """Let threads use a mailbox, if this rank is a member of its process set."""
        assert self._make_area is not None
        ranks, number = self._state.process_sets[mailbox.process_set_id], mailbox.area
        if number not in self._areas:
            self._areas[number] = None
            with contextlib.suppress(MemoryError, OSError):
                self._areas[number] = self._make_area(mailbox.capacity, ranks)
        area = self._areas[number]
        if self._rank not in ranks:
            return
        last = self._last.get(number)
        learned = self._learned(mailbox.layout_id)
        if area is None or (last is not None and last.is_busy) or (mailbox.layout_id and learned is None):
            self._unusable[mailbox.mailbox_id] = mailbox.first_round - 1  # no memory, or a thread is still in it
            self._report(MailboxStale(mailbox.mailbox_id, mailbox.stem))
        elif learned is not None:
            lock = LockedRounds(mailbox, learned.layout, area, self._launch, self._tell, self._failed, self._later)
            self._last[number] = self._locks[mailbox.mailbox_id] = self._state.locks[lock.label] = lock
            lock.start(f"hvdlite-launcher-{self._rank}", self._enter)
        else:
            end = MailboxEnd(mailbox, ranks, area, Casts.of_numpy(), self._tell, self._finished, self._later)
            self._last[number] = end
            self._ends[mailbox.mailbox_id] = self._state.mailboxes[mailbox.process_set_id, mailbox.stem] = end

    def stale(self, stale: MailboxStale) -> None:
        """A thread cannot go on in a mailbox."""
        if stale.mailbox_id in self._ends or stale.mailbox_id in self._locks:
            self.waiting[stale.mailbox_id] = stale.name
            self._report(stale)

    def hurry(self, waiters: BlockedWaiters) -> bool:
        """A thread has been blocked for long, perhaps in a lock: end that; return whether the coordinator is told later."""
        hurried = [lock for lock in self._locks.values() if lock.hurry()]
        self._waiters = waiters if hurried else None
        return bool(hurried)

    def keep(self, item: BucketEntry | RoundDone) -> bool:
        """Keep what is to be reported after what is announced in a lock; return whether it is kept."""
        return any(lock.keep(item) for lock in self._locks.values())

    def freeze(self, mailbox_id: int) -> None:
        """Let no thread write to a mailbox, and say so."""
        end = self._ends.get(mailbox_id) or self._locks.get(mailbox_id)
        if end is not None:
            self._withdraw(end)
            end.when_unlocked(lambda: self._report(MailboxFrozen(mailbox_id, end.freeze())))
        elif mailbox_id in self._unusable:
            self._report(MailboxFrozen(mailbox_id, self._unusable.pop(mailbox_id)))

    def close(self, mailbox_id: int) -> None:
        """All ranks have frozen a mailbox; what is not complete becomes a request."""
        end = self._ends.pop(mailbox_id, None)
        self.waiting.pop(mailbox_id, None)
        if end is not None:
            end.when_unlocked(lambda: self._close(end))

    def close_lock(self, mailbox_id: int, launch: Launch) -> None:
        """All ranks have frozen a lock: launch what is complete, and report the rest.

        Args:
            launch: like this object's, for this thread.
        """
        lock = self._locks.get(mailbox_id)
        if lock is not None:
            self.waiting.pop(mailbox_id, None)
            rest, done = lock.close(launch)
            del self._locks[mailbox_id]
            for entry in rest:
                self._enqueue(entry)
            if done is not None:
                self._enqueue(done)
            if self._waiters is not None:
                self._enqueue(self._waiters)
                self._waiters = None

    def _close(self, end: MailboxEnd) -> None:
        entry = end.close()
        if entry is not None:
            self._enqueue(entry)

    def leave(self, error: HorovodInternalError) -> None:
        """Let no thread use a mailbox any more; fail what is under way in them. The coordinator goes on closing them."""
        for end in self._ends.values():
            self._withdraw(end)
            end.fail(error)
        for lock in self._locks.values():  # what all ranks have announced is still launched
            self._withdraw(lock)
            lock.when_unlocked(functools.partial(lock.abandon, error))

    def end(self, error: HorovodInternalError) -> None:
        """The world ends: fail what is under way, and let go of the memory."""
        self.leave(error)
        for lock in self._locks.values():
            lock.fail(error)
        self._locks.clear()
        self._ends.clear()
        self._areas.clear()
        self._last.clear()

    def _learned(self, layout_id: int) -> LearnedLayout | None:
        """Return the layout of a lock, if this rank has memory for it."""
        return next((learned for learned in self._state.layouts.values() if learned.layout.layout_id == layout_id), None)

    def _withdraw(self, end: MailboxEnd | LockedRounds) -> None:
        if isinstance(end, LockedRounds):
            if self._state.locks.get(end.label) is end:
                del self._state.locks[end.label]
            return
        key = end.mailbox.process_set_id, end.mailbox.stem
        if self._state.mailboxes.get(key) is end:
            del self._state.mailboxes[key]
