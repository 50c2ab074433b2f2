"""A rank's side of a mailbox: a thread that blocks in a collective exchanges values with the other ranks by itself.

Theory of operation
- The thread writes its values and a text that describes the tensor, wakes the others if it is the last, else polls for a
  moment and sleeps until all have written the same text, and makes its result of all ranks' values (`exchange.py`). No other
  thread takes part, and no message is sent.
- A thread that has waited for `patience_seconds`, or finds another text, notifies the background thread, and waits on. The
  coordinator then ends the mailbox: first no rank writes to it any more (`freeze`). When all ranks have confirmed, all see
  the same memory, so they agree whether the last round is complete. If not, this rank's call becomes a request (`close`).
- A thread that is interrupted leaves its call behind, which the end of the mailbox completes like that of any other thread.
- A mailbox serves one call at a time; a second thread's call becomes a request immediately.

The lock is held while values are written and while the result is made, never while a thread sleeps. The background thread
never waits for it, because a signal handler may interrupt its holder and wait for the background thread: what that has to
do under the lock is done when the lock is free (`when_unlocked`).
See `negotiation/mailboxes.py` for the rules.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from hvdlite.handoff.buckets import BucketEntry
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.exchange import MailboxCall, MailboxExchange
from hvdlite.handoff.inbox import Inbox, Task
from hvdlite.memory.area import LENGTH, NAME_NUMBER, NUMBER, REDUCED, ROWS, TEXT, Area
from hvdlite.memory.patience import Patience
from hvdlite.negotiation.messages import Mailbox, MailboxStale
from hvdlite.planes.arithmetic import Casts

LONG_SECONDS: Final = 1.0
"""How long a thread sleeps at most after it has notified the coordinator."""

class MailboxEnd:
    """One rank's end of a mailbox.

    Args:
        members: the ranks of the process set.
        inbox: receives what the background thread is to do, possibly more than once; frees the names of finished calls.
        finished: called when a call is done or has failed, by the thread that does it.
        patience: of threads that wait in it.
    """

    def __init__(self, mailbox: Mailbox, members: tuple[int, ...], area: Area, casts: Casts, inbox: Inbox,
                 finished: Callable[[MailboxCall], None], patience: Patience) -> None:
        self.mailbox, self.members = mailbox, members
        self._area, self._casts, self._inbox, self._finished = area, casts, inbox, finished
        self._patience = patience
        self._deferred: deque[Callable[[], object]] = deque()  # what the background thread has to do under the lock
        self._lock = threading.RLock()  # guards the rest; a signal handler may make a call while its thread holds it
        self._error: Exception | None = None
        self._is_writing = False
        self._call: MailboxCall | None = None  # under way
        self._is_frozen = False
        self._signature: object = None  # for which the following is prepared
        self._text = b""
        self._exchange: MailboxExchange
        self._others = [other for other in range(area.size) if other != area.index]

    # --- the thread that calls -------------------------------------------------------------------------------------------

    def exchange(self, call: MailboxCall, block: Callable[[], float], unblock: Callable[[float], None]) -> bool:
        """Carry out a call; return whether it has begun. If not, it is to be made in another way.

        It has become a request if it has an entry; the thread is then to wait for that.

        Args:
            block, unblock: called before and after the thread waits.

        Raises:
            HorovodInternalError: when the job has failed.
        """
        if not self.begin(call):
            return False
        self.take_part(call, block, unblock)
        return True

    def begin(self, call: MailboxCall) -> bool:
        """Write this rank's part of a call; return whether that was possible. `take_part` has to follow."""
        try:
            return self.write(call)
        except BaseException:
            self.abandon(call)
            raise
        finally:
            self._let_act()

    def take_part(self, call: MailboxCall, block: Callable[[], float], unblock: Callable[[float], None]) -> None:
        """Wait until a call that is written is over, or has become a request; again after an exception.

        The arguments are those of `exchange`, which raises likewise.
        """
        try:
            if self.is_complete(call):
                self._area.wake(self._others)
                self.finish(call)
            elif self._patience.look(lambda: self.is_complete(call)):
                self.finish(call)
            if call.is_collected and not call.is_done and self._patience.look(lambda: self._is_reduced(call)):
                self.finish(call)
            if not call.is_done:
                begun = block()
                try:
                    self._wait(call)
                finally:
                    unblock(begun)
        except BaseException:
            self.abandon(call)
            raise
        finally:
            self._let_act()

    def write(self, call: MailboxCall) -> bool:
        """Write this rank's part of the next round; return whether that was possible."""
        area = self._area
        with self._lock:
            if self._is_frozen or self._error is not None or self._is_writing or self._call is not None:
                return False
            if call.nbytes > area.capacity:
                if call.rows:  # others may have fewer, and wait in it
                    self._report_stale(call)
                return False
            self._is_writing = True
            try:
                if call.signature != self._signature and not self._prepare(call):
                    return False
                call.round_id = round_id = self.last_round + 1
                self._call = call
                parity = round_id & 1
                head, text = area.heads[area.index][parity], self._text
                self._exchange.write(call, parity)
                area.texts[area.index][parity][:len(text)] = text
                head[LENGTH], head[NAME_NUMBER] = len(text), call.name_number
                if call.rows:
                    head[ROWS], = call.rows
                head[NUMBER] = round_id
            finally:
                self._is_writing = False
        return True  # leaving the lock was a fence: this rank's head is visible before it looks at the others'

    @property
    def last_round(self) -> int:
        """The last round that this rank has written."""
        even, odd = self._area.heads[self._area.index]
        return max(even[NUMBER], odd[NUMBER], self.mailbox.first_round - 1)

    def is_complete(self, call: MailboxCall) -> bool:
        """Return whether all ranks have written the same text in this call's round."""
        return self._differs(call) is False

    def finish(self, call: MailboxCall) -> None:
        """Do what can be done in a complete round, unless it is done: make the result, or this rank's part of it."""
        with self._lock:
            if self._call is call:
                self._collect(call)
        if self._call is call and self._is_reduced(call):  # looked at after the fence, so one of the ranks sees all
            with self._lock:
                if self._call is call:
                    self._collect(call)

    def abandon(self, call: MailboxCall) -> None:
        """The call's thread goes away: what it has written still counts."""
        with self._lock:
            if self._call is not call:
                if call.entry is None:
                    self._end(call)  # it has not begun, or is over
            elif self.last_round == call.round_id and self._differs(call) is False:
                self._collect(call)
            else:
                self._report_stale(call)

    def _let_act(self) -> None:
        """The lock is released, unless this is a signal handler inside another call: let the background thread have it."""
        if self._deferred:
            self._inbox.post(Task(self.act))

    def _report_stale(self, call: MailboxCall) -> None:
        self._inbox.post(MailboxStale(self.mailbox.mailbox_id, call.key[1]))

    def _wait(self, call: MailboxCall) -> None:
        word, clock, patience = self._area.word, time.perf_counter, call.patience_seconds
        is_reported, begun = False, clock()
        while True:
            seen = word.value
            if self._error is not None:
                self._fail(self._error)
            if call.is_done or call.entry is not None:
                return
            if call.error is not None:
                raise call.error.with_traceback(None)
            differs = self._differs(call)
            waited = clock() - begun
            if differs is False:
                was_collected = call.is_collected
                self.finish(call)
                if call.is_done:
                    return
                if not was_collected:
                    begun = clock()  # another wait begins, for the others' parts
            if not is_reported and (differs or waited >= patience):
                is_reported = True
                self._report_stale(call)
            else:
                word.wait(seen, LONG_SECONDS if is_reported else patience)

    # --- the background thread -------------------------------------------------------------------------------------------

    @property
    def has_call(self) -> bool:
        """Whether a call is under way; looked at without the lock."""
        return self._call is not None

    @property
    def is_busy(self) -> bool:
        """Whether the background thread has not got the lock yet."""
        return bool(self._deferred)

    def when_unlocked(self, act: Callable[[], object]) -> None:
        """Call a function under the lock: now, or when the thread that holds it has finished."""
        self._deferred.append(act)
        self.act()

    def act(self) -> None:
        """Do what is deferred, unless a thread has the lock."""
        while self._deferred and self._lock.acquire(blocking=False):
            try:
                self._deferred.popleft()()
            finally:
                self._lock.release()

    def freeze(self) -> int:
        """Write no more; return the last round that this rank has written."""
        with self._lock:
            self._is_frozen = True
            return self.last_round

    def close(self) -> Entry | BucketEntry | None:
        """All ranks have frozen the mailbox: finish the call under way, or return the entry that it becomes."""
        with self._lock:
            self._is_frozen = True
            call = self._call
            if call is None:
                self._forget()
                return None
            if self.last_round != call.round_id:  # its thread was interrupted before it had written
                self._drop(call)
            elif self._differs(call) is False:
                self._collect(call)
            else:
                call.entry = call.make_entry()
                self._call = None
                self._forget()
        self._area.wake()
        return call.entry

    def fail(self, error: Exception) -> None:
        """This rank leaves, or the job has failed: finish the call under way if all have taken part, else fail it."""
        self._error = error  # whoever has the lock now finds it before it waits
        if self._lock.acquire(blocking=False):
            try:
                self._fail(error)
            finally:
                self._lock.release()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._is_frozen = True
            call = self._call
            if call is None:
                self._forget()
                return
            if self.last_round == call.round_id and self._differs(call) is False:
                self._collect(call)
            if not call.is_done:  # or some rank has not done its part of it
                call.error = error
                self._drop(call)
        self._area.wake()

    # -----------------------------------------------------------------------------------------------------------------

    def _prepare(self, call: MailboxCall) -> bool:
        signature = call.signature
        text = repr(tuple(signature)).encode()
        exchange = call.exchange(self.members, self._area, self._casts) if len(text) <= TEXT else None
        if exchange is None:
            return False
        self._signature = None
        self._text, self._exchange = text, exchange
        self._signature = signature
        return True

    def _is_reduced(self, call: MailboxCall) -> bool:
        """Return whether all ranks have done their parts of the result."""
        return all(line[REDUCED] >= call.round_id for line in self._area.lines)

    def _differs(self, call: MailboxCall) -> bool | None:
        """Return False if the round is complete, True if it never will be, None while ranks are missing."""
        parity, round_id, text = call.round_id & 1, call.round_id, self._text
        area = self._area
        for other in self._others:
            if area.heads[other][parity][NUMBER] != round_id:
                return None
        for other in self._others:
            head = area.heads[other][parity]
            length = head[LENGTH]
            if (length != len(text) or head[NAME_NUMBER] != call.name_number
                    or area.texts[other][parity][:length] != text):
                return True
        return False

    def _collect(self, call: MailboxCall) -> None:
        if not call.is_collected:
            self._exchange.collect(call, call.round_id & 1)
            call.is_collected = True
            self._area.lines[self._area.index][REDUCED] = call.round_id
        if call.is_in_place:
            if not self._is_reduced(call):
                return
            self._area.wake(self._others)
        call.is_done = True
        self._drop(call)

    def _forget(self) -> None:
        """There are no more calls: let go of the memory of a bucket."""
        self._signature = None
        vars(self).pop("_exchange", None)

    def _drop(self, call: MailboxCall) -> None:
        self._call = None
        if self._is_frozen:
            self._forget()
        self._end(call)

    def _end(self, call: MailboxCall) -> None:
        if not call.is_over:
            call.is_over = True
            self._inbox.release(call.key)
            self._finished(call)
