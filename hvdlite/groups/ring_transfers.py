"""Sends and receives between two ranks of an ordered group, through rings in the shared memory of their host.

A send copies its values into the ring to the receiver and is over when all of them are there. What does not fit waits in a
queue until the receiver has taken something out. A receive gets the first message that fits (`groups/matching.py`), which
is copied straight to where it belongs.

The thread that waits for a call carries out all calls under way meanwhile. If no thread waits, a thread of the group takes
over after `LINGER_SECONDS`; it ends when there has been nothing to do for a while.

Rules (docs/protocol.md#message-rings)
- A message that no receive fits stays in the ring. It is copied to private memory if a receive may want one behind it, or if
  the ring is half full while a thread of this rank is blocked here, or a send of this rank is unfinished. So ranks that
  first send to each other, however much, never wait for each other.
- One lock guards everything. It is held while at most one piece per ring is copied, and never while a thread sleeps.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from hvdlite.core.array import Array
from hvdlite.groups.guarded_transfers import GuardedTransfers
from hvdlite.groups.matching import ANY, Matching
from hvdlite.groups.transfers import Receive, Send, Transfer
from hvdlite.memory.message_area import MessageArea, Piece, RingReader

LINGER_SECONDS: Final = 0.005
"""How long a call is left to the threads that may come and wait for it."""
IDLE_ROUNDS: Final = 200
"""After so many times without a call the thread of the group ends."""
SLEEP_SECONDS: Final = 1.0
"""The longest sleep."""
SHORT_SECONDS: Final = 0.01
"""The longest sleep of a rank that lacks memory."""


class Message:
    """A message from the rank `source`.

    Attributes:
        filled: how many of its `total` bytes have come.
        has_arrived: whether all of its pieces have.
        target: where its bytes are put; None if nobody wants them any more.
        receive: the call that gets it; None before there is one, and if that has failed.
    """

    def __init__(self, source: int, piece: Piece) -> None:
        self.source, self.tag, self.total = source, piece.tag, piece.total
        self.filled, self.has_arrived = 0, False
        self.target: Array | None = None
        self.receive: Receive | None = None


class RingTransfers(GuardedTransfers):
    """Implements `Transfers`; all ranks of the group are on one host. `close` keeps messages that have been sent completely.

    Args:
        area: of the ranks of the group; owned by this object.
        group: its name, for messages.
        members: the name of each rank, likewise.
    """

    def __init__(self, area: MessageArea, group: str, members: Sequence[str] = ()) -> None:
        super().__init__(group, area.index, area.ranks, members)
        self._area = area
        self._sends: dict[int, deque[Send]] = {}  # by receiver; not empty
        self._matching: Matching[Receive, Message] = Matching()
        self._messages: dict[int, Message] = {}  # by source: the one that is arriving
        self._readers: dict[int, RingReader] = {}
        self._waiters: dict[object, bool] = {}  # a key for each thread in `wait`, and whether it carries calls out
        self._thread: threading.Thread | None = None
        self._thread_drives = False
        self._stopped = threading.Event()

    def close(self) -> None:
        if os.getpid() != self._process or self._stopped.is_set():
            return
        self._stopped.set()
        self.fail(self._destroyed())
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._lock:
            self._area.close()
            self._readers.clear()

    def close_in_child(self) -> None:
        self._readers.clear()
        self._area.unmap()

    # --- waiting ---------------------------------------------------------------------------------------------------------

    def poll(self, call: Transfer) -> bool:
        self._guarded(self._advance)
        return call.is_over

    def wait(self, call: Transfer, timeout: float | None) -> bool:
        limit = math.inf if timeout is None else time.monotonic() + timeout
        key = object()
        try:
            with self._lock:
                drives = self._waiters[key] = not self._thread_drives or threading.current_thread() is self._thread
                if not drives:
                    self._area.wake(self._area.index)  # a thread waits now: it looks at full rings
            while drives and call in self._calls:
                self._drive(call, limit)
                if call in self._calls and time.monotonic() >= limit:
                    return False
            return call.wait_idly(timeout)
        finally:
            self._waiters.pop(key, None)

    def _drive(self, call: Transfer | None, limit: float) -> None:
        """Do what can be done; if that is nothing, sleep until something happens, `call` is finished, or until `limit`."""
        seen = self._area.seen()
        if self._guarded(self._advance) or self._guarded(self._check):
            return
        with self._lock:
            if not self._calls or (call is not None and call not in self._calls):
                return
            now = time.monotonic()
            longest = SHORT_SECONDS if any(self._area.writer(to).is_short for to in self._sends) else SLEEP_SECONDS
            until = min(limit, next(iter(self._calls)).deadline, now + longest)
        self._area.sleep(seen, max(0.0, until - now))

    def _go_on(self, call: Transfer) -> None:
        if isinstance(call, Send):
            while self._guarded(lambda: call in self._calls and self._send_piece(call.to)):
                pass
        if call in self._calls and self._thread is None:
            with self._lock:
                if call in self._calls and self._thread is None:
                    thread = threading.Thread(target=self._run, name=f"hvdlite-transfers-{self._texts.group}", daemon=True)
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        """Carry out calls for which no thread waits. Runs on the thread of the group."""
        idle = 0
        while not self._stopped.wait(LINGER_SECONDS):
            with self._lock:
                idle = 0 if self._calls else idle + 1
                if idle > IDLE_ROUNDS:
                    self._thread = None
                    return
                self._thread_drives = bool(self._calls) and not any(self._waiters.values())
            while self._thread_drives:
                self._drive(None, math.inf)
                with self._lock:
                    self._thread_drives = bool(self._calls)

    # --- with the lock ---------------------------------------------------------------------------------------------------

    def _begin_send(self, call: Send) -> None:
        if self._area.has_left(call.to):
            self._finish(call, self._texts.departed(call, {call.to}))
        else:
            self._sends.setdefault(call.to, deque()).append(call)

    def _begin_receive(self, call: Receive) -> None:
        message = self._matching.receive(call)
        if message is not None:
            self._assign(message, call)
        else:
            self._take_pieces()

    def _advance(self) -> bool:
        """Copy at most a piece into or out of each ring; return whether there was one."""
        moved = False
        for to in tuple(self._sends):
            moved |= self._send_piece(to)
        return self._take_pieces() or moved

    def _send_piece(self, to: int) -> bool:
        if self._error is not None:
            return False
        call = self._sends[to][0]
        try:
            count = self._area.writer(to).append(call.tag, call.values.size, call.values[call.sent:])
        except MemoryError as error:
            self._finish(call, error)
            return True
        if count < 0:
            return False
        call.begun = True
        call.sent += count
        if call.sent == call.values.size:
            self._finish(call)
        self._area.wake(to)
        return True

    def _take_pieces(self) -> bool:
        moved = False
        if self._error is None:
            for source in self._others:
                reader = self._readers.get(source)
                if reader is None and self._area.has_written(source):
                    reader = self._readers[source] = self._area.reader(source)
                if reader is not None:
                    moved |= self._take_piece(source, reader)
        return moved

    def _take_piece(self, source: int, reader: RingReader) -> bool:
        piece = reader.peek()
        if piece is None:
            return False
        message = self._messages.get(source) or self._arrived(source, piece, reader)
        if message is None:
            return False
        end = message.filled + piece.values.size
        if message.target is not None and end > message.filled:
            message.target[message.filled:end] = piece.values
        message.filled = end
        if end < message.total:
            self._messages[source] = message
        else:
            message.has_arrived = True
            self._messages.pop(source, None)
            if message.receive is not None:
                self._finish(message.receive)
        if reader.advance(piece):
            self._area.wake(source)
        return True

    def _arrived(self, source: int, piece: Piece, reader: RingReader) -> Message | None:
        """Return the message that begins with a piece; None if it is to stay in the ring."""
        receive = self._matching.arrive(source, piece.tag)
        if receive is not None:
            message = Message(source, piece)
            self._assign(message, receive)
            return message
        if self._matching.wants(source) or (reader.is_half_full and (self._waiters or self._sends)):
            message = Message(source, piece)
            message.target = np.empty(message.total, np.uint8)
            self._matching.keep(message)
            return message
        return None

    def _assign(self, message: Message, call: Receive) -> None:
        """Give a message to a receive: what has arrived of it, and the rest."""
        call.source = message.source
        if message.total != call.values.size:
            message.target = None
            self._finish(call, self._texts.other_size(call, message))
            return
        if message.target is not None:
            call.values[:message.filled] = message.target[:message.filled]
        message.target, message.receive = call.values, call
        if message.has_arrived:
            self._finish(call)

    def _check(self) -> bool:
        """Let calls fail that are overdue, or wait for a rank that has left; return whether there were some."""
        if self._error is not None:
            return False
        now, failed = time.monotonic(), False
        for call in tuple(self._calls):
            if call.deadline > now:
                break
            failed |= self._give_up(call, self._texts.overdue(call, self._matching.messages()))
        left = {rank for rank in self._others if self._area.has_left(rank)}
        for call in tuple(self._calls) if left else ():
            peers = set(self._others) if call.peer == ANY else {call.peer}
            if peers <= left and not (isinstance(call, Receive) and any(map(self._has_more, peers))):
                failed |= self._give_up(call, self._texts.departed(call, peers))
        return failed

    def _has_more(self, source: int) -> bool:
        reader = self._readers.get(source)
        return self._area.has_written(source) if reader is None else reader.used > 0

    def _give_up(self, call: Transfer, error: Exception) -> bool:
        if call not in self._calls:
            return False
        if isinstance(call, Send) and call.begun:
            self._fail(error)  # the receiver would take the next message for the rest of this one
            return True
        if isinstance(call, Receive):
            self._matching.withdraw(call)
            for message in self._messages.values():
                if message.receive is call:
                    message.receive = message.target = None
        self._finish(call, error)
        return True

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._area.wake(self._area.index)

    def _finish(self, call: Transfer, error: Exception | None = None) -> None:
        super()._finish(call, error)
        if isinstance(call, Send) and call.to in self._sends:
            self._sends[call.to].remove(call)
            if not self._sends[call.to]:
                del self._sends[call.to]
        if len(self._waiters) + self._thread_drives > 1:
            self._area.wake(self._area.index)  # another thread may wait for this call
