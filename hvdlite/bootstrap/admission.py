"""Rank 0's side of the rendezvous: one thread authenticates connections and admits ranks, and never blocks on one of them.

A stranger costs rank 0 a descriptor for at most `HANDSHAKE_SECONDS`, and less when there are many: the oldest connection
that has not proved possession of the key is dropped; a rank to which this happens connects again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import select
import socket
import time
from collections.abc import Sequence
from typing import Final

from hvdlite.bootstrap.rendezvous import HANDSHAKE_SECONDS, Address, Cancellation, advertised_address
from hvdlite.control.handshake import Greeting, ServerHandshake
from hvdlite.control.wire import Connection, RankInfo, Welcome
from hvdlite.core.config import poll_timeout
from hvdlite.core.errors import HvdliteError, LaunchError, ProtocolError
from hvdlite.core.sockets import RefusedConnections, check_same_user
from hvdlite.core.system_limits import OUT_OF_DESCRIPTORS, reserve_descriptors

HALF_OPEN_LIMIT: Final = 64
"""Connections that may be in their handshake at once, besides one for each rank that is missing."""
_ACCEPTED_AT_ONCE: Final = 64
_OF_ANOTHER_JOB: Final = ("rank {0.rank} (process {0.pid}) has reached rank 0 of another job: their launchers' ids, keys or "
                          "job directories differ")


class MissingRanks(LaunchError):
    """Some ranks have not reached rank 0 in time."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclasses.dataclass
class _HalfOpen:
    """A connection that is not a rank's yet."""

    sock: socket.socket
    peer: str
    handshake: ServerHandshake
    deadline: float
    connection: Connection | None = None  # authenticated: its RankInfo is missing


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
    admission = Admission(own, address, frame_limit, use_leaders=use_leaders, cancellation=cancellation or Cancellation())
    try:
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
        return admission.connections, welcome
    except BaseException:
        for connection in admission.connections.values():
            connection.close()
        raise
    finally:
        admission.end()


class Admission:
    """Admits ranks to a world.

    Args:
        address: of rank 0.
        use_leaders: whether hosts are to have leaders, when there are several.
        cancellation: may end this from another thread.

    Attributes:
        connections: the ranks that have come.
        refusal: why there will be no world, "" as long as there may be one.
        refused: the log of strangers.
    """

    def __init__(self, own: RankInfo, address: Address, frame_limit: int, *, use_leaders: bool,
                 cancellation: Cancellation) -> None:
        self.connections: dict[int, Connection] = {}
        self.refusal = ""
        self.refused = RefusedConnections(address)
        self._own = own
        self._address = address
        self._key = address.key  # none on a Unix socket
        self._frame_limit = frame_limit
        self._use_leaders = use_leaders
        self._cancellation = cancellation
        self._infos = {own.rank: own}
        self._half_open: dict[int, _HalfOpen] = {}  # by descriptor, the oldest first
        self._poller = select.poll()

    def admit_all(self, listener: socket.socket, timeout: float) -> None:
        """Return when all ranks are there, or there is a reason to refuse them.

        Raises:
            MissingRanks: when some have not come in time.
            OSError: when there are no descriptors left, and no stranger has any.
        """
        deadline = time.monotonic() + timeout
        size = self._own.size
        listener.setblocking(False)
        self._poller.register(listener, select.POLLIN)
        with self._cancellation.watch(listener):
            while len(self.connections) < size - 1 and not self.refusal:
                now = time.monotonic()
                if now >= deadline:
                    missing = sorted(set(range(1, size)) - set(self.connections))
                    raise MissingRanks(f"ranks {missing} did not connect to {self._address} within {timeout:.0f} s "
                                       "(HVDLITE_START_TIMEOUT); did their processes start, and do they call init()?"
                                       f"{self.refused}", missing)
                self._drop_late(now)
                until = min([deadline, *(half_open.deadline for half_open in self._half_open.values())])
                ready = self._poller.poll(poll_timeout(until - now))
                self._cancellation.check()
                for descriptor, _ in ready:
                    if descriptor == listener.fileno():
                        self._accept(listener)
                    elif descriptor in self._half_open:
                        self._advance(self._half_open[descriptor])

    def end(self) -> None:
        """Nobody is admitted any more."""
        for half_open in list(self._half_open.values()):
            self._drop(half_open)
        self.refused.log_rest()

    def send_welcome(self) -> Welcome:
        """Answer those that have come; return the answer."""
        welcome = Welcome(refusal=self.refusal, epoch=self._own.epoch)
        if not self.refusal:
            ranks = [self._infos[rank] for rank in range(self._own.size)]
            welcome = Welcome(
                pids=tuple(info.pid for info in ranks), hosts=tuple(info.host for info in ranks),
                stack_dumps=tuple(info.stack_dump for info in ranks),
                advertised_address=advertised_address(self.connections.values()), clock=time.monotonic(),
                unavailable=_unavailable_somewhere(ranks),
                use_leaders=self._use_leaders and len({info.host for info in ranks}) > 1, epoch=self._own.epoch)
        for connection in self.connections.values():
            with contextlib.suppress(OSError):  # its end is seen later
                connection.send(welcome)
        return welcome

    # --- connections ---------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS and not self._make_room():
                    raise
                continue  # the peer has gone again, or there is room now
            self._take(sock, peer[0] if peer else "this host")

    def _take(self, sock: socket.socket, peer: str) -> None:
        try:
            if self._key:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            else:
                check_same_user(sock)
            handshake = ServerHandshake(sock, Greeting(0, self._own.version), self._key, self._frame_limit)
        except (OSError, HvdliteError) as error:
            sock.close()
            self.refused.note(peer, error)
            return
        if len(self._unproved()) >= HALF_OPEN_LIMIT + self._own.size - 1 - len(self.connections):
            self._make_room()
        self._half_open[sock.fileno()] = _HalfOpen(sock, peer, handshake, time.monotonic() + HANDSHAKE_SECONDS)
        self._poller.register(sock, select.POLLIN)

    def _advance(self, half_open: _HalfOpen) -> None:
        try:
            if half_open.connection is None:
                half_open.connection = half_open.handshake.advance()
                self._check_version(half_open)
                if half_open.connection is not None:
                    half_open.deadline = math.inf  # it is no stranger; this rank's own deadline holds
            if half_open.connection is not None and (messages := half_open.connection.receive()):
                info, *rest = messages
                if not isinstance(info, RankInfo):
                    raise ProtocolError(f"expected a RankInfo, got a {type(info).__name__}")
                if info.job != self._own.job:
                    half_open.connection.send(Welcome(refusal=_OF_ANOTHER_JOB.format(info), epoch=info.epoch))
                    raise ProtocolError(f"it is rank {info.rank} of another job")
                half_open.connection.unreceive(rest)
                self._forget(half_open)
                self._register(info, half_open.connection)
        except (OSError, EOFError, HvdliteError) as error:
            self._drop(half_open)
            if not self._cancellation.reason:
                self.refused.note(half_open.peer, error)

    def _check_version(self, half_open: _HalfOpen) -> None:
        """Give the world up when an authenticated process has another version: its messages may have another form."""
        peer, own = half_open.handshake.peer, Greeting(0, self._own.version).version
        if half_open.connection is not None and peer.version != own:
            self.refusal = (f"rank {peer.rank} (at {half_open.peer}) runs hvdlite {peer.version}, rank 0 runs {own}; "
                            "install the same version everywhere")
            raise ProtocolError(f"it runs hvdlite {peer.version}, rank 0 runs {own}")

    def _register(self, info: RankInfo, connection: Connection) -> None:
        own = self._own
        if info.size != own.size or not 0 < info.rank < own.size:
            self.refusal = (f"a process calls itself rank {info.rank} of {info.size}, but rank 0 was started as "
                            f"one of {own.size}; check the launch environment")
        elif info.epoch != own.epoch:
            self.refusal = (f"rank {info.rank} belongs to membership epoch {info.epoch}, rank 0 to {own.epoch}: "
                            "one of them is left over from an earlier start")
        elif info.rank in self.connections:
            self.refusal = f"two processes (pids {self._infos[info.rank].pid} and {info.pid}) are rank {info.rank}"
        elif info.settings != own.settings:
            (name, theirs), (_, ours) = next(pair for pair in zip(info.settings, own.settings, strict=True)
                                             if pair[0] != pair[1])
            self.refusal = f"rank {info.rank} has {name}={theirs}, rank 0 {ours}; set the same everywhere"
        self._infos[info.rank] = info
        self.connections[info.rank] = connection

    # --- strangers -----------------------------------------------------------------------------------------------------

    def _drop_late(self, now: float) -> None:
        for half_open in [each for each in self._half_open.values() if each.deadline <= now]:
            self._drop(half_open)
            self.refused.note(half_open.peer, TimeoutError(f"it did not end its handshake in {HANDSHAKE_SECONDS:.0f} s"))

    def _unproved(self) -> list[_HalfOpen]:
        return [half_open for half_open in self._half_open.values() if half_open.connection is None]

    def _make_room(self) -> bool:
        """Drop the oldest connection that may be a stranger's; return whether there is one."""
        if not (strangers := self._unproved()):
            return False
        self._drop(strangers[0])
        self.refused.note(strangers[0].peer, TimeoutError("there were too many connections that did not authenticate"))
        return True

    def _drop(self, half_open: _HalfOpen) -> None:
        self._forget(half_open)
        half_open.sock.close()

    def _forget(self, half_open: _HalfOpen) -> None:
        self._poller.unregister(half_open.sock)
        del self._half_open[half_open.sock.fileno()]


def _unavailable_somewhere(infos: Sequence[RankInfo]) -> tuple[tuple[str, str], ...]:
    """Return what any rank lacks, and why; the first rank's reason, with its number where it is not everybody's."""
    unavailable: dict[str, tuple[str, list[int]]] = {}
    for info in infos:
        for name, reason in info.unavailable:
            unavailable.setdefault(name, (reason, []))[1].append(info.rank)
    return tuple((name, reason if len(ranks) == len(infos) else f"on rank {ranks[0]}, {reason}")
                 for name, (reason, ranks) in unavailable.items())
