"""Hand open descriptors from rank 0 to the other ranks of its host, over a Unix socket that lives for a moment."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from hvdlite.core.config import socket_timeout
from hvdlite.core.errors import LaunchError
from hvdlite.core.socket_paths import fitting

RETRY_SECONDS = 0.01
_LIMIT = 250  # descriptors in one message (the kernel's limit is 253)


def give(path: str, descriptors: Sequence[int], receivers: int, timeout: float) -> None:
    """Send `descriptors` to `receivers` processes that call `take(path)`; the socket is removed afterwards.

    Raises:
        LaunchError: when not all of them came within `timeout` seconds.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        Path(path).unlink(missing_ok=True)  # left by a job that was killed while its ranks met
        with fitting(path) as short:
            listener.bind(short)
        try:
            listener.listen(receivers)
            listener.settimeout(socket_timeout(timeout))
            for _ in range(receivers):
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(len(descriptors).to_bytes(4, "little"))
                    for start in range(0, len(descriptors), _LIMIT):
                        socket.send_fds(sock, [b"."], list(descriptors[start:start + _LIMIT]))
        except TimeoutError:
            raise LaunchError(f"not all {receivers} other ranks of this host came for the shared memory within "
                              f"{timeout:.0f} s") from None
        finally:
            Path(path).unlink(missing_ok=True)


def take(path: str, timeout: float) -> list[int]:
    """Receive the descriptors that rank 0 gives at `path`.

    Raises:
        LaunchError: when rank 0 does not answer within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(socket_timeout(timeout))
            try:
                with fitting(path) as short:
                    sock.connect(short)
                return _received(sock)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if time.monotonic() > deadline:
                    raise LaunchError(f"rank 0 does not share its memory at {path}: {error}") from error
        time.sleep(RETRY_SECONDS)


def _received(sock: socket.socket) -> list[int]:
    count = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
    received: list[int] = []
    try:
        while len(received) < count:
            mark, descriptors, _, _ = socket.recv_fds(sock, 1, _LIMIT)
            received += descriptors
            if not mark:
                raise LaunchError("rank 0 ended while it shared its memory")
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
    except BaseException:
        for descriptor in received:
            os.close(descriptor)
        raise
    return received
