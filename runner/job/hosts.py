"""The hosts of a job: which of those that are known can be used, and the links to them.

A host is a name with slots; several names may mean this machine. All others are reached at once, in the background: a remote
shell starts an agent there (`agents/remote_agent.py`). A host that cannot be reached is tried again, after longer and longer
times, unless the job needs all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import math
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from hvdlite.core.errors import LaunchError
from hvdlite.core.standstill import standstill
from hvdlite.core.system_limits import reserve_descriptors
from hvdlite_runner.agents.remote_agent import AGENT_TIMEOUT, Pinger, RemoteAgent, bootstrap_input
from hvdlite_runner.host.commands import current_directory
from hvdlite_runner.host.worker_group import WorkerGroup
from hvdlite_runner.job.ending import Ending
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.messages import AgentReady, Event, Order, Pause, Stop
from hvdlite_runner.placement import LOCAL, LOCAL_NAMES, Host

RETRY_SECONDS: Final = (2.0, 60.0)
"""Seconds until a host is tried again: the first time, and at most; doubled each time."""
AFTER_LOSS_SECONDS: Final = 5.0
"""Seconds until a lost host is tried again, besides those for which its agent may wait for a launcher that is silent."""
ANSWER_SECONDS: Final = 60.0
"""Seconds for the answers to `HostPool.ask`."""
_DESCRIPTORS: Final = 3
"""Descriptors of a link: its two directions, and the file with its errors."""
_CHECK_SECONDS: Final = 1.0  # between checks for silent hosts
_TURN: Final = 0.5

Answer = TypeVar("Answer", bound=Event)


class Stopped(Exception):
    """Raised by a wait when the user has ended the job."""


@dataclasses.dataclass
class _Known:
    """A host that has been discovered once."""

    is_local: bool | None = None  # None: not known yet
    remote: RemoteAgent | None = None
    was_tried: bool = False
    until: float = 0.0  # while it is reached: when that takes too long
    retry_at: float = 0.0
    failures: int = 0
    problem: str = ""  # why it cannot be reached

    @property
    def is_usable(self) -> bool:
        """Whether processes can be started there."""
        return bool(self.is_local) or (self.remote is not None and self.remote.ready is not None)


class HostPool:
    """The hosts of a job.

    Args:
        selector: its keys' `data` are functions to call when the descriptor is ready.
        settings: of the job.
        inherited: the launcher's environment.
        take: called with (name, event) for each event of another host.
        lost: called with (name, reason) when the link to a host that was reached has ended; its processes end by themselves.
        note: called with lines for the user.
        local: the processes of this host, with whose end the remote shells end.
        ending: when the user has ended the job, nothing is waited for.
        checks_silence: whether hosts from which nothing comes count as lost. An agent that collects facts for
            `hvdrun --doctor` does not answer pings meanwhile.
    """

    def __init__(self, selector: selectors.BaseSelector, settings: JobSettings, inherited: Mapping[str, str], *,
                 take: Callable[[str, Event], None] = lambda name, event: None,
                 lost: Callable[[str, str], None] = lambda name, reason: None, note: Callable[[str], None] = print,
                 local: WorkerGroup | None = None, ending: Ending | None = None, checks_silence: bool = True) -> None:
        self._selector = selector
        self._settings = settings
        self._inherited = inherited
        self._take = take
        self._lost = lost
        self._note = note
        self._local = local
        self._ending = ending
        self._checks_silence = checks_silence
        self._shell = settings.shell
        self._retries = not settings.limits.one_world
        self._after_loss = AFTER_LOSS_SECONDS + (0.0 if math.isinf(self._shell.silence) else self._shell.silence)
        self._discovered: Mapping[str, int] = {}
        self._left: set[str] = set()  # hosts that are not used until discovery has lost them
        self._slots: dict[str, int] = {}  # of the others
        self._has_slots = False
        self._hosts: dict[str, _Known] = {}
        self._reported: dict[str, int] | None = None  # what `turn` has returned last
        self._leaving: list[RemoteAgent] = []  # of hosts that are not used any more, until their shells have ended
        self._pinger: Pinger | None = None
        self._answers: dict[RemoteAgent, Any] = {}
        self._awaited: type[Any] | None = None
        self._last_check = -math.inf
        self._is_paused = self._is_over = False
        self._resolved: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        selector.register(self._wake_reader, selectors.EVENT_READ, self._take_resolved)

    # --- which hosts there are -----------------------------------------------------------------------------------------

    def set_slots(self, slots: Mapping[str, int]) -> None:
        """Take in what discovery has found."""
        self._left &= slots.keys()
        self._discovered, self._has_slots = slots, True
        self._slots = {name: count for name, count in slots.items() if name not in self._left}
        for name in self._slots:
            if name not in self._hosts:
                self._hosts[name] = _Known()
                self._resolve(name)

    def leave(self, names: Iterable[str]) -> None:
        """Use hosts no more until discovery has lost them and finds them again."""
        self._left.update(names)
        self.set_slots(self._discovered)

    def names(self) -> list[str]:
        """Return the hosts that are used or could be."""
        return list(self._slots)

    def turn(self, now: float, in_use: Callable[[str], object] = lambda name: ()) -> dict[str, int] | None:
        """Do what is due; return the slots of the hosts that can be used when they have changed, else None.

        Nothing is returned before each of the first hosts has been tried.

        Args:
            in_use: returns the processes of a host.

        Raises:
            LaunchError: when there are too few descriptors for the links.
        """
        due = []
        for name, host in self._hosts.items():
            if host.is_local is not False:
                continue
            if host.remote is not None and host.remote.ready is None and now >= host.until:
                host.remote.mark_lost(
                    f"did not start its agent within {self._settings.start_timeout:.0f} s (--start-timeout)")
                self._gone(host.remote)
            if name in self._slots and host.remote is None and now >= host.retry_at:
                due.append(name)
            elif name not in self._slots and host.remote is not None and not in_use(name):
                self._leave(host)
        if due:
            self._reach(due, now)
        if not self._has_slots or (self._reported is None and not all(self._hosts[name].was_tried for name in self._slots)):
            return None
        usable = {name: count for name, count in self._slots.items() if self._hosts[name].is_usable}
        if self._reported is not None and list(usable.items()) == list(self._reported.items()):
            return None
        self._reported = usable
        return usable

    def wait(self, now: float) -> float | None:
        """Return the seconds until the next `turn` is due."""
        times = [host.until if host.remote is not None else host.retry_at for name, host in self._hosts.items()
                 if host.is_local is False and not host.is_usable and (host.remote is not None or name in self._slots)]
        if self.remotes:
            times.append(now + _CHECK_SECONDS)
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else max(0.0, soonest - now)

    def machine_of(self, name: str) -> str:
        """Return the machine of a host: `LOCAL` for this one."""
        host = self._hosts.get(name)
        return LOCAL if host is not None and host.is_local else name

    def slots_of(self, machine: str) -> dict[str, int]:
        """Return the known hosts of a machine, and their slots."""
        return {name: count for name, count in self._slots.items() if self.machine_of(name) == machine}

    def problems(self) -> list[str]:
        """Return why hosts cannot be used: a line for each, and one where all have the same problem."""
        found = [host.problem for name, host in self._hosts.items() if name in self._slots and host.problem]
        return list(dict.fromkeys(found))

    # --- other hosts ---------------------------------------------------------------------------------------------------

    @property
    def remotes(self) -> list[RemoteAgent]:
        """The agents, also those that have not been reached yet."""
        return [host.remote for host in self._hosts.values() if host.remote is not None]

    def remote(self, machine: str) -> RemoteAgent | None:
        """Return the agent of a machine; None for this one, and for one that is not used any more."""
        host = self._hosts.get(machine)
        return None if host is None else host.remote

    def send(self, order: Order) -> None:
        """Send an order to all other hosts."""
        for remote in self.remotes:
            remote.send(order)

    def pause(self, paused: bool) -> None:
        """Stop reading the processes' output on all other hosts, or go on."""
        self._is_paused = paused
        self.send(Pause(paused))

    def ask(self, orders: Mapping[RemoteAgent, Order], kind: type[Answer],
            timeout: float = ANSWER_SECONDS) -> dict[RemoteAgent, Answer]:
        """Send orders and return the answers.

        Raises:
            LaunchError: with one line for each host without an answer.
            Stopped: when the user has ended the job.
        """
        for remote, order in orders.items():
            remote.send(order)
        self._answers, self._awaited = {}, kind
        until = time.monotonic() + timeout
        while time.monotonic() < until and not all(remote in self._answers or remote.over for remote in orders):
            self.take_events(min(_TURN, max(0.0, until - time.monotonic())))
            if self._ending is not None and self._ending.user_signal:
                raise Stopped
        self._awaited = None
        missing = [remote.failure_reason() if remote.over
                   else f"host {remote.host.name} did not answer within {timeout:.0f} s"
                   for remote in orders if remote not in self._answers]
        if missing:
            raise LaunchError("\n".join(missing))
        return self._answers

    def take_events(self, timeout: float | None) -> None:
        """Wait for descriptors of the selector, and handle what has happened; count silent hosts as lost."""
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) is key:  # not unregistered by an earlier one of this round
                key.data()
        for remote in [each for each in self._leaving if each.has_ended]:
            self._leaving.remove(remote)
            self._close(remote)
        now = time.monotonic()
        if self._checks_silence and now - self._last_check >= _CHECK_SECONDS and not self._is_over:
            self._check(now)
            self._last_check = now

    def stop(self) -> None:
        """Order all agents to end their processes."""
        self._is_over = True
        if self._pinger is not None:
            self._pinger.stop()
        for remote in self.remotes:
            if remote.ready is None:
                remote.close()  # nothing was started there
            else:
                remote.send(Stop())

    def end(self, timeout: float) -> None:
        """Wait until all agents have ended; those from which nothing comes for so many seconds are left."""
        remotes, until = [*self.remotes, *self._leaving], time.monotonic() + timeout
        while (left := [remote for remote in remotes if not remote.over]) \
                and time.monotonic() < max(until, *(remote.last_received + timeout for remote in left)):  # of large results
            self.take_events(_TURN)
        for remote in remotes:
            remote.close()
        self._selector.unregister(self._wake_reader)
        self._wake_reader.close()
        self._wake_writer.close()

    # --- how they are reached and left ---------------------------------------------------------------------------------

    def _reach(self, names: Sequence[str], now: float) -> None:
        if not self.remotes:
            self._last_check = now  # there was nothing to check before
        # Ctrl-Z is ignored from now on: a stopped launcher looks like a cut link to its agents.
        signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            directory = self._settings.working_directory or current_directory()
            bootstrap = bootstrap_input(directory, self._inherited, self._shell.silence)
            with reserve_descriptors(_DESCRIPTORS * len(names), f"reaching {len(names)} hosts"):
                for name in names:
                    self._start_agent(name, bootstrap, now)
        except LaunchError as error:
            if not self._retries:
                raise
            for name in names:
                self._failed(self._hosts[name], f"host {name}: {error}", now)
        self._ping()

    def _start_agent(self, name: str, bootstrap: bytes, now: float) -> None:
        host = self._hosts[name]
        try:
            remote = RemoteAgent(Host(name), self._shell, bootstrap, self._selector, self._receive, self._gone)
        except OSError as error:
            self._failed(host, f"cannot start {self._shell.program} to connect to other hosts: {error.strerror}", now)
        except LaunchError as error:
            self._failed(host, f"host {name}: {error}", now)
        else:
            host.remote, host.until = remote, now + self._settings.start_timeout
            if self._local is not None:
                self._local.watch(remote.pid)  # before it reaps orphans

    def _ping(self) -> None:
        if self._pinger is None:
            self._pinger = Pinger()  # from now on: the first agent may wait long for the last one
        self._pinger.remotes = self.remotes

    def _check(self, now: float) -> None:
        stood_still = standstill(self._last_check, now, _CHECK_SECONDS) if self.remotes else 0.0
        if stood_still:
            self._note(f"this process itself was busy or stood still for {stood_still:.0f} s")
        for remote in self.remotes:
            remote.last_received = min(now, remote.last_received + stood_still)  # it answers to the next ping
            if remote.timed_out(now):
                silent = now - remote.last_received
                remote.mark_lost(f"was lost: nothing has been heard of it for {silent:.0f} s ({AGENT_TIMEOUT})")
                self._gone(remote)
                continue
            if line := remote.silence_note(now):
                self._note(line)
            if self._is_paused:
                remote.send(Pause(True))  # it may be new

    def _receive(self, remote: RemoteAgent, event: Event) -> None:
        if self._awaited is not None and isinstance(event, self._awaited):
            self._answers[remote] = event
            return
        if isinstance(event, AgentReady):
            host = self._hosts[remote.host.name]
            host.was_tried, host.failures, host.problem = True, 0, ""
        self._take(remote.host.name, event)

    def _gone(self, remote: RemoteAgent) -> None:
        """Handle the end of a link."""
        name, now = remote.host.name, time.monotonic()
        host = self._hosts[name]
        if self._is_over or host.remote is not remote:
            return
        reason = remote.failure_reason()
        self._leave(host)
        if remote.ready is None:
            self._failed(host, reason, now)
        else:
            host.problem, host.retry_at = reason, now + self._after_loss if self._retries else math.inf
            self._lost(name, reason)

    def _failed(self, host: _Known, problem: str, now: float) -> None:
        if self._retries and problem != host.problem:
            self._note(f"{problem}; it is tried again")
        host.was_tried, host.problem = True, problem
        host.retry_at = now + min(RETRY_SECONDS[0] * 2 ** host.failures, RETRY_SECONDS[1]) if self._retries else math.inf
        host.failures += 1

    def _leave(self, host: _Known) -> None:
        """Close the link to a host; its agent ends all processes there."""
        remote, host.remote = host.remote, None
        assert remote is not None
        self._ping()
        if remote.over or remote.ready is None:
            self._close(remote)
        else:
            remote.send(Stop())
            self._leaving.append(remote)

    def _close(self, remote: RemoteAgent) -> None:
        remote.close()
        if self._local is not None:
            self._local.forget(remote.pid)

    def _resolve(self, name: str) -> None:
        if name in LOCAL_NAMES or name == socket.gethostname() or _is_address(name) or not self._retries:
            return self._set_local(name, self._settings.is_local(name))

        def ask() -> None:
            self._resolved.put((name, self._settings.is_local(name)))
            with contextlib.suppress(OSError):  # the job has ended meanwhile
                self._wake_writer.send(b"!")

        threading.Thread(target=ask, name="hvdrun-resolve", daemon=True).start()

    def _take_resolved(self) -> None:
        self._wake_reader.recv(4096)
        while not self._resolved.empty():
            self._set_local(*self._resolved.get())

    def _set_local(self, name: str, is_local: bool) -> None:
        self._hosts[name].is_local = self._hosts[name].was_tried = is_local


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
