"""Sends and receives between two ranks of an ordered group, through rings in the shared memory of their host.

A send copies its values into the ring to the receiver and is over when all of them are there. What does not fit waits in a
queue until the receiver has taken something out. A receive gets the first message that fits (`ordered/matching.py`), which
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

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import (
    ForkedProcessError,
    HorovodInternalError,
    MismatchError,
    OperationTimeoutError,
    PeerLeftError,
)
from hvdlite.memory.message_area import MessageArea, Piece, RingReader
from hvdlite.ordered.board import names
from hvdlite.ordered.call import Call
from hvdlite.ordered.matching import ANY, Matching

T = TypeVar("T")

_log = logging.getLogger("hvdlite")

LINGER_SECONDS: Final = 0.005
"""How long a call is left to the threads that may come and wait for it."""
IDLE_ROUNDS: Final = 200
"""After so many times without a call the thread of the group ends."""
SLEEP_SECONDS: Final = 1.0
"""The longest sleep."""
SHORT_SECONDS: Final = 0.01
"""The longest sleep of a rank that lacks memory."""


class Transfer(Call):
    """A send or a receive. A thread that waits for it helps to carry it out.

    Attributes:
        values: bytes to be sent, or where those received belong.
        tag: of the message.
        peer: the other rank, or `ANY`.
        deadline: in `time.monotonic()`; after it the call fails.
    """

    peer: int

    def __init__(self, owner: Transfers, values: Array, tag: int, timeout: float) -> None:
        super().__init__((), timeout=timeout)
        self.values, self.tag = values, tag
        self.deadline = time.monotonic() + timeout
        self._owner = owner

    @property
    def is_over(self) -> bool:
        """Like `is_done`, without doing anything for it."""
        return self._done.is_set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set() or self._owner.poll(self)

    def wait(self, timeout: float | None = None) -> bool:
        return self._done.is_set() or self._owner.wait(self, timeout)

    def wait_idly(self, timeout: float | None) -> bool:
        """Wait while another thread carries it out."""
        return self._done.wait(timeout)


class Send(Transfer):
    """A message to `to`, of which the first `sent` bytes are in the ring; `begun` if anything of it is."""

    def __init__(self, owner: Transfers, values: Array, to: int, tag: int, timeout: float) -> None:
        super().__init__(owner, values, tag, timeout)
        self.to = self.peer = to
        self.sent, self.begun = 0, False


class Receive(Transfer):
    """A message from the rank `wanted`, or from `ANY`."""

    def __init__(self, owner: Transfers, values: Array, wanted: int, tag: int, timeout: float) -> None:
        super().__init__(owner, values, tag, timeout)
        self.wanted = self.peer = wanted


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


class Transfers:
    """One rank's sends and receives. Callable from any thread.

    Args:
        area: of the ranks of the group; owned by this object.
        group: its name, for messages.
        members: the name of each rank, likewise.
    """

    def __init__(self, area: MessageArea, group: str, members: Sequence[str] = ()) -> None:
        self._area, self._group, self._process = area, group, os.getpid()
        self._members = tuple(members) or tuple(map(str, range(area.ranks)))
        self._others = [rank for rank in range(area.ranks) if rank != area.index]
        self._lock = threading.Lock()  # guards the rest
        self._error: Exception | None = None
        self._calls: dict[Transfer, None] = {}  # under way, oldest first
        self._sends: dict[int, deque[Send]] = {}  # by receiver; not empty
        self._matching: Matching[Receive, Message] = Matching()
        self._messages: dict[int, Message] = {}  # by source: the one that is arriving
        self._readers: dict[int, RingReader] = {}
        self._over: deque[tuple[Transfer, Exception | None]] = deque()  # to be ended without the lock
        self._waiters: dict[object, bool] = {}  # a key for each thread in `wait`, and whether it carries calls out
        self._thread: threading.Thread | None = None
        self._thread_drives = False
        self._stopped = threading.Event()

    def send(self, values: Array, to: int, tag: int, timeout: float = math.inf) -> Call:
        """See `OrderedGroup.send`.

        Args:
            timeout: seconds after which the call fails.

        Raises:
            ValueError: if `to` is this rank, or none of the group's.
        """
        self._check_peer("send to", to)
        call = Send(self, values, to, tag, timeout)

        def begin() -> None:
            if self._area.has_left(to):
                self._finish(call, self._departed(call, {to}))
            else:
                self._sends.setdefault(to, deque()).append(call)

        self._start(call, begin)
        while self._guarded(lambda: call in self._calls and self._send_piece(to)):
            pass
        self._watch(call)
        return call

    def receive(self, values: Array, source: int | None, tag: int, timeout: float = math.inf) -> Call:
        """See `OrderedGroup.receive`. A message of another length is lost: the call fails, and the next one gets the next.

        Args:
            timeout: seconds after which the call fails.

        Raises:
            ValueError: if `source` is this rank, or none of the group's.
        """
        if source is not None:
            self._check_peer("receive from", source)
        call = Receive(self, values, ANY if source is None else source, tag, timeout)

        def begin() -> None:
            message = self._matching.receive(call)
            if message is not None:
                self._assign(message, call)
            else:
                self._take_pieces()

        self._start(call, begin)
        self._watch(call)
        return call

    def pending(self) -> list[str]:
        """Return descriptions of the calls under way, the oldest first."""
        with self._lock:
            return [self._shown(call) for call in self._calls]

    def fail(self, error: Exception) -> None:
        """Let all calls under way and all later ones fail."""
        with self._lock:
            self._fail(error)
        self._end_finished()

    def close(self) -> None:
        """Leave the group: calls under way fail, on this rank and on those that wait for it. Idempotent.

        Messages that have been sent completely can still be received. In a forked child, do nothing.
        """
        if os.getpid() != self._process or self._stopped.is_set():
            return
        self._stopped.set()
        self.fail(HorovodInternalError(f"{self._group} was destroyed on this rank before the call was complete"))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._lock:
            self._area.close()
            self._readers.clear()

    def close_in_child(self) -> None:
        """In a forked child: close the descriptors of the area."""
        self._readers.clear()
        self._area.unmap()

    # --- waiting ---------------------------------------------------------------------------------------------------------

    def poll(self, call: Transfer) -> bool:
        """Do what can be done at once; return whether the call is over."""
        self._guarded(self._advance)
        return call.is_over

    def wait(self, call: Transfer, timeout: float | None) -> bool:
        """See `Call.wait`."""
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

    def _watch(self, call: Transfer) -> None:
        """Let the thread of the group carry a call out, if no thread waits for it."""
        if call in self._calls and self._thread is None:
            with self._lock:
                if call in self._calls and self._thread is None:
                    thread = threading.Thread(target=self._run, name=f"hvdlite-transfers-{self._group}", daemon=True)
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

    def _guarded(self, act: Callable[[], T]) -> T | None:
        """Call a function with the lock, and end the calls that it has finished."""
        try:
            with self._lock:
                return act()
        except Exception as error:
            self.fail(error)
        except BaseException:  # between any two lines
            self.fail(HorovodInternalError(
                f"{self._group} cannot be used any more: a thread was interrupted in a send or receive"))
            raise
        finally:
            self._end_finished()
        return None

    def _end_finished(self) -> None:
        while True:
            try:
                call, error = self._over.popleft()
            except IndexError:
                return
            try:
                call.end(error)
            except Exception:
                _log.exception("%s: a callback of the %s failed", self._group, self._shown(call))

    def _start(self, call: Transfer, begin: Callable[[], None]) -> None:
        def start() -> None:
            self._calls[call] = None
            if self._error is not None:
                self._finish(call, self._error)
                return
            begin()

        if os.getpid() == self._process:
            self._guarded(start)
        else:  # the lock may be held for ever
            call.end(ForkedProcessError(
                f"{self._group}: this process (pid {os.getpid()}) was forked from rank {self._area.index} (pid "
                f"{self._process}), to which the group belongs; start workers with the spawn method"))

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
            self._finish(call, MismatchError(
                f"{self._group}: the {self._shown(call)} gets a message of {message.total} bytes from "
                f"{self._named([message.source])}: the tensors sent and received must have the same number of bytes"))
            return
        if message.target is not None:
            call.values[:message.filled] = message.target[:message.filled]
        message.target, message.receive = call.values, call
        if message.has_arrived:
            self._finish(call)

    def _check(self) -> bool:
        """Let calls fail that are overdue, or wait for a rank that has left; return whether there were some."""
        now, failed = time.monotonic(), False
        for call in tuple(self._calls):
            if call.deadline > now:
                break
            failed |= self._give_up(call, OperationTimeoutError(
                f"{self._group}: the {self._shown(call)} has not ended within {call.timeout or 0.0:g} s: "
                f"{self._missing(call)}",
                () if call.peer == ANY else (call.peer,)))
        left = {rank for rank in self._others if self._area.has_left(rank)}
        for call in tuple(self._calls) if left else ():
            peers = set(self._others) if call.peer == ANY else {call.peer}
            if peers <= left and not (isinstance(call, Receive) and any(map(self._has_more, peers))):
                failed |= self._give_up(call, self._departed(call, peers))
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
        self._error = self._error or error
        for call in tuple(self._calls):
            self._finish(call, self._error)
        self._area.wake(self._area.index)

    def _finish(self, call: Transfer, error: Exception | None = None) -> None:
        del self._calls[call]
        if isinstance(call, Send) and call.to in self._sends:
            self._sends[call.to].remove(call)
            if not self._sends[call.to]:
                del self._sends[call.to]
        self._over.append((call, error))
        if len(self._waiters) + self._thread_drives > 1:
            self._area.wake(self._area.index)  # another thread may wait for this call

    # --- errors ----------------------------------------------------------------------------------------------------------

    def _check_peer(self, verb: str, rank: int) -> None:
        if rank not in self._others:
            raise ValueError(f"rank {self._area.index} of {self._group} cannot {verb} rank {rank}: the group has ranks 0 to "
                             f"{self._area.ranks - 1}, and a rank exchanges messages with other ranks only")

    def _named(self, ranks: Iterable[int]) -> str:
        return names(sorted(ranks), self._members)

    def _shown(self, call: Transfer) -> str:
        here, tag = self._named([self._area.index]), f"tag {call.tag}, {call.values.size} bytes"
        if isinstance(call, Send):
            return f"send from {here} to {self._named([call.to])} ({tag})"
        return f"receive on {here} from {'any rank' if call.peer == ANY else self._named([call.peer])} ({tag})"

    def _departed(self, call: Transfer, peers: set[int]) -> PeerLeftError:
        return PeerLeftError(f"{self._group}: the {self._shown(call)} needs {self._named(peers)}, which left the group (its "
                             "process ended, or destroyed the group)", min(peers))

    def _missing(self, call: Transfer) -> str:
        if isinstance(call, Send):
            return f"{self._named([call.to])} does not receive it"
        kept = "; ".join(f"{message.total} bytes from {self._named([message.source])} with tag {message.tag}"
                         for message in self._matching.messages())
        return "no such message has come" + (f", but others that nobody receives: {kept}" if kept else "")
