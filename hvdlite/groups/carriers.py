"""What carries the messages of a group (`groups/messages.py`): rings in the memory of a host, or transfers between hosts.

A carrier serves some of the other ranks. All of its methods are called with the lock of `Messages`.

Rings: a send copies its values into the ring to the receiver and is over when all of them are there. What does not fit waits
until the receiver has taken something out. A message that no receive fits stays in the ring. It is copied to private memory
if a receive may want one behind it, or if the ring is half full while a thread of this rank waits for others, or a send of
this rank is unfinished. So ranks that first send to each other, however much, never wait for each other
(docs/protocol.md#message-rings).

Between hosts: the sender announces each message to the receiver: its number, tag and length. The receiver finds the receive
that gets it. Then both request the same transfer of the group's runtime, whose name has the message's number. So a receive
may name any source, and ranks may make calls in any order. A send is over when its message has been received. It may wait
for that, as with Gloo. A rank that leaves does not wait for other scripts: it lets the receivers *take* its messages, into
their own memory, where later receives find them.
"""

from __future__ import annotations

import functools
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from hvdlite.core.array import Array
from hvdlite.groups.link import Done, GroupLink
from hvdlite.groups.matching import P2PMessage
from hvdlite.memory.area import UNUSED, Area
from hvdlite.memory.rings import Piece, RingReader, Rings

if TYPE_CHECKING:
    from hvdlite.groups.messages import Messages
    from hvdlite.groups.transfer import Transfer

ARRIVE_SECONDS: Final = 1.0
"""How long after its receiver has left a send may be reported as received: both are announced at the same time."""
_ANNOUNCEMENT: Final = struct.Struct("!qqq")
_LEFT: Final = b""
"""Announces that the rank has left the group."""
_TAKE: Final = struct.Struct("!q")
"""Lets the receiver take the message with this number, if no receive has got it."""

Subject = TypeVar("Subject")


class Carrier:
    """Carries messages between this rank and some others.

    Attributes:
        is_over_when_put: whether a send is over when all of it is put; otherwise `Messages.sent` is called.
        is_short: whether there may be room for a send without a notification.
        keeps_looking: see `Messages`.
    """

    is_over_when_put = False
    is_short = keeps_looking = False

    def open(self, messages: Messages) -> None:
        """Begin to carry the messages of one rank; called once, before anything else."""
        self._messages = messages

    def put(self, call: Transfer) -> bool:
        """Take a piece of a send, the first one to its receiver; return False if there is no room now.

        Raises:
            MemoryError: if there will be none.
        """
        raise NotImplementedError

    def advance(self, empties: bool) -> bool:
        """Take what has come, at most a piece from each rank; return whether there was something.

        Args:
            empties: whether ranks that could not send much more are to be relieved of messages that nobody receives.
        """
        return False

    def fetch(self, message: P2PMessage, call: Transfer) -> None:
        """A receive gets a message that has not come completely."""
        raise NotImplementedError

    def discard(self, message: P2PMessage) -> None:
        """Nobody gets a message that has not come completely. Its sender does not wait for that."""
        raise NotImplementedError

    def hasten(self, call: Transfer) -> None:
        """This rank is to leave: let the receiver take a message, even if nobody receives it there."""

    def has_left(self, rank: int) -> bool:
        """Return whether a rank sends and receives nothing any more."""
        raise NotImplementedError

    def has_more(self, rank: int) -> bool:
        """Return whether something has come from a rank that `advance` has not taken; ask for `has_left` before."""
        return False

    def may_arrive(self, call: Transfer) -> bool:
        """Return whether a send to a rank that has left may yet end: it was received, but that is not announced yet."""
        return False

    def leave(self) -> None:
        """This rank sends and receives nothing any more."""

    def close(self) -> None:
        """Free what this object owns; nothing is called any more."""
        raise NotImplementedError


class RingCarrier(Carrier):
    """Between ranks of a host.

    Args:
        area: has this rank's line, and those of `peers`. When `close` is called, this rank's line has `LEFT`.
        peers: the index in the area (and of `rings`) of each rank that is served.
    """

    is_over_when_put = True

    def __init__(self, rings: Rings, area: Area, peers: Mapping[int, int]) -> None:
        self._rings, self._area, self._peers = rings, area, dict(peers)
        self._readers: dict[int, RingReader] = {}
        self._arriving: dict[int, P2PMessage] = {}  # by source

    def put(self, call: Transfer) -> bool:
        local = self._peers[call.peer]
        writer = self._rings.writer(local)
        count = writer.append(call.tag, call.values.size, call.values[call.sent:])
        if count < 0:
            self.is_short = self.is_short or writer.is_short
            return False
        self.is_short, call.begun = False, True
        call.sent += count
        self._area.wake((local,))
        return True

    def advance(self, empties: bool) -> bool:
        moved = False
        for source, local in self._peers.items():
            reader = self._readers.get(source) or self._new_reader(source, local)
            piece = None if reader is None else reader.peek()
            if reader is not None and piece is not None and self._take(source, reader, piece, empties):
                moved = True
                if reader.advance(piece):
                    self._area.wake((local,))
        return moved

    def _new_reader(self, source: int, local: int) -> RingReader | None:
        reader = self._rings.reader(local)
        if reader is not None:
            self._readers[source] = reader
        return reader

    def _take(self, source: int, reader: RingReader, piece: Piece, empties: bool) -> bool:
        """Copy a piece to its place; return False if it is to stay in the ring."""
        message = self._arriving.pop(source, None)
        if message is None:
            message = P2PMessage(source, piece.tag, piece.total)
            if not self._messages.arrives(message, is_kept=empties and reader.is_half_full):
                return False
            if message.is_kept:
                message.target = np.empty(message.total, np.uint8)
        end = message.filled + piece.values.size
        if message.target is not None and end > message.filled:
            message.target[message.filled:end] = piece.values
        message.filled = end
        if end < message.total:
            self._arriving[source] = message
        else:
            self._messages.came(message)
        return True

    def fetch(self, message: P2PMessage, call: Transfer) -> None:
        if message.target is not None:
            call.values[:message.filled] = message.target[:message.filled]
        message.target = call.values

    def discard(self, message: P2PMessage) -> None:
        message.target = None

    def has_left(self, rank: int) -> bool:
        return self._area.has_left(self._peers[rank])

    def has_more(self, rank: int) -> bool:
        reader = self._readers.get(rank) or self._new_reader(rank, self._peers[rank])
        return reader is not None and reader.used > 0

    def close(self) -> None:
        self._readers.clear()
        area, rings = self._area, self._rings.close(self._area.has_left)
        if rings:
            self.keeps_looking = True
            self._rings.heap.lend(rings, area.all_let_go(UNUSED), area.end_looking())


class RemoteCarrier(Carrier):
    """Between ranks of several hosts.

    Args:
        link: owned by this object.
        peers: the ranks that are served.
    """

    def __init__(self, link: GroupLink, peers: Sequence[int]) -> None:
        self._link, self._peers = link, tuple(peers)
        self._numbers: Counter[int] = Counter()  # of messages to each rank
        self._left: dict[int, float] = {}  # when that was announced

    def open(self, messages: Messages) -> None:
        super().open(messages)
        self._link.listen(self._listen)

    def put(self, call: Transfer) -> bool:
        """See `Carrier`. The runtime takes the whole message, and nobody can stop it."""
        self._numbers[call.peer] += 1
        call.number, call.begun, call.sent = self._numbers[call.peer], True, call.values.size
        self._link.announce((call.peer,), _ANNOUNCEMENT.pack(call.number, call.tag, call.values.size))
        self._link.send(_name(self._messages.rank, call.number, call.peer, call.tag), call.values, call.peer,
                        self._noted(self._messages.sent, call))
        return True

    def fetch(self, message: P2PMessage, call: Transfer) -> None:
        call.begun = True
        if message.target is None:
            message.target = call.values
            self._receive(message, message.target)

    def discard(self, message: P2PMessage) -> None:
        if message.target is None:
            self._receive(message, np.empty(message.total, np.uint8))

    def hasten(self, call: Transfer) -> None:
        self._link.announce((call.peer,), _TAKE.pack(call.number))

    def has_left(self, rank: int) -> bool:
        return rank in self._left

    def may_arrive(self, call: Transfer) -> bool:
        return call.begun and time.monotonic() < self._left[call.peer] + ARRIVE_SECONDS

    def leave(self) -> None:
        self._link.announce(self._peers, _LEFT)

    def close(self) -> None:
        self._link.close()

    def _listen(self, source: int, text: bytes) -> None:
        """Note an announcement; called by the background thread."""
        self._messages.note(functools.partial(self._received, source, text), is_urgent=len(text) == _TAKE.size)

    def _received(self, source: int, text: bytes) -> None:
        if text == _LEFT:
            self._left[source] = time.monotonic()
        elif len(text) == _TAKE.size:
            self._take(source, *_TAKE.unpack(text))
        else:
            number, tag, total = _ANNOUNCEMENT.unpack(text)
            self._messages.arrives(P2PMessage(source, tag, total, number), is_kept=True)

    def _take(self, source: int, number: int) -> None:
        """Receive a message of a rank that leaves, before a receive gets it."""
        for message in self._messages.matching.messages():
            if (message.source, message.number) == (source, number) and message.target is None:
                try:
                    message.target = np.empty(message.total, np.uint8)
                except MemoryError:
                    return  # the sender waits for a receive, as before
                self._receive(message, message.target)
                return

    def _receive(self, message: P2PMessage, values: Array) -> None:
        self._link.receive(_name(message.source, message.number, self._messages.rank, message.tag), values, message.source,
                           self._noted(self._messages.came, message))

    def _noted(self, notify: Callable[[Subject, Exception | None], None], subject: Subject) -> Done:
        return lambda error: self._messages.note(functools.partial(notify, subject, error))


def _name(source: int, number: int, to: int, tag: int) -> str:
    return f"message {number} from rank {source} to rank {to} (tag {tag})"
