"""Unix sockets in directories with long names (a path has at most 107 bytes), and the user id of the peer."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from hvdlite.core.errors import ProtocolError

_ROOM: Final = 100
"""The longest path, in bytes, that every system accepts."""


@contextmanager
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


def check_same_user(sock: socket.socket) -> None:
    """Raise `ProtocolError` unless the peer of a Unix socket has our user id (where the system can tell)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return  # the directory's mode 0700 has to do
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise ProtocolError(f"the peer belongs to user {uid}, not {os.geteuid()}")
