"""A rank's side of a lock: full buckets on GPUs are launched when all ranks have announced them, without reports.

Theory of operation
- A user thread that has filled a bucket *announces* it: it writes its slot, a number that counts buckets in the order of the
  layout, round by round, into memory that the ranks of the host share. It announces no slot before all earlier ones.
- A slot is *complete* when all ranks have announced it at the same optimizer step. Every rank launches complete slots, in
  their order. The rank that completes one does so in the thread that filled the bucket, and wakes the others' launchers.
- The *launcher* is a thread that sleeps on a futex. It also launches for the main thread, which a signal handler may
  interrupt anywhere: half a launch would be the end of the job.
- A bucket with anything unusual (a member without a gradient, a report from within the optimizer's step) is not announced.
  It ends the lock, and so does a thread that has been blocked for long. What is not complete then is reported as always.

The lock of this class is held during a launch. The background thread never waits for it; see `DeferringLock`.
See `negotiation/locks.py` for the rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import msgspec

from hvdlite.handoff.buckets import BucketEntry
from hvdlite.handoff.deferring_lock import DeferringLock
from hvdlite.memory.mailbox_area import MailboxArea
from hvdlite.negotiation.messages import BucketReady, Layout, Mailbox, MailboxStale, RoundDone

_FOR_EVER: Final = 1e6
"""Seconds; a launcher may wake up now and then for nothing."""
_MARK: Final = 1 << 31
"""Of words that no launch writes."""

Launch = Callable[[BucketEntry], None]
"""Launches a bucket and completes its handle."""


class LockedRounds:
    """One rank's end of a lock.

    Args:
        launch: called by any thread, one at a time, in the order of slots.
        tell: called by any thread: the coordinator is to end the lock. More than once is fine.
        failed: called by any thread when a launch has failed: the job ends.
        later: called by any thread: lets the background thread call a function.
    """

    def __init__(self, mailbox: Mailbox, layout: Layout, area: MailboxArea, launch: Launch,
                 tell: Callable[[MailboxStale], None], failed: Callable[[Exception], None],
                 later: Callable[[Callable[[], None]], None]) -> None:
        self.mailbox, self.label = mailbox, layout.label
        self._area, self._launch, self._tell, self._failed = area, launch, tell, failed
        self._deferring = DeferringLock(later)
        self._lock = self._deferring.lock  # guards the rest
        self.when_unlocked = self._deferring.when_unlocked
        self._indices = {bucket.bucket_id: index for index, bucket in enumerate(layout.buckets)}
        self._entries: dict[int, BucketEntry] = {}  # full and not launched, by slot
        self._launched = mailbox.first_round - 1  # the last slot
        self._kept: list[BucketEntry] = []  # came when the lock ended
        self._done: RoundDone | None = None  # of the last round that this rank has finished
        self._is_frozen = self._has_told = False
        self._error: Exception | None = None

    # --- user threads --------------------------------------------------------------------------------------------------

    def take(self, entry: BucketEntry) -> bool:
        """Announce a full bucket, and launch what is complete; return False if the bucket is to be reported instead."""
        before = self.announced
        if not self.put(entry):
            return False
        if self.announced > before:  # leaving the lock was a fence: it is visible before this rank looks at the others'
            if threading.get_ident() != threading.main_thread().ident:
                self.look()
            if self.is_complete(before + 1):  # perhaps it was this rank that completed it
                self._wake((self.announced << 8 | self._area.index & 0xFF) % _MARK)
        return True

    def put(self, entry: BucketEntry) -> bool:
        """Announce a full bucket, if all earlier ones are; return False if the bucket is to be reported instead."""
        ready = entry.ready
        if ready.round_id < self.mailbox.layout_round:
            return False
        try:
            with self._lock:
                if self._is_frozen or self._error is not None:
                    return False
                self._entries[self._slot(ready)] = entry
                self._announce()
        finally:
            self._unlocked()
        return True

    @property
    def announced(self) -> int:
        """The last slot that this rank has announced. The memory itself is asked: a thread may be interrupted anywhere."""
        even, odd = self._area.heads[self._area.index]
        return max(even[0], odd[0], self.mailbox.first_round - 1)

    def look(self) -> None:
        """Launch the slots that are complete."""
        try:
            with self._lock:
                while not self._is_frozen and self._error is None and self.is_complete(self._launched + 1):
                    try:
                        self._launch_next(self._launch)
                    except Exception as error:
                        self._error = error
                        self._failed(error)
        finally:
            self._unlocked()

    # --- the launcher --------------------------------------------------------------------------------------------------

    def start(self, name: str, begin: Callable[[], None]) -> None:
        """Start the launcher.

        Args:
            begin: what that thread calls first.
        """
        threading.Thread(target=self._run, args=(begin,), name=name, daemon=True).start()

    def _run(self, begin: Callable[[], None]) -> None:
        word = self._area.word
        try:
            begin()
        except Exception as error:
            self._error = error
            self._failed(error)
        while True:
            seen = word.value
            self.look()
            if self._is_frozen or self._error is not None:
                return
            word.wait(seen, _FOR_EVER)

    # --- the background thread -----------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether the background thread has not got the lock yet."""
        return self._deferring.is_busy

    def hurry(self) -> bool:
        """A thread of this rank has been blocked for long; return whether something here is not launched."""
        waiting = [*self._entries.copy().values(), *self._kept]
        for entry in waiting[:1]:
            self._tell_stale(entry)
        return bool(waiting)

    def freeze(self) -> int:
        """Announce and launch no more; return the last slot that this rank has announced. Called under the lock."""
        self._is_frozen = True
        self._end_launcher()
        return self.announced

    def keep(self, item: BucketEntry | RoundDone) -> bool:
        """Keep what is to be reported, if that must come after what is announced here; return whether it is kept.

        A round must not seem to be over while buckets of it are in the lock.
        """
        if isinstance(item, RoundDone):
            if item.label != self.label or item.round_id < self.mailbox.layout_round:
                return False
            self._done = item
            return True
        if item.ready.bucket_id not in self._indices or item.ready.round_id < self.mailbox.layout_round:
            return False
        self._kept.append(item)
        return True

    def close(self, launch: Launch) -> tuple[list[BucketEntry], RoundDone | None]:
        """All ranks have frozen the lock: launch what is complete; return what is to be reported."""
        while self.is_complete(self._launched + 1):
            self._launch_next(launch)
        rest = [*(self._entries[slot] for slot in sorted(self._entries)), *self._kept]
        self._entries.clear()
        self._kept.clear()
        for entry in rest:
            ready = entry.ready
            if ready.ends_round:
                self._done = RoundDone(self.label, ready.round_id, self.mailbox.process_set_id)
                entry.ready = msgspec.structs.replace(ready, ends_round=False)
        return rest, self._done

    def abandon(self, error: Exception) -> None:
        """This rank leaves: nobody waits for its buckets any more, but others need them. Called under the lock."""
        for entry in (*self._entries.values(), *self._kept):
            entry.abandon(error)

    def fail(self, error: Exception) -> None:
        """The job has failed: fail what is not launched."""
        self._error = self._error or error  # whoever has the lock now finds it after that
        self._drop()
        self._end_launcher()

    # -------------------------------------------------------------------------------------------------------------------

    def is_complete(self, slot: int) -> bool:
        """Return whether all ranks have announced a slot."""
        entry = self._entries.get(slot)
        if entry is None or slot > self.announced:
            return slot <= self._launched
        parity, step, area = entry.ready.round_id & 1, entry.ready.step, self._area
        for other in area.others:
            if area.heads[other][parity][0] < slot:
                return False
        if any(area.heads[other][parity][1] != step for other in area.others):
            self._tell_stale(entry)
            return False
        return True

    def _slot(self, ready: BucketReady) -> int:
        rounds = ready.round_id - self.mailbox.layout_round
        return self.mailbox.first_round + rounds * len(self._indices) + self._indices[ready.bucket_id]

    def _announce(self) -> None:
        head = self._area.heads[self._area.index]
        while (entry := self._entries.get(self.announced + 1)) is not None:
            ready, slot = entry.ready, self.announced + 1
            if ready.unused or ready.in_step:
                self._tell_stale(entry)
                return
            if self._launched < slot - self._indices[ready.bucket_id] - 1:  # others may still read what is there
                self._tell_stale(entry)  # the round before was left in the middle
                return
            mine = head[ready.round_id & 1]
            mine[1] = ready.step
            mine[0] = slot

    def _launch_next(self, launch: Launch) -> None:
        entry = self._entries[self._launched + 1]
        launch(entry)
        if entry.ready.ends_round:
            self._done = RoundDone(self.label, entry.ready.round_id, self.mailbox.process_set_id)
        self._launched += 1  # first: `is_complete` may look without the lock
        del self._entries[self._launched]

    def _unlocked(self) -> None:
        """The lock is free, if this is not a signal handler inside another call."""
        self._deferring.let_act()
        if self._error is not None:
            self._drop()

    def _drop(self) -> None:
        """Fail what is not launched, unless a thread has the lock: it does so afterwards."""
        if self._error is not None and self._lock.acquire(blocking=False):
            try:
                self.abandon(self._error)
                self._entries.clear()
                self._kept.clear()
            finally:
                self._lock.release()

    def _tell_stale(self, entry: BucketEntry) -> None:
        if not self._has_told:
            self._has_told = True
            self._tell(MailboxStale(self.mailbox.mailbox_id, entry.handle.name))

    def _end_launcher(self) -> None:
        self._wake(_MARK | (self.mailbox.mailbox_id & 0xFFFFF) << 10 | (self._area.index & 0x3FF))

    def _wake(self, value: int) -> None:
        self._area.word.value = value
        self._area.word.wake()
