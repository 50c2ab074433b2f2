"""Sends and receives between ranks of an ordered group on several hosts, as negotiated transfers of the group's runtime.

The sender announces each message to the receiver: its number, tag and length. The receiver finds the receive that gets it
(`groups/matching.py`). Then both request the same transfer, whose name has the message's number. So a receive may name any
source, and ranks may make calls in any order. A send is over when its message has been received. It may wait for that, as
with Gloo. A rank that leaves does not wait for other scripts: it lets the receivers *take* its messages, into their own
memory, where later receives find them.

A thread of the group handles what the runtime says (an announcement, the end of a transfer), because callbacks of calls may
wait for the runtime.
"""

from __future__ import annotations

import functools
import math
import os
import queue
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from hvdlite.core.array import Array
from hvdlite.groups.guarded_transfers import GuardedTransfers
from hvdlite.groups.matching import ANY, Matching
from hvdlite.groups.transfers import Receive, Send, Transfer

_ANNOUNCEMENT: Final = struct.Struct("!qqq")
_LEFT: Final = b""
"""Announces that the rank has left the group."""
_TAKE: Final = struct.Struct("!q")
"""Lets the receiver take the message with this number, if no receive has got it."""

Done = Callable[[Exception | None], None]
"""Called by the background thread when a transfer is over, with its error."""


class Link(Protocol):
    """What carries messages between the ranks. Callable from any thread; its ranks are those of the group."""

    def announce(self, to: Sequence[int], text: bytes) -> None:
        """Send a few bytes to other ranks; those of one rank arrive in order."""

    def hear(self, hear: Callable[[int, bytes], None]) -> None:
        """Let a function be called with the sender and text of each announcement, those included that have come before."""

    def send(self, name: str, values: Array, to: int, done: Done) -> None:
        """Begin to send values to a rank, which receives as many under the same name."""

    def receive(self, name: str, values: Array, source: int, done: Done) -> None:
        """Begin to receive them."""

    def close(self) -> None:
        """Hear nothing any more."""


class Message:
    """A message that another rank has announced; `number` counts what it sends to this one.

    Attributes:
        taken: its values, if it was taken before a receive got it.
        has_arrived: whether they are there.
        receive: the call that gets them then.
    """

    def __init__(self, source: int, number: int, tag: int, total: int) -> None:
        self.source, self.number, self.tag, self.total = source, number, tag, total
        self.taken: Array | None = None
        self.has_arrived = False
        self.receive: Receive | None = None


class NegotiatedTransfers(GuardedTransfers):
    """Implements `Transfers`.

    Args:
        link: owned by this object.
        group: its name, for messages.
        members: the name of each rank, likewise.
    """

    def __init__(self, link: Link, group: str, rank: int, size: int, members: Sequence[str] = ()) -> None:
        super().__init__(group, rank, size, members)
        self._link = link
        self._numbers: Counter[int] = Counter()  # of messages to each rank
        self._announced: dict[Transfer, int] = {}  # sends under way, and the numbers of their messages
        self._matching: Matching[Receive, Message] = Matching()
        self._left: set[int] = set()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: something has changed
        self._thread: threading.Thread | None = None
        self._is_closed = False
        link.hear(self._listen)

    def flush(self, until: float) -> None:
        with self._lock:
            asked = [(call.peer, number) for call, number in self._announced.items()]
        for to, number in asked:
            self._link.announce((to,), _TAKE.pack(number))
        super().flush(until)

    def close(self) -> None:
        if os.getpid() != self._process or self._is_closed:
            return
        self._is_closed = True
        self._guarded(lambda: self._link.announce(self._others, _LEFT))
        self.fail(self._destroyed())
        self._link.close()
        self._events.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def close_in_child(self) -> None:
        pass  # it has no descriptors

    def poll(self, call: Transfer) -> bool:
        """See `Owner`."""
        return call.is_over

    def wait(self, call: Transfer, timeout: float | None) -> bool:
        """See `Owner`."""
        if threading.current_thread() is not self._thread:
            return call.wait_idly(timeout)
        limit = math.inf if timeout is None else time.monotonic() + timeout  # in a callback
        while not call.is_over and time.monotonic() < limit:
            self._handle_event(limit)
        return call.is_over

    # --- the thread of the group -----------------------------------------------------------------------------------------

    def _go_on(self, call: Transfer) -> None:
        if self._thread is None and self._calls:
            self._start_thread()
        else:
            self._events.put(None)

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._run, name=f"hvdlite-transfers-{self._texts.group}", daemon=True)
                thread.start()
                self._thread = thread

    def _listen(self, source: int, text: bytes) -> None:
        """Let the thread handle an announcement; called by the background thread."""
        self._events.put(functools.partial(self._heard, source, text))
        if len(text) == _TAKE.size and self._thread is None:  # else it may wait for this rank's first call
            self._start_thread()

    def _run(self) -> None:
        while not self._is_closed:
            self._handle_event(math.inf)

    def _handle_event(self, limit: float) -> None:
        """Wait for an event, the time at which a call fails, or `limit`, and see to it."""
        first = next(iter(tuple(self._calls)), None)
        until = limit if first is None else min(limit, first.deadline)
        try:
            event = self._events.get(timeout=None if until == math.inf else max(0.0, until - time.monotonic()))
        except queue.Empty:
            event = None
        if event is not None:
            self._guarded(event)
        self._guarded(self._check)

    def _done(self, call: Transfer) -> Done:
        def done(error: Exception | None) -> None:
            self._events.put(lambda: self._finish(call, error) if call in self._calls else None)

        return done

    # --- with the lock ---------------------------------------------------------------------------------------------------

    def _begin_send(self, call: Send) -> None:
        if call.to in self._left:
            self._finish(call, self._texts.departed(call, {call.to}))
            return
        self._numbers[call.to] += 1
        number = self._announced[call] = self._numbers[call.to]
        call.begun = True
        self._link.announce((call.to,), _ANNOUNCEMENT.pack(number, call.tag, call.values.size))
        self._link.send(_name(self._rank, number, call.to, call.tag), call.values, call.to, self._done(call))

    def _begin_receive(self, call: Receive) -> None:
        message = self._matching.receive(call)
        if message is not None:
            self._assign(message, call)

    def _heard(self, source: int, text: bytes) -> None:
        """Take in an announcement."""
        if text == _LEFT:
            self._left.add(source)
            return
        if len(text) == _TAKE.size:
            self._take(source, *_TAKE.unpack(text))
            return
        message = Message(source, *_ANNOUNCEMENT.unpack(text))
        call = self._matching.arrive(source, message.tag)
        if call is None:
            self._matching.keep(message)
        else:
            self._assign(message, call)

    def _assign(self, message: Message, call: Receive) -> None:
        """Receive a message; if its length is another one, for nobody, so that its sender does not wait."""
        call.source = message.source
        fits = message.total == call.values.size
        if not fits:
            self._finish(call, self._texts.other_size(call, message))
        if message.taken is not None:
            if fits:
                call.begun, message.receive = True, call
                self._deliver(message)
        elif fits:
            call.begun = True
            self._receive(message, call.values, self._done(call))
        else:
            self._receive(message, np.empty(message.total, np.uint8), lambda error: None)

    def _take(self, source: int, number: int) -> None:
        """Receive a message of a rank that leaves, before a receive gets it."""
        message = next((each for each in self._matching.messages() if (each.source, each.number) == (source, number)), None)
        if message is None or message.taken is not None:
            return
        try:
            message.taken = np.empty(message.total, np.uint8)
        except MemoryError:
            return  # the sender waits for a receive, as before
        self._receive(message, message.taken, lambda error: self._events.put(functools.partial(self._taken, message, error)))

    def _taken(self, message: Message, error: Exception | None) -> None:
        if error is None:
            message.has_arrived = True
        elif message.receive in self._calls and not message.has_arrived:
            self._finish(message.receive, error)
        self._deliver(message)

    def _deliver(self, message: Message) -> None:
        """Give a message that has been taken to the receive that gets it, once both are there."""
        call = message.receive
        if call in self._calls and message.has_arrived and message.taken is not None:
            call.values[...] = message.taken
            self._finish(call)

    def _receive(self, message: Message, values: Array, done: Done) -> None:
        self._link.receive(_name(message.source, message.number, self._rank, message.tag), values, message.source, done)

    def _finish(self, call: Transfer, error: Exception | None = None) -> None:
        super()._finish(call, error)
        self._announced.pop(call, None)

    def _check(self) -> None:
        """Let calls fail that are overdue, or wait for a rank that has left."""
        now = time.monotonic()
        for call in tuple(self._calls):
            if call.deadline > now:
                break
            if call in self._calls:
                self._give_up(call, self._texts.overdue(call, self._matching.messages()))
        for call in tuple(self._calls) if self._left else ():
            peers = set(self._others) if call.peer == ANY else {call.peer}
            if peers <= self._left and (isinstance(call, Send) or not call.begun):
                self._matching.withdraw(call) if isinstance(call, Receive) else None
                self._finish(call, self._texts.departed(call, peers))

    def _give_up(self, call: Transfer, error: Exception) -> None:
        if call.begun:
            self._fail(error)  # the runtime goes on with the transfer, and a later call must not meet it
        elif isinstance(call, Receive):
            self._matching.withdraw(call)
            self._finish(call, error)


def _name(source: int, number: int, to: int, tag: int) -> str:
    return f"message {number} from rank {source} to rank {to} (tag {tag})"
