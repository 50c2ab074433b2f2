"""Sockets: addresses of this host, ports and Unix sockets of ours, the peer's user id, and connections that are refused."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Final

from hvdlite.core.errors import ProtocolError

_ROOM: Final = 100
"""The longest path, in bytes, that every system accepts for a Unix socket (107 bytes on Linux)."""
_ANY_PORT: Final = 9  # of a datagram that is never sent: only the route is wanted
SEND_FLAGS: Final = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)  # macOS has no such flag
"""Of sends that neither block nor raise SIGPIPE."""
LOGGED_REFUSALS = 10
"""Peers and reasons that are logged by one listener; other refusals are only counted."""

_log = logging.getLogger("hvdlite.control")


def route_to(host: str) -> str | None:
    """Return the source address that the kernel uses towards a host, or None when there is no route.

    Raises:
        OSError: when the name cannot be resolved.
    """
    for family, kind, protocol, _, address in socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    return None


def routes_to(hosts: Iterable[str]) -> list[str]:
    """Return the source addresses towards some hosts, the most frequent one first; hosts without a route are left out."""
    routes = []
    for host in hosts:
        with contextlib.suppress(OSError):
            routes.append(route_to(host))
    return sorted({route for route in routes if route}, key=lambda route: (-routes.count(route), route))


def loopback() -> str:
    """Return the address at which processes of this host reach each other: 127.0.0.1, or ::1; "" when there is none."""
    return next((host for host in ("127.0.0.1", "::1") if route_to(host)), "")


@contextlib.contextmanager
def short_socket_path(path: str) -> Iterator[str]:
    """Provide a path of the same socket that is short enough to bind or connect to.

    On Linux, a long directory is opened and replaced by its /proc path; elsewhere the path is unchanged.
    """
    if len(os.fsencode(path)) <= _ROOM or not hasattr(os, "O_PATH"):
        yield path
        return
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def connect_unix(sock: socket.socket, path: str) -> None:
    """Connect to a Unix socket, and check that a process of our user listens there.

    Raises:
        OSError: when nobody does.
        ProtocolError: when another user does.
    """
    with short_socket_path(path) as short:
        sock.connect(short)
    check_same_user(sock)


def check_same_user(sock: socket.socket) -> None:
    """Raise `ProtocolError` unless the peer of a Unix socket has our user id (where the system reports it)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return  # the directory's mode 0700 has to do
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise ProtocolError(f"the peer belongs to user {uid}, not {os.geteuid()}")


class HeldPort:
    """A port that is chosen now, and at which another process listens later: the system gives it to no program meanwhile.

    A socket is bound to it that does not listen; a program that sets SO_REUSEADDR, as rank 0 does, can listen there.

    Args:
        port: 0 for a free one.
        host: the address; "" for all.

    Raises:
        OSError: when another program has the port.
    """

    def __init__(self, port: int = 0, host: str = "") -> None:
        both = not host and socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if both or ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if both:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Let the port go, once nobody needs it any more, or somebody listens there; again is fine."""
        self._socket.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # there was no socket
            self._socket.close()


class RefusedConnections:
    """Logs each reason once per peer, and counts the other refusals (docs/protocol.md#frames): nobody can fill the log.

    Args:
        address: of the listener.
    """

    def __init__(self, address: object) -> None:
        self._address = address
        self._logged: set[tuple[str, str]] = set()  # peers and reasons
        self._rest = self._count = 0
        self._example = ""  # the peer and the reason of the most telling refusal
        self._is_cut_short = True  # that connection: it was only closed, or slow

    def __str__(self) -> str:
        """How many connections were refused, and why one of them; "" when none was."""
        if not self._count:
            return ""
        counted = "1 connection was refused," if self._count == 1 else f"{self._count} connections were refused, one of them"
        return f" {counted} from {self._example}"

    def note(self, peer: str, error: Exception) -> None:
        """A connection was refused."""
        refusal = peer, str(error)
        self._count += 1
        is_cut_short = isinstance(error, OSError | EOFError)
        if self._is_cut_short or not is_cut_short:
            self._example, self._is_cut_short = f"{peer}: {error}", is_cut_short
        if refusal in self._logged or len(self._logged) >= LOGGED_REFUSALS:
            self._rest += 1
            return
        self._logged.add(refusal)
        _log.warning("a connection from %s to %s was refused: %s", peer, self._address, error)

    def log_rest(self) -> None:
        """Nobody listens any more: log how many refusals were not logged."""
        rest, self._rest = self._rest, 0
        if rest:
            _log.warning("%d more connections to %s were refused", rest, self._address)
