"""Passing open file descriptors from the first rank of a host to its other ranks, over a short-lived Unix socket.

A receiver acknowledges every message, so that few descriptors are in flight at a time: the system limits the descriptors in
flight of one user to the number that the sender may have open.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdlite.bootstrap.rendezvous import Cancellation
from hvdlite.core.config import poll_timeout, socket_timeout
from hvdlite.core.errors import LaunchError, ProtocolError
from hvdlite.core.sockets import check_same_user, connect_unix, short_socket_path

_log = logging.getLogger("hvdlite.control")

RETRY_SECONDS = 0.01
FIRST_RETRY_SECONDS = 0.001
_LIMIT = 250  # descriptors in one message (the kernel's limit is 253)
_NUMBER_BYTES = 4


def send_fds(path: str, shared: Sequence[int], own: Sequence[Sequence[int]], timeout: float,
             cancellation: Cancellation | None = None) -> None:
    """Send descriptors to processes that call `recv_fds(path, index)`; the socket is removed afterwards.

    Args:
        shared: the descriptors that every receiver gets.
        own: by receiver index, the further descriptors of that receiver; its length is the number of receivers.
        cancellation: may end this from another thread.

    Raises:
        LaunchError: when a receiver does not connect within `timeout` seconds, or ends before it has received everything.
    """
    receivers = len(own)
    cancellation = cancellation or Cancellation()
    deadline = time.monotonic() + timeout
    served: set[int] = set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        Path(path).unlink(missing_ok=True)  # left by a job that was killed during its rendezvous
        with short_socket_path(path) as short:
            listener.bind(short)
        try:
            listener.listen(receivers)
            with cancellation.watch(listener):
                while len(served) < receivers:
                    _wait_for_connection(listener, deadline, cancellation)
                    sock, _ = listener.accept()
                    with sock, cancellation.watch(sock):
                        try:
                            check_same_user(sock)
                        except ProtocolError as error:
                            _log.warning("a connection to %s was refused: %s", path, error)
                            continue
                        sock.settimeout(socket_timeout(max(0.1, deadline - time.monotonic())))
                        index = _number(sock, "another rank of this host")
                        if index >= receivers or index in served:
                            raise LaunchError(f"a process asked for the shared memory as number {index} of the {receivers} "
                                              "other ranks of this host: there is none, or it has it already; check the "
                                              "launch environment")
                        _send(sock, [*shared, *own[index]])
                        served.add(index)
        except TimeoutError:
            raise LaunchError(f"not all {receivers} other ranks of this host asked for the shared memory within "
                              f"{timeout:.0f} s") from None
        except OSError:
            cancellation.check()
            raise
        finally:
            Path(path).unlink(missing_ok=True)


def recv_fds(locate: Callable[[], str], index: int, timeout: float, cancellation: Cancellation | None = None) -> list[int]:
    """Receive the descriptors that the first rank of this host sends to the receiver with this index.

    Args:
        locate: returns the path at which the first rank sends them; raises FileNotFoundError while there is none.
        cancellation: may end this from another thread.

    Raises:
        LaunchError: when the sender does not answer within `timeout` seconds.
        OSError: when this process may not open so many descriptors.
    """
    deadline = time.monotonic() + timeout
    cancellation = cancellation or Cancellation()
    pause = FIRST_RETRY_SECONDS
    while True:
        cancellation.check()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(socket_timeout(timeout))
            try:
                path = locate()
                connect_unix(sock, path)
                with cancellation.watch(sock):
                    sock.sendall(index.to_bytes(_NUMBER_BYTES, "little"))
                    return _receive(sock)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if time.monotonic() > deadline:
                    raise LaunchError(f"the first rank of this host does not share its memory: {error}") from error
            except ProtocolError as error:
                raise LaunchError(f"whoever listens at {path} is not the first rank of this host: {error}") from error
        time.sleep(pause)
        pause = min(2 * pause, RETRY_SECONDS)


def _send(sock: socket.socket, descriptors: Sequence[int]) -> None:
    sock.sendall(len(descriptors).to_bytes(_NUMBER_BYTES, "little"))
    for start in range(0, len(descriptors), _LIMIT):
        socket.send_fds(sock, [b"."], list(descriptors[start:start + _LIMIT]))
        if not sock.recv(1):
            raise LaunchError("another rank of this host ended while it received the shared memory")


def _receive(sock: socket.socket) -> list[int]:
    count = _number(sock, "the first rank of this host")
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


def _wait_for_connection(listener: socket.socket, deadline: float, cancellation: Cancellation) -> None:
    """Block until `accept` does not; unlike `accept`, this ends when a Unix socket is shut down.

    Raises:
        TimeoutError: at the deadline.
        LaunchError: when the rendezvous was given up.
    """
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    ready = poller.poll(poll_timeout(max(0.0, deadline - time.monotonic())))
    cancellation.check()
    if not ready:
        raise TimeoutError


def _number(sock: socket.socket, sender: str) -> int:
    content = sock.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
    if len(content) < _NUMBER_BYTES:
        raise LaunchError(f"{sender} ended while the shared memory was passed on")
    return int.from_bytes(content, "little")
