"""The hosts of an elastic job: which of those that are known can be used.

A host is a name with slots; several names may mean this machine. A new host is reached in the background. One that cannot be
reached is tried again, after longer and longer times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import math
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from hvdlite.core.errors import LaunchError
from hvdlite_runner.placement import LOCAL, LOCAL_NAMES

RETRY_SECONDS: Final = (2.0, 60.0)
"""Seconds until a host is tried again: the first time, and at most; doubled each time."""
AFTER_LOSS_SECONDS: Final = 5.0
"""Seconds until a lost host is tried again, besides those for which its agent may wait for a launcher that is silent."""


class Link(Protocol):
    """An agent: the part of `RemoteAgent` that is needed here."""

    def mark_lost(self, reason: str) -> None:
        """Count the host as lost."""

    def failure_reason(self) -> str:
        """Return the reason for the end of the link."""


@dataclasses.dataclass
class _Known:
    """A host that has been discovered once."""

    is_local: bool | None = None  # None: not known yet
    link: Link | None = None
    is_ready: bool = False
    was_tried: bool = False
    until: float = 0.0  # while it is reached: when that takes too long
    retry_at: float = 0.0
    failures: int = 0
    problem: str = ""  # why it cannot be reached


class HostPool:
    """The hosts of a job.

    Args:
        selector: its keys' `data` are functions to call when the descriptor is ready.
        is_local: whether a name means this machine; may ask the resolver, so other threads call it.
        reach: starts the agent of a host.
        leave: closes the link to a host.
        note: called with a line for the user, once for each reason why a host cannot be reached.
        start_timeout: seconds for an agent to start.
        silence: seconds until both sides of a cut link have noticed it; by then the agent has ended what ran there.
    """

    def __init__(self, selector: selectors.BaseSelector, is_local: Callable[[str], bool], reach: Callable[[str], Link],
                 leave: Callable[[Link], None], note: Callable[[str], None], start_timeout: float,
                 silence: float) -> None:
        self._selector, self._is_local, self._reach, self._leave = selector, is_local, reach, leave
        self._note, self._start_timeout = note, start_timeout
        self._after_loss = AFTER_LOSS_SECONDS + (0.0 if math.isinf(silence) else silence)
        self._slots: dict[str, int] = {}
        self._has_slots = False
        self._hosts: dict[str, _Known] = {}
        self._told: dict[str, int] | None = None
        self._resolved: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        selector.register(self._wake_reader, selectors.EVENT_READ, self._take_resolved)

    def set_slots(self, slots: Mapping[str, int]) -> None:
        """Take in what discovery has found."""
        self._slots, self._has_slots = dict(slots), True
        for name in slots:
            if name not in self._hosts:
                self._hosts[name] = _Known()
                self._resolve(name)

    def turn(self, now: float, in_use: Callable[[str], bool]) -> dict[str, int] | None:
        """Do what is due; return the slots of the hosts that can be used when they have changed, else None.

        Nothing is returned before each of the first hosts has been tried.

        Args:
            in_use: whether a host still has members.
        """
        for name, host in self._hosts.items():
            if host.is_local is not False:
                continue
            if host.link is not None and not host.is_ready and now >= host.until:
                host.link.mark_lost(f"did not start its agent within {self._start_timeout:.0f} s (--start-timeout)")
                self.unreached(host.link, now)
            if name in self._slots and host.link is None and now >= host.retry_at:
                self._try(name, host, now)
            elif name not in self._slots and host.link is not None and not in_use(name):
                self._forget(host)
        if not self._has_slots or (self._told is None and not all(self._hosts[name].was_tried for name in self._slots)):
            return None
        usable = {name: count for name, count in self._slots.items() if self._hosts[name].is_ready}
        if self._told is not None and list(usable.items()) == list(self._told.items()):
            return None
        self._told = usable
        return usable

    def wait(self, now: float) -> float | None:
        """Return the seconds until the next call is due."""
        times = [host.until if host.link is not None else host.retry_at for name, host in self._hosts.items()
                 if host.is_local is False and not host.is_ready and (host.link is not None or name in self._slots)]
        return max(0.0, min(times) - now) if times else None

    def machine_of(self, name: str) -> str:
        """Return the machine of a host: `LOCAL` for this one."""
        host = self._hosts.get(name)
        return LOCAL if host is not None and host.is_local else name

    def slots_of(self, machine: str) -> dict[str, int]:
        """Return the known hosts of a machine, and their slots."""
        return {name: count for name, count in self._slots.items() if self.machine_of(name) == machine}

    def problems(self) -> list[str]:
        """Return why hosts cannot be used, a line for each."""
        return [host.problem for name, host in self._hosts.items() if name in self._slots and host.problem]

    def ready(self, link: Link) -> None:
        """Take in that an agent has started."""
        for host in self._hosts.values():
            if host.link is link:
                host.is_ready = host.was_tried = True
                host.failures, host.problem = 0, ""

    def unreached(self, link: Link, now: float) -> None:
        """Take in that a host cannot be reached."""
        for host in self._hosts.values():
            if host.link is link:
                self._failed(host, link.failure_reason(), now)
                self._leave(link)

    def lost(self, link: Link, now: float) -> None:
        """Take in that a host that was used cannot be reached any more."""
        for host in self._hosts.values():
            if host.link is link:
                self._forget(host)
                host.retry_at = now + self._after_loss

    def close(self) -> None:
        """Stop waiting for the resolver."""
        self._selector.unregister(self._wake_reader)
        self._wake_reader.close()
        self._wake_writer.close()

    def _resolve(self, name: str) -> None:
        if name in LOCAL_NAMES or name == socket.gethostname() or _is_address(name):
            return self._set_local(name, self._is_local(name))

        def ask() -> None:
            self._resolved.put((name, self._is_local(name)))
            with contextlib.suppress(OSError):  # the job has ended meanwhile
                self._wake_writer.send(b"!")

        threading.Thread(target=ask, name="hvdrun-resolve", daemon=True).start()

    def _take_resolved(self) -> None:
        self._wake_reader.recv(4096)
        while not self._resolved.empty():
            self._set_local(*self._resolved.get())

    def _set_local(self, name: str, is_local: bool) -> None:
        host = self._hosts[name]
        host.is_local = host.is_ready = host.was_tried = is_local

    def _try(self, name: str, host: _Known, now: float) -> None:
        try:
            host.link, host.until = self._reach(name), now + self._start_timeout
        except LaunchError as error:
            self._failed(host, f"host {name}: {error}", now)

    def _failed(self, host: _Known, problem: str, now: float) -> None:
        if problem != host.problem:
            self._note(f"{problem}; it is tried again")
        host.link, host.is_ready, host.was_tried, host.problem = None, False, True, problem
        host.retry_at = now + min(RETRY_SECONDS[0] * 2 ** host.failures, RETRY_SECONDS[1])
        host.failures += 1

    def _forget(self, host: _Known) -> None:
        link, host.link, host.is_ready = host.link, None, False
        if link is not None:
            self._leave(link)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
