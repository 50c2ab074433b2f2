"""Sends and receives of one rank of a group: one state machine, whatever carries the messages (`groups/carriers.py`).

A send waits in a queue to its receiver until the carrier has taken all of it. A receive gets the first message that fits
(`groups/matching.py`), whichever carrier it comes with.

There is no thread of messages: *whoever waits in the group advances all of them*. A thread that waits sleeps on the rank's
word (`memory/area.py`) and calls `advance` whenever it wakes up. If none waits, the group's worker calls `drive`.

Rules (docs/protocol.md#message-rings)
- One lock guards everything. It is held while at most one piece per pair is copied, and never while a thread sleeps. Calls
  are ended without it, because their callbacks may make other calls.
- The background thread of the runtime only leaves notes (`note`); they are handled in `advance`. So no callback runs there.
- If a send takes too long in its middle, all calls fail: the receiver would take the next one for the rest of it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError
from hvdlite.diagnostics.progress import Progress
from hvdlite.groups.carriers import Carrier
from hvdlite.groups.matching import ANY, Matching, P2PMessage
from hvdlite.groups.members import GroupMembers
from hvdlite.groups.transfer import Transfer
from hvdlite.handoff.group_state import PATIENCE_SECONDS, GroupState

SLEEP_SECONDS: Final = 1.0  # the longest sleep
SHORT_SECONDS: Final = 0.01  # the longest sleep of a rank that lacks memory

A = TypeVar("A")


class Messages:
    """One rank's sends and receives. Callable from any thread.

    Args:
        state: of the group: threads sleep on this rank's word of its area, fail with it, and are in its long waits.
        carriers: by the other rank; one may serve many. Owned by this object.
        progress: counts the time that threads wait.
        patience: seconds after which a wait is long.

    Attributes:
        let_work: called often, by any thread, when something is under way for which no thread waits: call `drive` soon.
    """

    def __init__(self, members: GroupMembers, state: GroupState, carriers: Mapping[int, Carrier],
                 progress: Progress, patience: float = PATIENCE_SECONDS) -> None:
        self.rank, self.members = members.rank, members
        self.state, self.progress, self.patience = state, progress, patience
        self.let_work: Callable[[], object] = lambda: None
        self._area, self._carriers = state.area, carriers
        self._each_carrier = list(dict.fromkeys(carriers.values()))
        self._process = os.getpid()
        self._notes: deque[Callable[[], None]] = deque()
        self._waiting: set[object] = set()  # a key for each thread in `wait`
        self._drives = self._has_left = self._is_closed = False
        self._lock = threading.Lock()  # guards the rest
        self._sleepers = 0  # 1 while one of them has the lock
        self._error: Exception | None = None
        self._calls: dict[Transfer, None] = {}  # under way, oldest first
        self._first_deadline = math.inf  # no call under way has an earlier one
        self._sends: dict[int, deque[Transfer]] = {}  # by receiver: those not on their way completely; not empty
        self.matching = Matching()
        self._over: deque[tuple[Transfer, Exception | None]] = deque()  # to be ended without the lock
        for carrier in self._each_carrier:
            carrier.open(self)

    def send(self, values: Array, to: int, tag: int, timeout: float = math.inf) -> Transfer:
        """See `Group.send`. The call fails after `timeout` seconds.

        Raises:
            ValueError: if `to` is this rank, or none of the group's.
        """
        self.members.check_other("send to", to)
        return self._start(Transfer(self, values, to, tag, timeout, is_send=True))

    def receive(self, values: Array, source: int | None, tag: int, timeout: float = math.inf) -> Transfer:
        """Like `send`. A message of another length is lost: the call fails, and the next one gets the next.

        Raises:
            ValueError: if `source` is this rank, or none of the group's.
        """
        if source is not None:
            self.members.check_other("receive from", source)
        return self._start(Transfer(self, values, ANY if source is None else source, tag, timeout, is_send=False))

    def _start(self, call: Transfer) -> Transfer:
        if os.getpid() != self._process:  # the lock may be held for ever
            call.end(self.members.forked_error(self._process))
            return call
        self._guarded(self._begin, call)
        while call in self._calls and call.is_send and self._guarded(self._put, call.peer):
            pass
        if call in self._calls and not self._waiting:
            self.let_work()
        return call

    @property
    def is_active(self) -> bool:
        """Whether a thread that waits is to call `advance`."""
        return bool(self._calls or self._notes)

    @property
    def keeps_looking(self) -> bool:
        """Whether, after `close`, this rank still looks whether others use what it has shared with them."""
        return any(carrier.keeps_looking for carrier in self._each_carrier)

    @property
    def needs_work(self) -> bool:
        """Whether nobody calls `advance` who should."""
        return self.is_active and not self._waiting

    @property
    def next_deadline(self) -> float:
        """The time in `time.monotonic()` at which `advance` is to be called: a call may fail then."""
        if not self._calls:
            return math.inf
        is_short = any(carrier.is_short for carrier in self._each_carrier)
        return min(self._first_deadline, time.monotonic() + SHORT_SECONDS) if is_short else self._first_deadline

    def advance(self, *, blocked: bool = False) -> bool:
        """Copy at most a piece for each pair, handle notes, end calls that are overdue; return whether there was any of it.

        Args:
            blocked: whether the thread waits for another rank. Then rings that fill up are emptied into private memory.
        """
        return os.getpid() == self._process and self._guarded(self._advance, blocked)

    def wait(self, call: Transfer, timeout: float | None) -> bool:
        """See `Call.wait`."""
        limit, key = math.inf if timeout is None else time.monotonic() + timeout, object()
        if os.getpid() != self._process:
            call.end(self.members.forked_error(self._process))
            return True
        try:
            self._waiting.add(key)
            while call in self._calls:
                word = self._area.word
                seen = word.value
                if not self._guarded(self._advance, True, 1) and call in self._calls:
                    if time.monotonic() >= limit:
                        return False
                    word.wait(seen, self._patience(limit))
        finally:
            self._waiting.discard(key)
            if self.is_active and not self._waiting:
                self.let_work()
        return call.wait_idly(timeout)

    def drive(self, stops: Callable[[], bool]) -> None:
        """Carry out calls for which no thread waits, until there are none, or until a thread of the script does.

        Args:
            stops: whether to return; asked after each wake-up. Whoever changes the answer wakes this rank's word.
        """
        try:
            self._drives = True
            while True:
                word = self._area.word
                seen = word.value
                if not self.is_active or self._waiting or stops():
                    return
                if not self._guarded(self._advance, False, 1):
                    word.wait(seen, self._patience(math.inf))
        finally:
            self._drives = False

    def _patience(self, limit: float) -> float:
        """Return how long a thread may sleep, in seconds."""
        return max(0.0, min(SLEEP_SECONDS, min(limit, self.next_deadline) - time.monotonic()))

    def _wake(self) -> None:
        self._area.wake((self._area.index,))

    def flush(self, until: float) -> None:
        """Wait until the sends under way are over, at most until a time in `time.monotonic()`."""
        with self._lock:
            sends = [call for call in self._calls if call.is_send]
            for call in sends:
                self._carriers[call.peer].hasten(call)
        for call in sends:
            call.wait(max(0.0, until - time.monotonic()))

    def fail(self, error: Exception) -> None:
        """Let all calls under way and all later ones fail."""
        with self._lock:
            self._sleepers = 0
            self._fail(error)
        self._end_finished()

    def leave(self) -> None:
        """Let the others see that this rank sends and receives nothing any more. Idempotent.

        On this host they see it in the area's lines, which belong to the group.
        """
        if os.getpid() == self._process and not self._has_left:
            self._has_left = True
            for carrier in self._each_carrier:
                self._guarded(lambda each: each.leave(), carrier)

    def close(self) -> None:
        """Leave; calls under way fail. Idempotent; in a forked child, do nothing."""
        if os.getpid() != self._process or self._is_closed:
            return
        self._is_closed = True
        self.leave()
        self.fail(HorovodInternalError(f"{self.members.name} was destroyed on this rank before the call was complete"))
        with self._lock:
            for carrier in self._each_carrier:
                carrier.close()
            self._notes.clear()

    def _guarded(self, act: Callable[[A], object], argument: A, sleepers: int = 0) -> bool:
        """Call a function with the lock, and end the calls that it has finished; return its answer as a bool.

        Args:
            sleepers: 1 if this thread is one of those in `wait` and `drive`.
        """
        try:
            with self._lock:
                self._sleepers = sleepers
                return bool(act(argument))
        except Exception as error:
            self.fail(self.state.error or error)  # the runtime's memory ends with it
        except BaseException:  # between any two lines
            self.fail(HorovodInternalError(
                f"{self.members.name} cannot be used any more: a thread was interrupted in a send or receive"))
            raise
        finally:
            self._end_finished()
        return False

    def _end_finished(self) -> None:
        while self._over:
            try:
                call, error = self._over.popleft()
            except IndexError:  # another thread ends it
                return
            call.end(error)

    # --- with the lock ---------------------------------------------------------------------------------------------------

    def _begin(self, call: Transfer) -> None:
        if self._error is not None:
            self._over.append((call, self._error))
            return
        if not self._calls:
            self._first_deadline = math.inf
        self._calls[call] = None
        if call.deadline < self._first_deadline:
            self._first_deadline = call.deadline
            if self._waiting or self._drives:
                self._wake()
        if call.is_send:
            if self._carriers[call.peer].has_left(call.peer):
                self._finish(call, call.departed_error({call.peer}))
            else:
                self._sends.setdefault(call.peer, deque()).append(call)
                self._put(call.peer)
        elif (message := self.matching.receive(call)) is not None:
            self._assign(message, call)
        else:
            self._advance_carriers(blocked=False)

    def _advance(self, blocked: bool) -> bool:
        moved = False
        while self._notes:
            self._notes.popleft()()
            moved = True
        if self._error is None and self.state.error is not None:
            self._fail(self.state.error)
        if self._error is not None:
            return moved
        for to in tuple(self._sends):
            moved |= self._put(to)
        return self._advance_carriers(blocked) or moved or self._end_hopeless()

    def _advance_carriers(self, blocked: bool) -> bool:
        empties, moved = blocked or bool(self._sends), False
        for carrier in self._each_carrier:
            moved |= carrier.advance(empties)
        return moved

    def _put(self, to: int) -> bool:
        """Let the carrier take a piece of the first send to a rank."""
        queue = self._sends.get(to)
        if queue is None or self._error is not None:
            return False
        call, carrier = queue[0], self._carriers[to]
        try:
            if not carrier.put(call):
                return False
        except MemoryError as error:  # the runtime's memory ends with it
            self._finish(call, self.state.error or error)
            return True
        if call.sent == call.values.size:
            self._unqueue(call)
            if carrier.is_over_when_put:
                self._finish(call)
        return True

    def _unqueue(self, call: Transfer) -> None:
        queue = self._sends.get(call.peer)
        if queue and call in queue:
            queue.remove(call)
            if not queue:
                del self._sends[call.peer]

    def _assign(self, message: P2PMessage, call: Transfer) -> None:
        """Give a message to a receive: what has come of it, and the rest."""
        call.source = message.source
        carrier = self._carriers[message.source]
        if message.total != call.values.size:
            self._finish(call, call.other_size_error(message))
            carrier.discard(message)
            return
        message.receive, call.message = call, message
        if message.has_come:
            self.came(message)
        else:
            carrier.fetch(message, call)

    def _end_hopeless(self) -> bool:
        """Let calls fail that are overdue, or need ranks that have left; return whether there were some."""
        now, before = time.monotonic(), len(self._calls)
        if now >= self._first_deadline:
            for call in tuple(self._calls):
                if call.deadline <= now and call in self._calls:
                    error = call.overdue_error(self.matching.messages())
                    self._fail(error) if call.begun else self._finish(call, error)
            self._first_deadline = min((call.deadline for call in self._calls), default=math.inf)
        left = {rank for rank in self.members.others if self._carriers[rank].has_left(rank)}
        for call in tuple(self._calls) if left else ():
            peers = call.peers()
            if left.issuperset(peers) and not (
                    self._carriers[call.peer].may_arrive(call) if call.is_send
                    else call.begun or any(self._carriers[peer].has_more(peer) for peer in peers)):
                self._finish(call, call.departed_error(peers))
        return len(self._calls) < before

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        for call in tuple(self._calls):
            self._finish(call, self._error)

    def _finish(self, call: Transfer, error: Exception | None = None) -> None:
        del self._calls[call]
        if error is not None and call.is_send:
            self._unqueue(call)
        elif error is not None:
            self.matching.withdraw(call)
            if call.message is not None:
                call.message.receive = None
                self._carriers[call.source].discard(call.message)
        self._over.append((call, error))
        if len(self._waiting) + self._drives > self._sleepers:
            self._wake()  # another thread may wait for this call

    # --- for carriers ----------------------------------------------------------------------------------------------------

    def note(self, note: Callable[[], None], *, is_urgent: bool = False) -> None:
        """Let a function be called with the lock: soon if a call is under way, or if it is urgent. Takes no lock."""
        if self._is_closed:
            return
        self._notes.append(note)
        self._wake()
        if (self._calls or is_urgent) and not self._waiting:
            self.let_work()

    def arrives(self, message: P2PMessage, *, is_kept: bool) -> bool:
        """Give a new message to a receive that fits, or keep it for one; return False if it is to stay where it is.

        Args:
            is_kept: whether to keep it if no receive fits. It is kept anyway if a receive may want one behind it.
        """
        receive = self.matching.arrive(message.source, message.tag)
        if receive is not None:
            self._assign(message, receive)
        elif is_kept or self.matching.wants(message.source):
            message.is_kept = True
            self.matching.keep(message)
        else:
            return False
        return True

    def came(self, message: P2PMessage, error: Exception | None = None) -> None:
        """All bytes of a message are where it wants them, or will never be. Again is fine: the first time counts."""
        message.has_come = message.has_come or error is None
        call, message.receive = message.receive, None
        if call is not None:
            if message.has_come and message.target is not call.values:
                call.values[...] = message.target
            self._finish(call, None if message.has_come else error)

    def sent(self, call: Transfer, error: Exception | None) -> None:
        """A message has been received. Again is fine."""
        if call in self._calls:
            self._finish(call, error)
