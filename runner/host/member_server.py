"""The socket at which the members of an elastic job on one host speak with the authority, which is in the launcher.

The directory of the socket belongs to the user alone (mode 0700), and peers of other users are refused. Nothing here blocks:
the owner's selector waits for the connections, and each gets one read a turn. A member that sends something else than
messages, or too many, is not heard any more.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hvdlite.core.errors import ProtocolError
from hvdlite.core.file_limit import OUT_OF_DESCRIPTORS
from hvdlite.core.launch_contract import MEMBER_SOCKET
from hvdlite.core.sockets import check_same_user, short_socket_path
from hvdlite.membership.messages import Frames, MemberHello, MemberMessage, frame

STRANGERS: Final = 256
"""Connections that have not said which member they are; then the oldest one gives way."""
MOST_MESSAGES: Final = 1000
MOST_BYTES: Final = 1 << 21
"""What a member may send within a second; it has a few messages to send for each change of the world."""
_READ_BYTES: Final = 1 << 16
_LAST_READS: Final = 64  # of a socket that a stray process keeps filling


class MemberServer:
    """Listens in a job's directory until it is closed.

    Args:
        selector: its keys' `data` are functions to call when the descriptor is ready.
        directory: the job's directory on this host.
        heard: called with a member and the frame of its message, `MemberHello` included, and ""; or with an empty frame and
            what is wrong with what the member has sent.
    """

    def __init__(self, selector: selectors.BaseSelector, directory: str, heard: Callable[[int, bytes, str], None],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._selector, self._heard, self._clock = selector, heard, clock
        self._connections: dict[int, _Connection] = {}  # by member
        self._strangers: dict[_Connection, None] = {}  # they have not said which member they are; the oldest first
        self._unsent: dict[int, bytes] = {}  # orders for members that have not connected yet
        self._gone: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_socket_path(str(Path(directory) / MEMBER_SOCKET)) as path:
            self._listener.bind(path)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def send(self, member: int, content: bytes) -> None:
        """Send frames to a member, as soon as it has connected and reads; nothing to one that is gone."""
        connection = self._connections.get(member)
        if connection is not None:
            connection.send(content)
        elif member not in self._gone:
            self._unsent[member] = self._unsent.get(member, b"") + content

    def forget(self, member: int) -> None:
        """Hear what a member has sent before its end, and close its connection."""
        connection = self._connections.get(member)
        if connection is not None:
            for _ in range(_LAST_READS):
                if not connection.read():
                    break
            self._close(connection)
        self._gone.add(member)
        self._unsent.pop(member, None)

    def close(self) -> None:
        """Close all connections and stop listening."""
        for connection in [*self._connections.values(), *self._strangers]:
            self._close(connection)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS and self._strangers:
                self._close(next(iter(self._strangers)))
            return  # else the peer has gone again
        try:
            check_same_user(sock)
        except ProtocolError:
            sock.close()
            return
        if len(self._strangers) >= STRANGERS:
            self._close(next(iter(self._strangers)))
        self._strangers[_Connection(sock, self._selector, self._take, self._close, self._clock)] = None

    def _take(self, connection: _Connection, message: MemberMessage | None, problem: str = "") -> None:
        """Take a message; or None, and what is wrong with what has come instead."""
        if connection in self._strangers:
            known = isinstance(message, MemberHello) and message.member not in self._connections
            if not known or not isinstance(message, MemberHello) or message.member in self._gone:
                return self._close(connection)
            del self._strangers[connection]
            connection.member = message.member
            self._connections[message.member] = connection
            self._heard(message.member, frame(message), "")
            connection.send(self._unsent.pop(message.member, b""))
        elif message is None:
            member = connection.member
            self._close(connection)
            self._heard(member, b"", problem)
        else:
            self._heard(connection.member, frame(message), "")

    def _close(self, connection: _Connection) -> None:
        connection.close()
        self._strangers.pop(connection, None)
        if self._connections.get(connection.member) is connection:
            del self._connections[connection.member]
            self._gone.add(connection.member)  # a member connects once


class _Connection:
    """A connection of a member."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector,
                 take: Callable[[_Connection, MemberMessage | None, str], None], ended: Callable[[_Connection], None],
                 clock: Callable[[], float]) -> None:
        self.member = -1
        self._sock, self._selector, self._take, self._ended, self._clock = sock, selector, take, ended, clock
        self._since, self._bytes, self._messages = clock(), 0, 0  # what has come in this second
        self._frames = Frames(orders=False)
        self._unsent = bytearray()
        self._open = True
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self._ready)

    def read(self) -> bool:
        """Take a bounded part of what has come; return whether there was any."""
        if not self._open:
            return False
        try:
            content = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            content = b""
        try:
            messages = self._frames.feed(content)
        except ProtocolError as error:
            self._take(self, None, str(error))
            return False
        problem = self._flooded(len(content), len(messages))
        for message in [None] if problem else messages:
            if self._open:
                self._take(self, message, problem)
        if not content and self._open:
            self._ended(self)
        return bool(content)

    def _flooded(self, size: int, count: int) -> str:
        """Return how much more than it may the member has sent within a second; "" if it has not."""
        now = self._clock()
        if now - self._since >= 1.0:
            self._since, self._bytes, self._messages = now, 0, 0
        self._bytes, self._messages = self._bytes + size, self._messages + count
        if self._messages > MOST_MESSAGES:
            return f"{self._messages:,} messages within a second; the limit is {MOST_MESSAGES:,}"
        return f"{self._bytes:,} bytes within a second; the limit is {MOST_BYTES:,}" if self._bytes > MOST_BYTES else ""

    def send(self, content: bytes) -> None:
        """Send bytes as soon as the peer reads."""
        self._unsent += content
        self._push()

    def close(self) -> None:
        """Close the socket."""
        if self._open:
            self._open = False
            self._selector.unregister(self._sock)
            self._sock.close()

    def _ready(self) -> None:
        self._push()
        self.read()

    def _push(self) -> None:
        if not self._open:
            return
        try:
            while self._unsent:
                del self._unsent[:self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the reader notices the end
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        if self._selector.get_key(self._sock).events != wanted:
            self._selector.modify(self._sock, wanted, self._ready)
