"""The socket at which the members of an elastic job on one host speak with the authority, which is in the launcher.

The directory of the socket belongs to the user alone (mode 0700), and peers of other users are refused. Nothing here blocks:
the owner's selector waits for the connections. A member that sends something else than messages is not heard any more.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hvdlite.core.errors import ProtocolError
from hvdlite.core.file_limit import OUT_OF_DESCRIPTORS
from hvdlite.core.launch_contract import MEMBER_SOCKET
from hvdlite.core.socket_paths import check_same_user, short_socket_path
from hvdlite.membership.messages import Frames, MemberHello, MemberMessage, frame

STRANGERS: Final = 256
"""Connections that have not said which member they are; then the oldest one gives way."""
_READ_BYTES: Final = 1 << 16


class MemberServer:
    """Listens in a job's directory until it is closed.

    Args:
        selector: its keys' `data` are functions to call when the descriptor is ready.
        directory: the job's directory on this host.
        heard: called with a member and the frame of its message, `MemberHello` included; with an empty frame when the member
            has sent something that is no message.
    """

    def __init__(self, selector: selectors.BaseSelector, directory: str, heard: Callable[[int, bytes], None]) -> None:
        self._selector, self._heard = selector, heard
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
            connection.read()
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
        self._strangers[_Connection(sock, self._selector, self._take, self._close)] = None

    def _take(self, connection: _Connection, message: MemberMessage | None) -> None:
        """Take a message; None for something that is no message."""
        if connection in self._strangers:
            known = isinstance(message, MemberHello) and message.member not in self._connections
            if not known or not isinstance(message, MemberHello) or message.member in self._gone:
                return self._close(connection)
            del self._strangers[connection]
            connection.member = message.member
            self._connections[message.member] = connection
            self._heard(message.member, frame(message))
            connection.send(self._unsent.pop(message.member, b""))
        elif message is None:
            member = connection.member
            self._close(connection)
            self._heard(member, b"")
        else:
            self._heard(connection.member, frame(message))

    def _close(self, connection: _Connection) -> None:
        connection.close()
        self._strangers.pop(connection, None)
        if self._connections.get(connection.member) is connection:
            del self._connections[connection.member]
            self._gone.add(connection.member)  # a member connects once


class _Connection:
    """A connection of a member."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector,
                 take: Callable[[_Connection, MemberMessage | None], None], ended: Callable[[_Connection], None]) -> None:
        self.member = -1
        self._sock, self._selector, self._take, self._ended = sock, selector, take, ended
        self._frames = Frames(orders=False)
        self._unsent = bytearray()
        self._open = True
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self._ready)

    def read(self) -> None:
        """Take all messages that have come."""
        while self._open:
            try:
                content = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                content = b""
            try:
                messages = self._frames.feed(content)
            except ProtocolError:
                return self._take(self, None)
            for message in messages:
                if self._open:
                    self._take(self, message)
            if not content and self._open:
                return self._ended(self)

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
