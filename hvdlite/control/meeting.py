"""How ranks find each other at start: rank 0 listens, the others connect, and nobody else gets in.

Meeting is also the job's first barrier: it ends when all ranks have said hello, or fails naming those that have not.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hvdlite.control.codec import Hello, Welcome
from hvdlite.control.wire import Connection, challenge_as_client, challenge_as_server
from hvdlite.core.errors import HvdliteError, LaunchError, ProtocolError
from hvdlite.negotiation.messages import Message

HALF_OPEN_LIMIT = 64
"""Connections that may be in their handshake at once; more wait in the kernel's queue."""
HANDSHAKE_SECONDS = 10.0
RETRY_SECONDS = 0.02

_log = logging.getLogger("hvdlite.control")


@dataclasses.dataclass(frozen=True)
class Address:
    """Where rank 0 listens: a Unix socket's path, or host and port with the job's key."""

    path: str = ""
    host: str = ""
    port: int = 0
    key: bytes = b""

    def __post_init__(self) -> None:
        if not self.path and not self.key:
            raise LaunchError("ranks that meet over TCP need the job's key: set HVDLITE_SECRET to the same value on all "
                              "ranks (make one with: python -c 'import secrets; print(secrets.token_hex())')")

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"Address({self})"  # never the key

    def socket(self) -> socket.socket:
        """Return a new unconnected socket of the right family."""
        if self.path:
            return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)

    @property
    def target(self) -> str | tuple[str, int]:
        """The address as the socket module wants it."""
        return self.path or (self.host, self.port)


def listen(address: Address) -> socket.socket:
    """Return rank 0's listening socket; port 0 picks a free one."""
    listener = address.socket()
    if address.path:
        Path(address.path).unlink(missing_ok=True)  # left by a job that was killed while its ranks met
    else:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address.target)
        listener.listen(1024)
    except OSError as error:
        raise LaunchError(f"rank 0 cannot listen at {address}: {error}") from error
    return listener


def receive_ranks(listener: socket.socket, address: Address, own: Hello, *, timeout: float,
                  frame_limit: int) -> tuple[dict[int, Connection], Welcome]:
    """On rank 0: wait for all other ranks and welcome them.

    Raises:
        LaunchError: when some have not come within `timeout` seconds, naming them, or one does not fit.
    """
    reception = _Reception(own, address, frame_limit)
    deadline = time.monotonic() + timeout
    while len(reception.connections) < own.size - 1 and not reception.refusal:
        listener.settimeout(max(0.0, min(0.1, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            missing = sorted(set(range(1, own.size)) - set(reception.connections))
            reception.refusal = (f"ranks {missing} did not connect to {address} within {timeout:.0f} s "
                                 "(HVDLITE_START_TIMEOUT); did their processes start, and do they call init()?")
            break
        try:
            sock, _ = listener.accept()
        except (TimeoutError, BlockingIOError):
            continue
        reception.admit(sock)
    welcome = reception.welcome()
    for connection in reception.connections.values():
        connection.send(welcome)
    if reception.refusal:
        for connection in reception.connections.values():
            connection.close()
        raise LaunchError(reception.refusal)
    return reception.connections, welcome


def join(address: Address, own: Hello, *, timeout: float, frame_limit: int) -> tuple[Connection, Welcome]:
    """On every other rank: connect to rank 0, say hello, and wait for its welcome.

    Raises:
        LaunchError: when rank 0 cannot be reached within `timeout` seconds, or refuses.
    """
    deadline = time.monotonic() + timeout
    sock = _connected(address, deadline)
    sock.settimeout(HANDSHAKE_SECONDS)
    try:
        connection = (Connection(sock, frame_limit=frame_limit) if address.path
                      else challenge_as_client(sock, address.key, frame_limit))
        connection.send(own)
        sock.settimeout(max(0.1, deadline + HANDSHAKE_SECONDS - time.monotonic()))
        message = _one_message(connection)
    except (OSError, EOFError, ProtocolError) as error:
        sock.close()
        raise LaunchError(f"rank {own.rank} could not join the job at {address}: {error}") from error
    if not isinstance(message, Welcome) or message.refusal:
        sock.close()
        raise LaunchError(message.refusal if isinstance(message, Welcome) else f"{address} is not a coordinator")
    return connection, message


class _Reception:
    """Admits ranks; each handshake runs in a short-lived thread, so a silent stranger delays nobody."""

    def __init__(self, own: Hello, address: Address, frame_limit: int) -> None:
        self.connections: dict[int, Connection] = {}
        self.refusal = ""
        self._own = own
        self._address = address
        self._frame_limit = frame_limit
        self._hellos = {own.rank: own}
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(HALF_OPEN_LIMIT)

    def admit(self, sock: socket.socket) -> None:
        self._places.acquire()
        threading.Thread(target=self._greet, args=(sock,), name="hvdlite-handshake", daemon=True).start()

    def welcome(self) -> Welcome:
        with self._lock:
            if self.refusal:
                return Welcome(refusal=self.refusal, epoch=self._own.epoch)
            ranks = [self._hellos[rank] for rank in range(self._own.size)]
        return Welcome(tuple(hello.pid for hello in ranks), tuple(hello.host for hello in ranks),
                       tuple(hello.testimony for hello in ranks), epoch=self._own.epoch)

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            connection = self._authenticated(sock)
            hello = _one_message(connection)
            if not isinstance(hello, Hello):
                raise ProtocolError(f"expected a Hello, got a {type(hello).__name__}")
            self._seat(hello, connection)
        except (OSError, EOFError, HvdliteError) as error:
            sock.close()
            _log.warning("a stranger at %s was turned away: %s", self._address, error)
        finally:
            self._places.release()

    def _authenticated(self, sock: socket.socket) -> Connection:
        if not self._address.path:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return challenge_as_server(sock, self._address.key, self._frame_limit)
        check_same_user(sock)
        return Connection(sock, frame_limit=self._frame_limit)

    def _seat(self, hello: Hello, connection: Connection) -> None:
        with self._lock:
            if hello.size != self._own.size or not 0 < hello.rank < self._own.size:
                self.refusal = (f"a process calls itself rank {hello.rank} of {hello.size}, but rank 0 was started as "
                                f"one of {self._own.size}; check the launch environment")
            elif hello.epoch != self._own.epoch:
                self.refusal = (f"rank {hello.rank} belongs to membership epoch {hello.epoch}, rank 0 to {self._own.epoch}: "
                                "one of them is left over from an earlier start")
            elif hello.rank in self.connections:
                self.refusal = f"two processes (pids {self._hellos[hello.rank].pid} and {hello.pid}) are rank {hello.rank}"
            elif hello.version != self._own.version:
                self.refusal = (f"rank {hello.rank} runs hvdlite {hello.version}, rank 0 runs {self._own.version}; "
                                "install the same version everywhere")
            self._hellos[hello.rank] = hello
            self.connections[hello.rank] = connection


def check_same_user(sock: socket.socket) -> None:
    """Raise `ProtocolError` unless the peer of a Unix socket has our user id (where the system can tell)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return  # the directory's mode 0700 has to do
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise ProtocolError(f"the peer belongs to user {uid}, not {os.geteuid()}")


def host_identity() -> str:
    """Return a text that two processes share exactly when they see the same kernel and the same process ids."""
    def read(action: Callable[[], str]) -> str:
        try:
            return action()
        except OSError:
            return ""

    def boot_id() -> str:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()

    return ":".join((socket.gethostname(), read(boot_id), read(lambda: os.readlink("/proc/self/ns/pid"))))


def _connected(address: Address, deadline: float) -> socket.socket:
    while True:
        sock = address.socket()
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            sock.connect(address.target)
            if not address.path:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise LaunchError(f"cannot reach rank 0 at {address}: {error}; has its process started?") from error
        time.sleep(RETRY_SECONDS)


def _one_message(connection: Connection) -> Message:
    """Block (within the socket's timeout) for the next message."""
    while True:
        connection.socket.recv(1, socket.MSG_PEEK)
        messages = connection.receive()
        if messages:
            connection.unreceive(messages[1:])
            return messages[0]
