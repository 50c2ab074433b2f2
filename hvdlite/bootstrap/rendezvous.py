"""The rendezvous: rank 0 listens, the other ranks connect and authenticate, and no other process gets in.

It is also the first barrier of a world: it ends when all ranks have sent their RankInfo, or fails and names those that have
not. Another thread can cancel it. Rank 0's side is in `admission.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hvdlite.bootstrap.environments import how_to_have_a_key
from hvdlite.control.handshake import Greeting, greet_rank_0
from hvdlite.control.wire import Connection, RankInfo, Welcome
from hvdlite.core.config import poll_timeout
from hvdlite.core.errors import LaunchError, ProtocolError
from hvdlite.core.sockets import connect_unix, routes_to, short_socket_path
from hvdlite.negotiation.messages import Message

BACKLOG = 1024
HANDSHAKE_SECONDS = 10.0
_ANYWHERE = "192.0.2.1"  # from a block reserved for documentation; no packet is sent
CONNECT_SECONDS = 5.0
"""A host that is not up yet may swallow the first attempt."""
RETRY_SECONDS = 0.02
"""The longest pause between two attempts; the first ones follow each other faster."""
FIRST_RETRY_SECONDS = 0.001


class Cancellation:
    """Ends a rendezvous from another thread, at once: shuts down the sockets on which it blocks.

    Attributes:
        reason: why the rendezvous was given up; "" as long as it was not.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def cancel(self, reason: str) -> None:
        """Give the rendezvous up; callable from any thread, again is fine."""
        with self._lock:
            self.reason = self.reason or reason
            for sock in self._sockets:
                with contextlib.suppress(OSError):  # not connected any more
                    sock.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise `LaunchError` when the rendezvous was given up."""
        if self.reason:
            raise LaunchError(f"the ranks stopped meeting: {self.reason}")

    @contextlib.contextmanager
    def watch(self, sock: socket.socket) -> Iterator[None]:
        """Let `cancel` end what blocks on a socket inside this context: it looks like the end of the connection.

        Raises:
            LaunchError: when the rendezvous was given up before.
        """
        with self._lock:
            self.check()
            self._sockets.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)


@dataclasses.dataclass(frozen=True)
class Address:
    """Rank 0's address: a Unix socket's path, or host and port with the job's key; to listen on all addresses, no host.

    Attributes:
        locate: returns the path at which the socket is now, if `path` is only for messages.
        how_to_have_a_key: the end of the error's text without one.
    """

    path: str = ""
    host: str = ""
    port: int = 0
    key: bytes = b""
    locate: Callable[[], str] | None = None
    how_to_have_a_key: str = ""

    def __post_init__(self) -> None:
        if not self.path and not self.key:
            raise LaunchError("ranks that meet over TCP need the job's key: "
                              f"{self.how_to_have_a_key or how_to_have_a_key({})}")

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"Address({self})"  # never the key

    def resolved(self) -> tuple[socket.AddressFamily, Any]:
        """Return the family, and the address as the socket module wants it.

        Raises:
            OSError: when the host's name is not known here, or the socket's directory does not exist yet.
        """
        if self.path:
            return socket.AF_UNIX, self.locate() if self.locate else self.path
        try:
            family, _, _, _, target = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except UnicodeError as error:  # a label of 64 characters, say
            raise OSError(f"{self.host!r} is no host's name: {error}") from error
        return family, target


def listen(address: Address) -> socket.socket:
    """Return rank 0's listening socket; port 0 picks a free one."""
    try:
        if not address.path and not address.host:
            dual = socket.has_dualstack_ipv6()
            return socket.create_server(("", address.port), family=socket.AF_INET6 if dual else socket.AF_INET,
                                        backlog=BACKLOG, dualstack_ipv6=dual)
        family, target = address.resolved()
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            if address.path:
                Path(target).unlink(missing_ok=True)  # left by a job that was killed while its ranks met
            else:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bind(listener, address, target)
            listener.listen(BACKLOG)
            opened.pop_all()
        return listener
    except OSError as error:
        raise LaunchError(f"rank 0 cannot listen at {address}: {error}") from error


def _bind(listener: socket.socket, address: Address, target: Any) -> None:
    """Bind to the address, or to all of this host's where that one says nothing about how others reach it."""
    if address.path:
        with short_socket_path(target) as path:
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


def is_loopback(host: str) -> bool:
    """Return whether a host's name or IP address is one that other hosts cannot reach."""
    return host in ("localhost", "::1") or host.startswith("127.")


def advertised_address(connections: Iterable[Connection]) -> str:
    """Return the IP address of this host that most of the peers of some connections use; "" when none is for others."""
    names = [connection.socket.getsockname() for connection in connections if connection.socket.family != socket.AF_UNIX]
    known = [name[0].removeprefix("::ffff:") for name in names]  # IPv4, of a socket that listens for both
    addresses = [address for address in known if not is_loopback(address)]
    return max(addresses, key=addresses.count, default="")


def route_address(names: Iterable[str]) -> str:
    """Return the IP address from which this host reaches the hosts of other ranks; loopback if there is none.

    Args:
        names: the host names of all ranks.
    """
    for name in dict.fromkeys(name for name in names if name != socket.gethostname()):
        try:
            own = routes_to([socket.gethostbyname(name)])
        except (OSError, ValueError, TypeError):  # a label of 64 characters, or a null character, say
            continue
        if own and not is_loopback(own[0]):
            return own[0]
    return next(iter(routes_to([_ANYWHERE])), "127.0.0.1")


def connect_to_rank_0(address: Address, own: RankInfo, *, timeout: float, frame_limit: int,
                      cancellation: Cancellation | None = None) -> tuple[Connection, Welcome]:
    """On every other rank: connect to rank 0, send its RankInfo, and wait for its welcome.

    It tries again until `timeout` seconds have passed, also when a handshake fails: strangers may have been in the way.

    Args:
        cancellation: may end this from another thread.

    Raises:
        LaunchError: when rank 0 cannot be reached within `timeout` seconds, or refuses.
    """
    cancellation = cancellation or Cancellation()
    deadline = time.monotonic() + timeout
    connection = _authenticated(address, own, deadline, frame_limit, cancellation)
    try:
        with cancellation.watch(connection.socket):
            connection.send(own)
            message = _one_message(connection, deadline + HANDSHAKE_SECONDS)
        return connection, _checked(message, address, own)
    except (OSError, EOFError, ProtocolError) as error:
        connection.close_in_child()
        cancellation.check()
        raise LaunchError(f"this rank could not join the job at {address}: {error}") from error
    except BaseException:
        connection.close_in_child()
        raise


def _authenticated(address: Address, own: RankInfo, deadline: float, frame_limit: int,
                   cancellation: Cancellation) -> Connection:
    """Return a connection to rank 0, which has the same version."""
    refusal, is_of_protocol = "", False
    while True:
        sock = _connected(address, deadline, cancellation, refusal)
        try:
            with cancellation.watch(sock):
                until = min(deadline, time.monotonic() + HANDSHAKE_SECONDS)
                connection, peer = greet_rank_0(sock, Greeting(own.rank, own.version), address.key, frame_limit, until)
        except (OSError, ProtocolError) as error:
            sock.close()
            cancellation.check()
            if isinstance(error, ProtocolError) or not is_of_protocol:  # an attempt that is cut short explains less
                refusal, is_of_protocol = str(error), isinstance(error, ProtocolError)
            if time.monotonic() >= deadline:
                raise LaunchError(f"this rank could not join the job at {address}: {refusal}") from error
            time.sleep(RETRY_SECONDS)
            continue
        except BaseException:
            sock.close()
            raise
        if peer.version != Greeting(own.rank, own.version).version:
            sock.close()
            raise LaunchError(f"rank {own.rank} runs hvdlite {own.version}, rank 0 (at {address}) runs {peer.version}; "
                              "install the same version everywhere")
        connection.start()
        return connection


def _checked(message: Message, address: Address, own: RankInfo) -> Welcome:
    """Return rank 0's answer, when it is a welcome to the world that this rank belongs to."""
    if not isinstance(message, Welcome):
        raise LaunchError(f"{address} is not a coordinator")
    if message.refusal:
        raise LaunchError(message.refusal)
    if message.epoch != own.epoch:
        raise LaunchError(f"rank 0 at {address} belongs to membership epoch {message.epoch}, this rank to {own.epoch}")
    return message


def _connected(address: Address, deadline: float, cancellation: Cancellation, refusal: str) -> socket.socket:
    """Return a connection.

    Args:
        refusal: why those before were given up: more informative than that nobody listens any more; "" for the first one.

    Raises:
        LaunchError: when there is none before the deadline.
    """
    pause = FIRST_RETRY_SECONDS
    while True:
        cancellation.check()
        try:
            family, target = address.resolved()
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(max(0.1, min(CONNECT_SECONDS, deadline - time.monotonic())))
                if address.path:
                    connect_unix(sock, target)
                else:
                    sock.connect(target)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            except (OSError, ProtocolError):
                sock.close()
                raise
        except (OSError, ProtocolError) as error:
            if time.monotonic() >= deadline:
                raise LaunchError(f"this rank could not join the job at {address}: {refusal}" if refusal else
                                  f"cannot reach rank 0 at {address}: {error}; has its process started?") from error
        time.sleep(pause)
        pause = min(2 * pause, RETRY_SECONDS)


def _one_message(connection: Connection, deadline: float) -> Message:
    """Block until the next message, or the deadline."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    while not (messages := connection.receive()):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("rank 0 does not answer")
        poller.poll(poll_timeout(left))
    connection.unreceive(messages[1:])
    return messages[0]
