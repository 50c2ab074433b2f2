"""Passing open file descriptors from the first rank of a host to its other ranks, over a short-lived Unix socket.

A receiver acknowledges every message, so that few descriptors are in flight at a time: the system limits the descriptors in
flight of one user to the number that the sender may have open.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from hvdlite.core.config import socket_timeout
from hvdlite.core.errors import LaunchError
from hvdlite.core.socket_paths import short_socket_path

RETRY_SECONDS = 0.01
_LIMIT = 250  # descriptors in one message (the kernel's limit is 253)
_NUMBER_BYTES = 4


def send_fds(path: str, shared: Sequence[int], own: Sequence[Sequence[int]], timeout: float) -> None:
    """Send descriptors to processes that call `recv_fds(path, index)`; the socket is removed afterwards.

    Args:
        shared: the descriptors that every receiver gets.
        own: by receiver index, the further descriptors of that receiver; its length is the number of receivers.

    Raises:
        LaunchError: when a receiver does not connect within `timeout` seconds, or ends before it has received everything.
    """
    receivers = len(own)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        Path(path).unlink(missing_ok=True)  # left by a job that was killed during its rendezvous
        with short_socket_path(path) as short:
            listener.bind(short)
        try:
            listener.listen(receivers)
            listener.settimeout(socket_timeout(timeout))
            for _ in range(receivers):
                sock, _ = listener.accept()
                with sock:
                    sock.settimeout(socket_timeout(timeout))
                    index = int.from_bytes(sock.recv(_NUMBER_BYTES, socket.MSG_WAITALL), "little")
                    _send(sock, [*shared, *own[index]])
        except TimeoutError:
            raise LaunchError(f"not all {receivers} other ranks of this host asked for the shared memory within "
                              f"{timeout:.0f} s") from None
        finally:
            Path(path).unlink(missing_ok=True)


def recv_fds(path: str, index: int, timeout: float) -> list[int]:
    """Receive the descriptors that the first rank of this host sends at `path` to the receiver with this index.

    Raises:
        LaunchError: when the sender does not answer within `timeout` seconds.
        OSError: when this process may not open so many descriptors.
    """
    deadline = time.monotonic() + timeout
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(socket_timeout(timeout))
            try:
                with short_socket_path(path) as short:
                    sock.connect(short)
                sock.sendall(index.to_bytes(_NUMBER_BYTES, "little"))
                return _receive(sock)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if time.monotonic() > deadline:
                    raise LaunchError(f"the first rank of this host does not share its memory at {path}: {error}") from error
        time.sleep(RETRY_SECONDS)


def _send(sock: socket.socket, descriptors: Sequence[int]) -> None:
    sock.sendall(len(descriptors).to_bytes(_NUMBER_BYTES, "little"))
    for start in range(0, len(descriptors), _LIMIT):
        socket.send_fds(sock, [b"."], list(descriptors[start:start + _LIMIT]))
        if not sock.recv(1):
            raise LaunchError("another rank of this host ended while it received the shared memory")


def _receive(sock: socket.socket) -> list[int]:
    count = int.from_bytes(sock.recv(_NUMBER_BYTES, socket.MSG_WAITALL), "little")
    received: list[int] = []
    try:
        while len(received) < count:
            mark, descriptors, flags, _ = socket.recv_fds(sock, 1, _LIMIT)
            received += descriptors
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            if not mark:
                raise LaunchError("the first rank of this host ended while it shared its memory")
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            sock.sendall(b".")
    except BaseException:
        for descriptor in received:
            os.close(descriptor)
        raise
    return received
