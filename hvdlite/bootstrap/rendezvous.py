"""The rendezvous: rank 0 listens, the other ranks connect and authenticate, and no other process gets in.

It is also the first barrier of a world: it ends when all ranks have sent their RankInfo, or fails and names those that have
not. Another thread can cancel it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hvdlite.bootstrap.cancellation import Cancellation
from hvdlite.bootstrap.refused_connections import RefusedConnections
from hvdlite.control.codec import RankInfo, Welcome
from hvdlite.control.doorbell import Doorbell
from hvdlite.control.wire import Connection, challenge_as_client, challenge_as_server
from hvdlite.core.config import poll_timeout, socket_timeout
from hvdlite.core.errors import HvdliteError, LaunchError, ProtocolError
from hvdlite.core.file_limit import reserve_descriptors
from hvdlite.core.socket_paths import check_same_user, short_socket_path
from hvdlite.negotiation.messages import Message

HALF_OPEN_LIMIT = 64
"""Connections that may be in their handshake at once; more wait in the kernel's queue."""
BACKLOG = 1024
HANDSHAKE_SECONDS = 10.0
CONNECT_SECONDS = 5.0
"""A host that is not up yet may swallow the first attempt."""
RETRY_SECONDS = 0.02
"""The longest pause between two attempts; the first ones follow each other faster."""
FIRST_RETRY_SECONDS = 0.001


class MissingRanks(LaunchError):
    """Some ranks have not reached rank 0 in time."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclasses.dataclass(frozen=True)
class Address:
    """Rank 0's address: a Unix socket's path, or host and port with the job's key; to listen on all addresses, no host."""

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

    def resolved(self) -> tuple[socket.AddressFamily, Any]:
        """Return the family, and the address as the socket module wants it.

        Raises:
            OSError: when the host's name is not known here.
        """
        if self.path:
            return socket.AF_UNIX, self.path
        family, _, _, _, target = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        return family, target


def listen(address: Address) -> socket.socket:
    """Return rank 0's listening socket; port 0 picks a free one."""
    if address.path:
        Path(address.path).unlink(missing_ok=True)  # left by a job that was killed while its ranks met
    try:
        if not address.path and not address.host:
            dual = socket.has_dualstack_ipv6()
            return socket.create_server(("", address.port), family=socket.AF_INET6 if dual else socket.AF_INET,
                                        backlog=BACKLOG, dualstack_ipv6=dual)
        family, target = address.resolved()
    except OSError as error:
        raise LaunchError(f"rank 0 cannot listen at {address}: {error}") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if not address.path:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, address, target)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(f"rank 0 cannot listen at {address}: {error}") from error
    return listener


def _bind(listener: socket.socket, address: Address, target: Any) -> None:
    """Bind to the address, or to all of this host's where that one says nothing about how others reach it."""
    if address.path:
        with short_socket_path(address.path) as path:
            listener.bind(path)
        return
    if is_loopback(target[0]) and not is_loopback(address.host):  # Debian: 127.0.1.1 is my name
        listener.bind(("", address.port))
        return
    try:
        listener.bind(target)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        listener.bind(("", address.port))  # translated on the way: a service's address, say


def _connect(sock: socket.socket, address: Address, target: Any) -> None:
    if not address.path:
        sock.connect(target)
        return
    with short_socket_path(address.path) as path:
        sock.connect(path)


def is_loopback(host: str) -> bool:
    """Return whether a host's name or IP address is one that other hosts cannot reach."""
    return host in ("localhost", "::1") or host.startswith("127.")


def advertised_address(connections: Iterable[Connection]) -> str:
    """Return the IP address of this host that most of the peers of some connections use; "" when none is for others."""
    names = [connection.socket.getsockname() for connection in connections if connection.socket.family != socket.AF_UNIX]
    known = [name[0].removeprefix("::ffff:") for name in names]  # IPv4, of a socket that listens for both
    addresses = [address for address in known if not is_loopback(address)]
    return max(addresses, key=addresses.count, default="")


def accept_ranks(listener: socket.socket, address: Address, own: RankInfo, *, timeout: float, frame_limit: int,
                  use_leaders: bool = False,
                  cancellation: Cancellation | None = None) -> tuple[dict[int, Connection], Welcome]:
    """On rank 0: wait for all other ranks and welcome them.

    Args:
        use_leaders: whether hosts are to have leaders, when there are several.
        cancellation: may end this from another thread.

    Raises:
        LaunchError: when some have not come within `timeout` seconds, naming them, one does not fit, or this process may
            not have as many connections.
    """
    admission = _Admission(own, address, frame_limit, use_leaders, cancellation or Cancellation())
    try:
        return admission.connections, _welcomed(admission, listener, own, timeout)
    except BaseException:
        admission.dismiss()
        raise
    finally:
        admission.end()
        admission.refused.log_rest()


def _welcomed(admission: _Admission, listener: socket.socket, own: RankInfo, timeout: float) -> Welcome:
    try:
        with reserve_descriptors(own.size - 1, f"rank 0 of a job of {own.size} ranks"):
            admission.admit_all(listener, timeout)
    except LaunchError as error:
        admission.refusal = str(error)
        admission.send_welcome()
        raise
    welcome = admission.send_welcome()
    if admission.refusal:
        raise LaunchError(admission.refusal)
    return welcome


def connect_to_rank_0(address: Address, own: RankInfo, *, timeout: float, frame_limit: int,
                      cancellation: Cancellation | None = None) -> tuple[Connection, Welcome]:
    """On every other rank: connect to rank 0, send its RankInfo, and wait for its welcome.

    Args:
        cancellation: may end this from another thread.

    Raises:
        LaunchError: when rank 0 cannot be reached within `timeout` seconds, or refuses.
    """
    cancellation = cancellation or Cancellation()
    deadline = time.monotonic() + timeout
    sock = _connected(address, deadline, cancellation)
    try:
        with cancellation.watch(sock):
            sock.settimeout(HANDSHAKE_SECONDS)
            connection = (Connection(sock, frame_limit=frame_limit) if address.path
                          else challenge_as_client(sock, address.key, frame_limit))
            connection.send(own)
            sock.settimeout(socket_timeout(max(0.1, deadline + HANDSHAKE_SECONDS - time.monotonic())))
            message = _one_message(connection)
        return connection, _checked(message, address, own)
    except (OSError, EOFError, ProtocolError) as error:
        sock.close()
        cancellation.check()
        raise LaunchError(f"rank {own.rank} could not join the job at {address}: {error}") from error
    except BaseException:
        sock.close()
        raise


def _checked(message: Message, address: Address, own: RankInfo) -> Welcome:
    """Return rank 0's answer, when it is a welcome to the world that this rank belongs to."""
    if not isinstance(message, Welcome):
        raise LaunchError(f"{address} is not a coordinator")
    if message.refusal:
        raise LaunchError(message.refusal)
    if message.epoch != own.epoch:
        raise LaunchError(f"rank 0 at {address} belongs to membership epoch {message.epoch}, this rank to {own.epoch}")
    return message


class _Admission:
    """Admits ranks; each handshake runs in a short-lived thread, so a silent stranger delays nobody."""

    def __init__(self, own: RankInfo, address: Address, frame_limit: int, use_leaders: bool,
                 cancellation: Cancellation) -> None:
        self.connections: dict[int, Connection] = {}
        self.refusal = ""
        self.refused = RefusedConnections(address)
        self._own = own
        self._address = address
        self._frame_limit = frame_limit
        self._use_leaders = use_leaders
        self._cancellation = cancellation
        self._infos = {own.rank: own}
        self._settled = Doorbell()  # a handshake has ended
        self._ended = False
        self._lock = threading.Lock()
        self._handshake_slots = threading.BoundedSemaphore(HALF_OPEN_LIMIT)

    def admit_all(self, listener: socket.socket, timeout: float) -> None:
        """Return when all ranks are there, or there is a reason to refuse them.

        Raises:
            MissingRanks: when some have not come in time.
        """
        deadline = time.monotonic() + timeout
        size = self._own.size
        listener.setblocking(False)
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        poller.register(self._settled, select.POLLIN)
        with self._cancellation.watch(listener):
            while len(self.connections) < size - 1 and not self.refusal:
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = sorted(set(range(1, size)) - set(self.connections))
                    raise MissingRanks(f"ranks {missing} did not connect to {self._address} within {timeout:.0f} s "
                                       "(HVDLITE_START_TIMEOUT); did their processes start, and do they call init()?",
                                       missing)
                poller.poll(poll_timeout(left))
                self._cancellation.check()
                self._settled.clear()
                try:
                    sock, peer = listener.accept()
                except BlockingIOError:
                    continue
                self._admit(sock, peer[0] if peer else "this host")

    def dismiss(self) -> None:
        """Close the connections: there will be no world."""
        with self._lock:
            self._ended = True
            for connection in self.connections.values():
                connection.close()

    def end(self) -> None:
        """Nobody is admitted any more."""
        with self._lock:
            self._ended = True
            self._settled.close()

    def _admit(self, sock: socket.socket, peer: str) -> None:
        self._handshake_slots.acquire()
        threading.Thread(target=self._handshake, args=(sock, peer), name="hvdlite-handshake", daemon=True).start()

    def send_welcome(self) -> Welcome:
        """Answer those that have come; return the answer."""
        welcome = self.welcome()
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # its end is seen later
                connection.send(welcome)
        return welcome

    def welcome(self) -> Welcome:
        with self._lock:
            if self.refusal:
                return Welcome(refusal=self.refusal, epoch=self._own.epoch)
            ranks = [self._infos[rank] for rank in range(self._own.size)]
        return Welcome(
            pids=tuple(info.pid for info in ranks), hosts=tuple(info.host for info in ranks),
            stack_dumps=tuple(info.stack_dump for info in ranks),
            advertised_address=advertised_address(self.connections.values()), clock=time.monotonic(),
            unavailable=_unavailable_somewhere(ranks),
            use_leaders=self._use_leaders and len({info.host for info in ranks}) > 1, epoch=self._own.epoch)

    def _handshake(self, sock: socket.socket, peer: str) -> None:
        try:
            with self._cancellation.watch(sock):
                sock.settimeout(HANDSHAKE_SECONDS)
                connection = self._authenticated(sock)
                info = _one_message(connection)
            if not isinstance(info, RankInfo):
                raise ProtocolError(f"expected a RankInfo, got a {type(info).__name__}")
            self._register(info, connection)
        except (OSError, EOFError, HvdliteError) as error:
            sock.close()
            if not self._cancellation.reason:
                self.refused.note(peer, error)
        finally:
            self._handshake_slots.release()

    def _authenticated(self, sock: socket.socket) -> Connection:
        if not self._address.path:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return challenge_as_server(sock, self._address.key, self._frame_limit)
        check_same_user(sock)
        return Connection(sock, frame_limit=self._frame_limit)

    def _register(self, info: RankInfo, connection: Connection) -> None:
        with self._lock:
            if self._ended:
                raise ProtocolError("it came after the ranks had met, or had given up")
            if info.size != self._own.size or not 0 < info.rank < self._own.size:
                self.refusal = (f"a process calls itself rank {info.rank} of {info.size}, but rank 0 was started as "
                                f"one of {self._own.size}; check the launch environment")
            elif info.epoch != self._own.epoch:
                self.refusal = (f"rank {info.rank} belongs to membership epoch {info.epoch}, rank 0 to {self._own.epoch}: "
                                "one of them is left over from an earlier start")
            elif info.rank in self.connections:
                self.refusal = f"two processes (pids {self._infos[info.rank].pid} and {info.pid}) are rank {info.rank}"
            elif info.version != self._own.version:
                self.refusal = (f"rank {info.rank} runs hvdlite {info.version}, rank 0 runs {self._own.version}; "
                                "install the same version everywhere")
            elif info.settings != self._own.settings:
                (name, theirs), (_, ours) = next(pair for pair in zip(info.settings, self._own.settings, strict=True)
                                                 if pair[0] != pair[1])
                self.refusal = f"rank {info.rank} has {name}={theirs}, rank 0 {ours}; set the same everywhere"
            self._infos[info.rank] = info
            self.connections[info.rank] = connection
            self._settled.ring()


def _unavailable_somewhere(infos: Sequence[RankInfo]) -> tuple[tuple[str, str], ...]:
    """Return what any rank lacks, and why; the first rank's reason, with its number where it is not everybody's."""
    unavailable: dict[str, tuple[str, list[int]]] = {}
    for info in infos:
        for name, reason in info.unavailable:
            unavailable.setdefault(name, (reason, []))[1].append(info.rank)
    return tuple((name, reason if len(ranks) == len(infos) else f"on rank {ranks[0]}, {reason}")
                 for name, (reason, ranks) in unavailable.items())


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


def _connected(address: Address, deadline: float, cancellation: Cancellation) -> socket.socket:
    pause = FIRST_RETRY_SECONDS
    while True:
        cancellation.check()
        try:
            family, target = address.resolved()
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(0.1, min(CONNECT_SECONDS, deadline - time.monotonic())))
                _connect(sock, address, target)
                if not address.path:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            except OSError:
                sock.close()
                raise
        except OSError as error:
            if time.monotonic() >= deadline:
                raise LaunchError(f"cannot reach rank 0 at {address}: {error}; has its process started?") from error
        time.sleep(pause)
        pause = min(2 * pause, RETRY_SECONDS)


def _one_message(connection: Connection) -> Message:
    """Block (within the socket's timeout) for the next message."""
    while True:
        connection.socket.recv(1, socket.MSG_PEEK)
        messages = connection.receive()
        if messages:
            connection.unreceive(messages[1:])
            return messages[0]
