"""The socket at which the members of an elastic job on one host reach the authority, which is in the launcher.

The directory of the socket belongs to the user alone (mode 0700), and peers of other users are refused. Nothing here blocks:
the owner's selector waits for the connections, and each gets one read a turn. A member that sends something else than
messages, or too many, is disconnected.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hvdlite.core.errors import ProtocolError
from hvdlite.core.launch_contract import MEMBER_SOCKET
from hvdlite.core.sockets import check_same_user, short_socket_path
from hvdlite.core.system_limits import OUT_OF_DESCRIPTORS
from hvdlite.membership.messages import MemberFrames, MemberHello, MemberMessage, MemberOrder, frame

STRANGERS: Final = 256
"""Connections that have not sent `MemberHello`; then the oldest one gives way."""
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
        received: called with a member, its message, `MemberHello` included, and ""; or with None instead, and what is wrong
            with what the member has sent.
    """

    def __init__(self, selector: selectors.BaseSelector, directory: str,
                 received: Callable[[int, MemberMessage | None, str], None],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.selector = selector
        self.clock = clock
        self._received = received
        self.pids: dict[int, int] = {}  # of members that are connected; what hvdrun has started may be a script around one
        self._connections: dict[int, _Connection] = {}  # by member
        self._strangers: dict[_Connection, None] = {}  # they have not sent `MemberHello`; the oldest first
        self._unsent: dict[int, bytes] = {}  # orders for members that have not connected yet
        self._gone: set[int] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_socket_path(str(Path(directory) / MEMBER_SOCKET)) as path:
            self._listener.bind(path)
        self._listener.listen(socket.SOMAXCONN)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def send(self, member: int, order: MemberOrder) -> None:
        """Send an order to a member, as soon as it has connected and reads; nothing to one that is gone."""
        connection = self._connections.get(member)
        if connection is not None:
            connection.send(frame(order))
        elif member not in self._gone:
            self._unsent[member] = self._unsent.get(member, b"") + frame(order)

    def forget(self, member: int) -> None:
        """Receive what a member has sent before its end, and close its connection."""
        connection = self._connections.get(member)
        if connection is not None:
            for _ in range(_LAST_READS):
                if not connection.read():
                    break
            self.drop(connection)
        self._gone.add(member)
        self._unsent.pop(member, None)

    def close(self) -> None:
        """Close all connections and stop listening."""
        for connection in [*self._connections.values(), *self._strangers]:
            self.drop(connection)
        self.selector.unregister(self._listener)
        self._listener.close()

    def take(self, connection: _Connection, message: MemberMessage | None, problem: str = "") -> None:
        """Take a message of a connection; or None, and what is wrong with what has come instead."""
        if connection in self._strangers:
            if not isinstance(message, MemberHello) or message.member in self._gone or message.member in self._connections:
                self.drop(connection)
                return
            del self._strangers[connection]
            connection.member = message.member
            self._connections[message.member], self.pids[message.member] = connection, message.pid
            self._received(message.member, message, "")
            connection.send(self._unsent.pop(message.member, b""))
            return
        if message is None:
            self.drop(connection)
        self._received(connection.member, message, problem)

    def drop(self, connection: _Connection) -> None:
        """Close a connection."""
        connection.close()
        self._strangers.pop(connection, None)
        if self._connections.get(connection.member) is connection:
            del self._connections[connection.member], self.pids[connection.member]
            self._gone.add(connection.member)  # a member connects once

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS and self._strangers:
                self.drop(next(iter(self._strangers)))
            return  # else the peer has gone again
        try:
            check_same_user(sock)
        except ProtocolError:
            sock.close()
            return
        if len(self._strangers) >= STRANGERS:
            self.drop(next(iter(self._strangers)))
        self._strangers[_Connection(sock, self)] = None


class _Connection:
    """A connection of a member, or of a stranger."""

    def __init__(self, sock: socket.socket, server: MemberServer) -> None:
        self.member = -1
        self._sock = sock
        self._server = server
        self._since = server.clock()  # the beginning of the second in which the following have come
        self._bytes = 0
        self._messages = 0
        self._frames = MemberFrames(orders=False)
        self._unsent = bytearray()
        self._open = True
        sock.setblocking(False)
        server.selector.register(sock, selectors.EVENT_READ, self._ready)

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
            self._server.take(self, None, str(error))
            return False
        problem = self._flooded(len(content), len(messages))
        for message in [None] if problem else messages:
            if self._open:
                self._server.take(self, message, problem)
        if not content and self._open:
            self._server.drop(self)
        return bool(content)

    def _flooded(self, size: int, count: int) -> str:
        """Return how much more than it may the member has sent within a second; "" if it has not."""
        now = self._server.clock()
        if now - self._since >= 1.0:
            self._since, self._bytes, self._messages = now, 0, 0
        self._bytes += size
        self._messages += count
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
            self._server.selector.unregister(self._sock)
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
        if self._server.selector.get_key(self._sock).events != wanted:
            self._server.selector.modify(self._sock, wanted, self._ready)
