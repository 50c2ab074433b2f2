"""The agent on another host: takes messages of the launcher on standard input, sends events on standard output.

Rules
- The job on this host ends when the launcher ends, when the link is cut (no order, not even a ping, for as many seconds as
  the knob `agent_timeout` allows) and on a `Stop` order: all its processes are killed and its directory is removed. If the
  agent itself is killed, or is stopped for twice that time, its reaper does this. When the launcher of an elastic job ends,
  the ranks get SIGTERM and their grace before that.
- The agent never blocks on the link: while the launcher does not read, or reports that its own reader is slow, the ranks'
  output stays in their pipes.
"""

from __future__ import annotations

import math
import os
import platform
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Final

from hvdlite._version import __version__
from hvdlite.core.errors import LaunchError, ProtocolError
from hvdlite.core.sockets import HeldPort
from hvdlite.core.standstill import standstill
from hvdlite.membership.events import Kill, Look, SendOrder
from hvdlite_runner.agents import host_probe
from hvdlite_runner.agents.remote_agent import PROBLEM_CODE
from hvdlite_runner.host.commands import cores
from hvdlite_runner.host.worker_group import KILL_SECONDS, WorkerGroup
from hvdlite_runner.messages import (
    FORWARDED,
    MAGIC,
    AgentDone,
    AgentFrames,
    AgentReady,
    Event,
    Exited,
    HostInfoReply,
    HostInfoRequest,
    HostNoticed,
    Pause,
    Ping,
    Pong,
    ProbeReply,
    ProbeRequest,
    ProgressRequest,
    Result,
    RouteReply,
    RouteRequest,
    Signal,
    SpeedReply,
    SpeedRequest,
    Start,
    Stop,
    TaskPiece,
    frame,
)

_CHECK_SECONDS: Final = 1.0
_LAUNCHER_ENDED: Final = "hvdrun has ended"
_FULL, _EMPTY = 4 << 20, 1 << 20  # bytes waiting for the launcher: stop reading from the ranks, and resume


class Agent:
    """The agent: runs the ranks of one host on the launcher's orders.

    Args:
        orders: descriptor to read from.
        events: descriptor to write to.
        silence: of the launcher, in seconds, after which it counts as gone; may be infinite.
    """

    def __init__(self, orders: int, events: int, environ: Mapping[str, str], silence: float) -> None:
        self._in = orders
        self._out = events
        self._silence = silence
        os.set_blocking(orders, False)
        os.set_blocking(events, False)
        self._environ = environ
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ, self._receive)
        self._workers = WorkerGroup(self._selector, self._send, environ)
        self._frames = AgentFrames(events=False)
        self._unsent = bytearray(MAGIC)
        self._last_received = time.monotonic()
        self._ending = False
        self._reason = ""  # why it ends, if the launcher has not ordered it to
        self._signals: list[int] = []  # that have come, in order
        self._asked, self._ends_at = "", math.inf  # by which signal to end, when the ranks have, or then
        self._grace = 0.0  # of the ranks
        self._is_elastic = False
        self._launcher_pauses = False
        self._probe_server: host_probe.ProbeServer | None = None
        self._held_ports: tuple[HeldPort, ...] = ()  # at which rank 0 will listen

    def run(self) -> None:
        """Handle orders and the ranks' events until the job ends."""
        self._workers.prepare(2 * self._silence)
        self._wake_for_signals()
        try:
            self._send(AgentReady(platform.python_version(), __version__, socket.gethostname(), cores(), os.getpid()))
            while not self._ending:
                turn, wait = time.monotonic(), min(_CHECK_SECONDS, self._workers.wait())
                for key, _ in self._selector.select(wait):
                    key.data()
                self._workers.notice()
                now = time.monotonic()
                self._answer_signals(now)
                self._last_received = min(now, self._last_received + standstill(turn, now, wait))
                if now - self._last_received > self._silence:
                    self._end(f"it had heard nothing of hvdrun for {self._silence:g} s")
        finally:
            self._workers.end()
        self._send(AgentDone(self._reason))
        self._wait_for_launcher(0)

    def _wake_for_signals(self) -> None:
        """Install handlers: SIGCHLD wakes the loop for adopted orphans; others are for the ranks (`_answer_signals`)."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, *FORWARDED):
            signal.signal(signum, lambda number, frame: self._signals.append(number))
        self._selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))

    def _answer_signals(self, now: float) -> None:
        """Pass signals on to the ranks, as hvdrun does. After one to end, end with them, or when their grace is over.

        In an elastic job one to end is a notice: the ranks leave, and the launcher orders this agent to end.
        """
        while self._signals:
            signum = self._signals.pop(0)
            if signum in FORWARDED:
                self._workers.obey(Signal(signum))
            elif self._asked:
                self._ends_at = now
            else:
                name = signal.Signals(signum).name
                self._asked, self._ends_at = f"it got {name}", now + self._grace
                if self._is_elastic:
                    self._ends_at += KILL_SECONDS  # the launcher kills those that are late
                    self._send(HostNoticed(f"hvdrun's agent got {name}", self._grace))
                else:
                    self._workers.obey(Signal(signal.SIGTERM))
        if self._asked and (now >= self._ends_at or not (self._is_elastic or self._workers.running)):
            self._end(self._asked)

    def _end(self, reason: str) -> None:
        self._ending, self._reason = True, reason

    def _lose_launcher(self) -> None:
        """End; in an elastic job when the ranks have ended, or their grace is over."""
        self._unsent.clear()
        if self._is_elastic and not self._asked:
            self._selector.unregister(self._in)
            self._asked, self._ends_at, self._silence = _LAUNCHER_ENDED, time.monotonic() + self._grace, math.inf
            self._is_elastic = False  # nobody orders worlds
            self._workers.obey(Signal(signal.SIGTERM))
        elif self._asked != _LAUNCHER_ENDED:
            self._ending = True

    def _receive(self) -> None:
        try:
            content = os.read(self._in, 1 << 16)
        except BlockingIOError:
            return
        if not content:
            self._lose_launcher()
            return
        for order in self._frames.feed(content):
            self._obey(order)
        self._last_received = time.monotonic()

    def _obey(self, order: object) -> None:
        if isinstance(order, (Start, TaskPiece, Kill, Look, SendOrder, Signal)):
            if isinstance(order, Start):
                self._grace, self._is_elastic = order.grace, order.is_elastic
                self._free_port()
            self._workers.obey(order)
        elif isinstance(order, Pause):
            self._launcher_pauses = order.paused
            self._push()
        elif isinstance(order, Stop):
            self._ending = True
        elif isinstance(order, Ping):
            self._send(Pong())
        elif isinstance(order, RouteRequest):
            self._send(self._route(order))
        elif isinstance(order, ProbeRequest):
            self._send(ProbeReply(host_probe.probe(order.addresses, order.port)))
        elif isinstance(order, HostInfoRequest):
            self._send(HostInfoReply(host_probe.host_info(self._environ)))
        elif isinstance(order, SpeedRequest):
            try:
                self._send(SpeedReply(*host_probe.speed(order.addresses, order.port)))
            except OSError as error:
                self._send(SpeedReply(0.0, 0.0, str(error)))
        elif isinstance(order, ProgressRequest):
            self._send(self._workers.sample())

    def _free_port(self) -> None:
        """Stop listening for probes: rank 0 will listen there."""
        if self._probe_server is not None:
            self._probe_server.close()
            self._held_ports, self._probe_server = (self._probe_server.held, self._probe_server.store), None

    def _route(self, order: RouteRequest) -> RouteReply:
        if not order.listen:
            return RouteReply(host_probe.own_addresses(order.hosts, order.interfaces), 0)
        if self._probe_server is None:
            try:
                self._probe_server = host_probe.ProbeServer(order.port)
            except OSError as error:
                return RouteReply([], 0, f"cannot listen on port {order.port}: {error.strerror}")
        return RouteReply(host_probe.own_addresses(order.hosts, order.interfaces), self._probe_server.port,
                          store_port=self._probe_server.store.port)

    def _send(self, event: Event) -> None:
        was_asked = bool(self._asked) and not self._is_elastic
        if isinstance(event, Exited) and (self._reason or (was_asked and event.code == -signal.SIGTERM)):
            return  # it was killed because of this reason
        self._unsent += frame(event)
        self._push()
        if isinstance(event, Result):
            self._wait_for_launcher(_FULL)  # a result may be larger than the memory for it

    def _wait_for_launcher(self, allowed: int) -> None:
        """Wait until at most so many bytes are unsent, as long as the launcher takes any."""
        left, until = len(self._unsent), time.monotonic() + self._silence
        while len(self._unsent) > allowed and time.monotonic() < until:
            select.select([], [self._out], [], _CHECK_SECONDS)
            self._push()
            if len(self._unsent) < left:
                self._last_received = time.monotonic()  # its pings are read later
                left, until = len(self._unsent), self._last_received + self._silence

    def _push(self) -> None:
        """Write events while the launcher reads; while it does not, stop reading from the ranks."""
        try:
            while self._unsent:
                written = os.write(self._out, self._unsent[:1 << 16])
                del self._unsent[:written]
        except BlockingIOError:
            pass
        except OSError:
            self._lose_launcher()  # it has closed its end
        waiting = self._out in self._selector.get_map()
        if self._unsent and not waiting:
            self._selector.register(self._out, selectors.EVENT_WRITE, self._push)
        elif waiting and not self._unsent:
            self._selector.unregister(self._out)
        if len(self._unsent) > _FULL or self._launcher_pauses:
            self._workers.pause(True)
        elif len(self._unsent) < _EMPTY:
            self._workers.pause(False)


def main(silence: float) -> None:
    """Run an agent on this process's standard input and output; anything else written there goes to standard error.

    Args:
        silence: of the launcher, in seconds, after which it counts as gone.
    """
    orders, events = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    try:
        Agent(orders, events, os.environ, silence).run()
    except (ProtocolError, LaunchError) as error:
        what = str(error) if isinstance(error, LaunchError) else f"cannot read the launcher's messages: {error}"
        print(f"hvdlite: {what}", file=sys.stderr)
        raise SystemExit(PROBLEM_CODE) from None

