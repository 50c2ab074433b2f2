"""The control plane between processes: stream sockets to rank 0 or to a leader, a doorbell per rank, a pidfd per peer.

On one host all ranks are connected to rank 0. On several hosts, each host's leader is connected to rank 0, and the host's
other ranks to their leader (`LeaderControl`).

How a death is detected (docs/protocol.md#detection, #first-failure)
- On the same host by a pidfd: the kernel reports the end of a process immediately, even when a forked worker still holds the
  socket. On other hosts by the end of the connection, or by missing heartbeats. Heartbeats travel on TCP connections only,
  so an idle job on one host uses no CPU.
- Rank 0 reports what it sees to all ranks. Another rank that sees a peer die waits for rank 0's report first, because only
  that names the origin. It declares the death itself after `GRACE_SECONDS`, or immediately, if the dead peer would have
  relayed rank 0's report.
- A peer is declared dead only when its socket has been read empty, because its last message may explain the death.

How a failure travels under leaders (docs/protocol.md#leaders)
- A leader reports the end of a rank of its host to rank 0, and forwards the decision that follows, like any other.
- When a leader is the first to know of a failure, for instance because rank 0 is lost, it announces it to the ranks of its
  host itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import select
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hvdlite.control.doorbell import Doorbell
from hvdlite.control.wire import Connection, Encoded, Heartbeat, encode
from hvdlite.core.errors import ProtocolError
from hvdlite.core.system_limits import OUT_OF_DESCRIPTORS
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import Decision, DirectMessage, DirectMessages, HostReport, Message, RankReport, Report

yield_processor = ctypes.CDLL(None).sched_yield
"""Let another thread run, such as the script's. It releases the GIL, which `os.sched_yield` does since Python 3.13 only."""


@dataclasses.dataclass(frozen=True)
class HostReportReceived:
    """A report of the leader of the host of `ranks` arrived (on rank 0 only)."""

    ranks: tuple[int, ...]
    report: HostReport


@dataclasses.dataclass(frozen=True)
class PeerLost:
    """A rank is gone; `reason` describes how that was detected."""

    rank: int
    reason: str


Event = RankReport | HostReportReceived | Decision | DirectMessage | PeerLost
"""Rank 0 receives reports; it makes its decisions and direct messages itself, and the other ranks receive them."""

GRACE_SECONDS = 0.5
"""Seconds that a rank waits for rank 0's report of a death that it has seen itself."""
HEARTBEAT_SECONDS = 1.0
"""Seconds between heartbeats on TCP."""


class ControlPlane:
    """A rank's connections to its parent and its children. Only `wake` may be called outside the background thread.

    The background thread of a rank blocks in one place only: `wait`. It returns when a message arrived, when a peer was
    lost, or when this rank was woken (by a user thread with work, or by a peer that arrived at a barrier). So a wait in the
    middle of a collective notices a dead peer like any other wait.

    Attributes:
        parent: the rank that relays to and from rank 0: this host's leader, or rank 0 itself.
        children: the ranks for which this rank relays. They need it until they have left.

    Args:
        connections: on rank 0 one for each child; elsewhere one to its parent.
        doorbells: the doorbells of all ranks on this host, by rank.
        pids: process ids of the other ranks on this host.
        hosts: on rank 0: the ranks of each host with a leader, by leader.
    """

    children: frozenset[int] = frozenset()

    def __init__(self, rank: int, connections: Mapping[int, Connection], doorbells: Mapping[int, Doorbell],
                 pids: Mapping[int, int], *, heartbeat_timeout: float, parent: int = 0,
                 hosts: Mapping[int, tuple[int, ...]] | None = None) -> None:
        self.parent = parent
        self._rank = rank
        self._hosts = dict(hosts or {})
        # Of other ranks: the rank itself
        self._route = {rank: leader for leader, ranks in self._hosts.items() for rank in ranks}
        self._connections = dict(connections)
        self._doorbells = dict(doorbells)
        self._doorbell = doorbells[rank]
        self._heartbeat_timeout = heartbeat_timeout
        self._unsent: set[int] = set()  # peers whose sockets are polled for writability
        self._lost: set[int] = set()
        self._suspects: dict[int, float] = {}  # rank -> when to declare it dead
        self._tcp = {peer for peer, link in connections.items() if link.authenticated_by_key}
        self._last_received = dict.fromkeys(self._tcp, time.monotonic())
        self._next_heartbeat = time.monotonic() + HEARTBEAT_SECONDS
        self._events: list[Event] = []  # to be returned by the next `wait`
        self._poller = select.poll()
        self._poller.register(self._doorbell, select.POLLIN)
        self._peer_of = {connection.fileno(): peer for peer, connection in self._connections.items()}
        for descriptor in self._peer_of:
            self._poller.register(descriptor, select.POLLIN)
        self._pidfds = self._watch(pids)
        self._closed = False
        for peer, connection in list(self._connections.items()):
            connection.start()
            self._read(peer)  # a decision may have arrived right after the welcome

    def send_report(self, report: Report) -> None:
        """Send to rank 0; never blocks. Not called on rank 0."""
        self._send(self.parent, report)

    def send_decision(self, decision: Decision) -> None:
        """Send to all other ranks; never blocks. Only called on rank 0."""
        encoded = encode(decision)
        for peer in list(self._connections):
            self._send(peer, encoded)

    def send_direct_messages(self, messages: Sequence[DirectMessage]) -> None:
        """Send messages to single ranks; they arrive before decisions that are sent later. Like `send_decision`."""
        by_peer: defaultdict[int, list[DirectMessage]] = defaultdict(list)
        for message in messages:
            by_peer[self._route.get(message.rank, message.rank)].append(message)
        for peer, theirs in by_peer.items():
            self._send(peer, DirectMessages(tuple(theirs)))

    def wait(self, timeout: float | None, spin: float = 0.0) -> list[Event]:
        """Block until something happened or `timeout` seconds passed; return the events (none for a wake-up).

        Args:
            spin: seconds to poll before sleeping; waking up costs more time than most messages take.
        """
        if not self._events:
            self._handle(self._ready(timeout, spin))
            if self._suspects or self._tcp:
                self._check_timers()
        events, self._events = self._events, []
        return events

    def _ready(self, timeout: float | None, spin: float) -> list[tuple[int, int]]:
        """Return the descriptors that are ready, with their flags."""
        if spin and timeout != 0:
            until = time.perf_counter() + spin
            while time.perf_counter() < until:
                if ready := self._poller.poll(0):
                    return ready
                yield_processor()
        if self._suspects or self._tcp:
            timeout = max(0.0, self._deadline(timeout) - time.monotonic())
        return self._poller.poll(None if timeout is None else timeout * 1000)

    def wake(self) -> None:
        """Make the current or next `wait` return; callable from any thread and from signal handlers."""
        if not self._closed:
            self._doorbell.ring()

    def wake_rank(self, rank: int) -> None:
        """Make the `wait` of another rank on this host return."""
        self._doorbells[rank].ring()

    def flush(self, timeout: float) -> None:
        """Block until everything sent has been handed to the operating system, or `timeout` seconds passed."""
        until = time.monotonic() + timeout
        while any(link.wants_to_send for link in self._connections.values()) and time.monotonic() < until:
            self._handle(self._poller.poll(50))

    def close(self) -> None:
        """Release every descriptor; further calls are errors, except `wake` and `close`."""
        for connection in self._connections.values():
            connection.close()
        self.close_in_child()

    def close_in_child(self) -> None:
        """In a forked child: close its copies of the descriptors, leaving the parent's connections alone."""
        if self._closed:
            return
        self._closed = True
        for connection in self._connections.values():
            connection.close_in_child()
        for doorbell in self._doorbells.values():
            doorbell.close()
        for descriptor in self._pidfds:
            os.close(descriptor)
        self._connections, self._pidfds = {}, {}

    def _watch(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return pidfd -> rank for the peers that can be watched."""
        watched: dict[int, int] = {}
        for peer, pid in pids.items():
            if not hasattr(os, "pidfd_open"):
                break  # not Linux: the end of the connection has to do
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._suspect(peer, "its process had ended before the job started")
                continue
            except OSError as error:
                if error.errno in OUT_OF_DESCRIPTORS:
                    raise
                continue  # not permitted here: the end of the connection has to do
            watched[descriptor] = peer
            self._poller.register(descriptor, select.POLLIN)
        return watched

    def _handle(self, ready: Iterable[tuple[int, int]]) -> None:
        ended: list[int] = []
        for descriptor, flags in ready:
            if descriptor == self._doorbell.fileno():
                self._doorbell.clear()
            elif descriptor in self._pidfds:
                ended.append(descriptor)
            elif descriptor in self._peer_of:
                self._handle_socket(self._peer_of[descriptor], flags)
        for descriptor in ended:  # after all sockets: a last message may explain it
            peer = self._pidfds.pop(descriptor)
            self._poller.unregister(descriptor)
            os.close(descriptor)
            self._read(peer)
            self._suspect(peer, "its process ended without leaving the job (killed or crashed)")

    def _handle_socket(self, peer: int, flags: int) -> None:
        if flags & select.POLLOUT:
            try:
                self._connections[peer].push()
            except OSError as error:
                self._drop_after_reading(peer, f"connection broken: {error}")
                return
            self._watch_writes(peer)
        if flags & ~select.POLLOUT:
            self._read(peer)

    def _read(self, peer: int) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        try:
            messages = connection.receive()
        except (EOFError, OSError) as error:
            self._drop(peer, f"its connection ended ({error})")
            return
        except ProtocolError as error:
            self._drop(peer, f"its connection is corrupt: {error}")
            return
        self._receive(peer, messages)

    def _receive(self, peer: int, messages: Sequence[Message]) -> None:
        if peer in self._tcp:
            self._last_received[peer] = time.monotonic()
        for message in messages:
            self._events.extend(self._events_of(peer, message))

    def _events_of(self, peer: int, message: Message) -> list[Event]:
        """Return the events of a peer's message."""
        from_parent = self._rank != 0 and peer == self.parent
        match message:
            case Heartbeat():
                return []
            case Report() if self._rank == 0 and peer not in self._hosts:
                return [RankReport(peer, message)]
            case HostReport() if peer in self._hosts:
                return [HostReportReceived(self._hosts[peer], message)]
            case Decision() if from_parent:
                return [message]
            case DirectMessages(messages) if from_parent:
                return [message for message in messages if message.rank == self._rank]
        return [PeerLost(peer, f"it sent a {type(message).__name__} out of place")]

    def _send(self, peer: int, message: Message | Encoded) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return  # already lost; that event is on its way
        try:
            connection.send(message)
        except OSError as error:
            self._drop_after_reading(peer, f"connection broken: {error}")
            return
        if connection.wants_to_send or peer in self._unsent:
            self._watch_writes(peer)

    def _watch_writes(self, peer: int) -> None:
        connection = self._connections[peer]
        if connection.wants_to_send:
            self._unsent.add(peer)
            self._poller.modify(connection.fileno(), select.POLLIN | select.POLLOUT)
        else:
            self._unsent.discard(peer)
            self._poller.modify(connection.fileno(), select.POLLIN)

    def _drop_after_reading(self, peer: int, reason: str) -> None:
        """Drop a peer to which sending failed, after its last messages, which may say why."""
        with contextlib.suppress(EOFError, OSError, ProtocolError):  # `reason` came first
            while messages := self._connections[peer].receive():
                self._receive(peer, messages)
        self._drop(peer, reason)

    def _drop(self, peer: int, reason: str) -> None:
        connection = self._connections.pop(peer)
        self._poller.unregister(connection.fileno())
        del self._peer_of[connection.fileno()]
        connection.close()
        self._tcp.discard(peer)
        self._suspect(peer, reason)

    def _suspect(self, peer: int, reason: str) -> None:
        """Declare a death immediately when no rank 0 can report it, else after the grace period."""
        if self._rank == 0 or peer == self.parent:
            self._declare_lost(peer, reason)
        else:
            self._suspects.setdefault(peer, time.monotonic() + GRACE_SECONDS)

    def _declare_lost(self, peer: int, reason: str) -> None:
        if peer not in self._lost:
            self._lost.add(peer)
            self._events.append(PeerLost(peer, reason))

    def _check_timers(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer, when in self._suspects.items() if now >= when]:
            del self._suspects[peer]
            self._declare_lost(peer, "its process ended, and rank 0 did not say why")
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            for peer in list(self._tcp):
                self._send(peer, Heartbeat())
        for peer in list(self._tcp):
            silent = now - self._last_received[peer]
            if silent > self._heartbeat_timeout:
                self._drop(peer, f"it has been silent for {silent:.0f} s (HVDLITE_HEARTBEAT_TIMEOUT)")

    def _deadline(self, timeout: float | None) -> float:
        """Return when a timer expires next; there are suspects or heartbeats."""
        times = list(self._suspects.values())
        if timeout is not None:
            times.append(time.monotonic() + timeout)
        if self._tcp:
            times.append(self._next_heartbeat)
        return min(times)


class LeaderControl(ControlPlane):
    """The control plane of a host's leader, which relays between rank 0 and the ranks of its host.

    It merges the reports of the host's ranks, its own included (`negotiation.leader`), and forwards decisions unchanged.
    Both happen while the background thread waits, also in the middle of a collective, and are no events to this rank.

    Args:
        connections: to rank 0 and to each other rank of the host.
    """

    def __init__(self, leader: Leader, connections: Mapping[int, Connection], doorbells: Mapping[int, Doorbell],
                 pids: Mapping[int, int], *, heartbeat_timeout: float) -> None:
        rank, *others = leader.ranks
        self._leader = leader
        self.children = frozenset(others)
        super().__init__(rank, connections, doorbells, pids, heartbeat_timeout=heartbeat_timeout)
        self._send_up()

    def send_report(self, report: Report) -> None:
        self._leader.receive(self._rank, report)
        self._send_up()
        if report.failure is not None:
            self._send_down(Decision(epoch=report.epoch, sequence=0, failure=report.failure))

    def _handle(self, ready: Iterable[tuple[int, int]]) -> None:
        super()._handle(ready)
        self._send_up()

    def _events_of(self, peer: int, message: Message) -> list[Event]:
        match message:
            case Report() if peer in self.children:
                self._leader.receive(peer, message)
                return []
            case Decision() if peer == self.parent:
                self._leader.observe(message)
                self._send_down(message)
            case DirectMessages(messages) if peer == self.parent:
                self.send_direct_messages([message for message in messages if message.rank in self.children])
        return super()._events_of(peer, message)

    def _suspect(self, peer: int, reason: str) -> None:
        if peer in self.children:
            self._leader.lose(peer, reason)
        super()._suspect(peer, reason)

    def _send_up(self) -> None:
        report = self._leader.take_report()
        if report is not None:
            self._send(self.parent, report)

    def _send_down(self, decision: Decision) -> None:
        encoded = encode(decision)
        for peer in self.children:
            self._send(peer, encoded)
