"""Hosts that are to be left: as agents report, and as `hvdrun --leave` asks for at a socket in hvdrun's own job directory.

Whoever asks sends the name of a host, and ends its side of the connection. It gets lines: `Answer`s; the last one has a
code, and comes when no process is left on the host. The directory belongs to the user alone, and other users are refused.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from hvdlite.core.errors import ProtocolError
from hvdlite.core.sockets import check_same_user, short_socket_path
from hvdlite.membership.events import MembersNoticed
from hvdlite_runner.job.ending import WorkerProcesses
from hvdlite_runner.job.hosts import HostPool
from hvdlite_runner.messages import HostNoticed
from hvdlite_runner.placement import LOCAL

LEAVE_SOCKET: Final = "leave.sock"
_LONGEST_NAME: Final = 4096
_REFUSED: Final = 2


class Answer(msgspec.Struct, frozen=True):
    """A line for whoever has asked; with the exit code if nothing follows."""

    text: str
    code: int | None = None


class HostNotices:
    """What is to be left, for the authority and the pool of hosts.

    Args:
        selector: its keys' `data` are functions to call when the descriptor is ready.
    """

    def __init__(self, selector: selectors.BaseSelector, hosts: HostPool, processes: WorkerProcesses) -> None:
        self._selector = selector
        self._hosts = hosts
        self._processes = processes
        self._events: list[MembersNoticed] = []
        self._listener: socket.socket | None = None
        self._waiting: list[tuple[socket.socket, str]] = []  # who has asked, and the host

    def listen(self, directory: str) -> None:
        """Serve `hvdrun --leave` from now on."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_socket_path(str(Path(directory) / LEAVE_SOCKET)) as path:
            self._listener.bind(path)
        self._listener.listen()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def take(self, machine: str, event: HostNoticed) -> None:
        """Take a notice of a machine. With hvdrun's own one the whole job goes."""
        if machine == LOCAL:
            reason = f"{event.reason} on hvdrun's own host"
            self._leave(self._hosts.names(), sorted(self._processes.running), reason, event.seconds)
        else:
            self._leave([machine], self._on(machine), event.reason, event.seconds)

    def events(self) -> list[MembersNoticed]:
        """Return what the authority has not been told yet, and answer those whose hosts have been left.

        It is to be told of the hosts before.
        """
        for sock, host in [each for each in self._waiting if not self._on(each[1])]:
            self._waiting.remove((sock, host))
            _answer(sock, Answer(f"host {host} has been left", 0))
        told, self._events = self._events, []
        return told

    def close(self) -> None:
        """Close all sockets."""
        for sock, _ in self._waiting:
            sock.close()
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _on(self, host: str) -> list[int]:
        return sorted(key for key in self._processes.running if self._processes[key].host == host)

    def _leave(self, hosts: Iterable[str], members: Iterable[int], reason: str, seconds: float) -> None:
        self._hosts.leave(hosts)
        self._events.append(MembersNoticed(tuple(members), reason, seconds))

    # --- hvdrun --leave --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # the peer has gone again, or there are no descriptors
            sock, _ = self._listener.accept()
            try:
                check_same_user(sock)
            except ProtocolError:
                sock.close()
                return
            sock.setblocking(False)
            name = bytearray()
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(sock, name))

    def _read(self, sock: socket.socket, name: bytearray) -> None:
        try:
            content = sock.recv(_LONGEST_NAME)
        except OSError:
            content = b""
        name += content
        if content and len(name) < _LONGEST_NAME:
            return
        self._selector.unregister(sock)
        host = name.decode(errors="replace").strip()
        answer = self._asked(host)
        _answer(sock, answer)
        if answer.code is None:
            self._waiting.append((sock, host))

    def _asked(self, host: str) -> Answer:
        """Let a host be left, if that is possible."""
        members, names = self._on(host), self._hosts.names()
        hosts = {host, *(other for _, other in self._waiting)}
        if host not in names and members and host in {other for _, other in self._waiting}:
            return Answer(f"host {host} is being left already")
        if host not in names:
            return Answer(f"the job has no host {host}; it has: {', '.join(names)}", _REFUSED)
        if members and sum(len(self._on(each)) for each in hosts) == len(self._processes.running):
            return Answer(f"all ranks are on host {' and '.join(sorted(hosts))}, and none would be left that has the state; "
                          f"to end the job: kill {os.getpid()}", _REFUSED)
        self._leave([host], members, "hvdrun --leave", math.inf)
        return Answer(f"host {host} is not used any more; its ranks leave at the next boundary: "
                      f"{', '.join(map(self._processes.name, members)) or 'there are none'}")


def _answer(sock: socket.socket, answer: Answer) -> None:
    with contextlib.suppress(OSError):  # it has gone, which changes nothing
        sock.sendall(msgspec.json.encode(answer) + b"\n")
    if answer.code is not None:
        sock.close()
