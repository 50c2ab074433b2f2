"""Sends and receives between ranks of an ordered group on several hosts, as negotiated transfers of the group's runtime.

The sender announces each message to the receiver: its number, tag and length. The receiver finds the receive that gets it
(`ordered/matching.py`). Then both request the same transfer, whose name has the message's number. So a receive may name any
source, and ranks may make calls in any order. A send is over when its message has been received. It may wait for that, as
with Gloo.

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
from typing import Final, NamedTuple, Protocol

import numpy as np

from hvdlite.core.array import Array
from hvdlite.ordered.guarded_transfers import GuardedTransfers
from hvdlite.ordered.matching import ANY, Matching
from hvdlite.ordered.transfers import Receive, Send, Transfer

_ANNOUNCEMENT: Final = struct.Struct("!qqq")
_LEFT: Final = b""
"""Announces that the rank has left the group."""

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


class Message(NamedTuple):
    """A message that another rank has announced; `number` counts what it sends to this one."""

    source: int
    number: int
    tag: int
    total: int


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
        self._matching: Matching[Receive, Message] = Matching()
        self._left: set[int] = set()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: something has changed
        self._thread: threading.Thread | None = None
        self._is_closed = False
        link.hear(lambda source, text: self._events.put(functools.partial(self._heard, source, text)))

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
            with self._lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=f"hvdlite-transfers-{self._texts.group}", daemon=True)
                    thread.start()
                    self._thread = thread
        else:
            self._events.put(None)

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
        message = Message(self._rank, self._numbers[call.to], call.tag, call.values.size)
        call.begun = True
        self._link.announce((call.to,), _ANNOUNCEMENT.pack(*message[1:]))
        self._link.send(_name(message, call.to), call.values, call.to, self._done(call))

    def _begin_receive(self, call: Receive) -> None:
        message = self._matching.receive(call)
        if message is not None:
            self._assign(message, call)

    def _heard(self, source: int, text: bytes) -> None:
        """Take in an announcement."""
        if text == _LEFT:
            self._left.add(source)
            return
        message = Message(source, *_ANNOUNCEMENT.unpack(text))
        call = self._matching.arrive(source, message.tag)
        if call is None:
            self._matching.keep(message)
        else:
            self._assign(message, call)

    def _assign(self, message: Message, call: Receive) -> None:
        """Receive a message; if its length is another one, for nobody, so that its sender does not wait."""
        call.source, name = message.source, _name(message, self._rank)
        if message.total == call.values.size:
            call.begun = True
            self._link.receive(name, call.values, message.source, self._done(call))
        else:
            self._finish(call, self._texts.other_size(call, message))
            self._link.receive(name, np.empty(message.total, np.uint8), message.source, lambda error: None)

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


def _name(message: Message, to: int) -> str:
    return f"message {message.number} from rank {message.source} to rank {to} (tag {message.tag})"
