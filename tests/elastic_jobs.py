"""Elastic jobs for tests: members as processes, and around them the real authority with a launcher of one thread.

A test says what happens (hosts, kills) and pumps events until what it waits for has come.
"""

from __future__ import annotations

import ast
import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdlite.core import launch_contract
from hvdlite.core.launch_contract import FailureRecord
from hvdlite.core.world import Hosts
from hvdlite.membership.authority import Authority
from hvdlite.membership.events import (
    EndJob,
    Event,
    HostsSeen,
    Kill,
    Limits,
    Look,
    MemberGone,
    MemberReported,
    Note,
    SeenStopped,
    SendOrder,
    StartMember,
    TimePassed,
)
from hvdlite.membership.messages import AskAlive, Listening, MemberMessage, WorldOrder
from hvdlite_runner.host.member_server import MemberServer
from hvdlite_runner.host.reaper import look_up
from tests import temporary, warm, worlds


class ElasticJob:
    """Leaves nothing behind.

    Args:
        program: a function of a module, or "module:function"; its arguments and what it returns are literals.
        slots: of each host; hosts are hosts to the members, because each has a job directory of its own.
        imported: modules that the members begin with, founders and joiners (tests/warm.py).
        limits: see `membership.events.Limits`.

    Attributes:
        processes: by member.
        orders: of worlds, by epoch.
        notes: lines for the user.
        asked: how often members were asked whether they are alive.
        code: the job's exit code; None as long as it runs.
    """

    def __init__(self, program: Callable[..., object] | str, *arguments: object, slots: Mapping[str, int],
                 environment: Mapping[str, str] | None = None, imported: Sequence[str] = worlds.NUMPY,
                 **limits: Any) -> None:
        self.processes: dict[int, subprocess.Popen[bytes] | warm.Rank] = {}
        self.orders: dict[int, WorldOrder] = {}
        self.notes: list[str] = []
        self.asked = 0
        self.code: int | None = None
        self.reason = ""
        self._authority = Authority(Limits(**{
            "start_np": sum(slots.values()), "quiesce_timeout": worlds.HANGS_SECONDS, **limits}), time.monotonic())
        self._files = tempfile.TemporaryDirectory(prefix=temporary.prefix("elastic"))
        self._program = Path(self._files.name) / "program.py"
        module, function = program.split(":") if isinstance(program, str) else (program.__module__, program.__name__)
        self._program.write_text(
            "import sys\n"
            f"from {module} import {function} as program\n"
            f"result = program(*{arguments!r})\n"
            "with open(sys.argv[1], 'w', encoding='utf-8') as file:\n"
            "    file.write(repr(result))\n", encoding="utf-8")
        self._selector = selectors.DefaultSelector()
        self._servers: dict[str, MemberServer] = {}
        self._ends: dict[int, int] = {}  # by member: a descriptor that is readable once its process has ended
        self._imported = imported
        self._environment = {**(environment or {}), launch_contract.SECRET: secrets.token_hex()}
        if len(slots) > 1:
            self._environment[launch_contract.COORDINATOR] = f"127.0.0.1:{worlds.free_port()}"
        self._founders: list[StartMember] = []
        self.see(slots)

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        for server in self._servers.values():
            server.close()
        for descriptor in self._ends.values():
            os.close(descriptor)
        self._selector.close()
        self._files.cleanup()

    # --- what happens ----------------------------------------------------------------------------------------------------

    def see(self, slots: Mapping[str, int]) -> None:
        """Let discovery find these hosts."""
        self._handle(HostsSeen(dict(slots)))

    def kill(self, member: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a member, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[member].pid, number)

    def refuse_files(self, host: str) -> None:
        """Let the members of a host write none of the files that only show how they are: a folder is in their place."""
        directory = Path(self._directory(host))
        for file in [*directory.glob("progress.*"), *directory.glob("processes.json")]:
            file.unlink()
            file.mkdir()

    def lose_launcher(self) -> None:
        """Close all connections with members, as if the launcher had died."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    def host_of(self, member: int) -> str:
        """Return the host of a member."""
        return self._authority.world.everybody[member].host

    # --- what is waited for ----------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], timeout: float = worlds.HANGS_SECONDS) -> None:
        """Do the launcher's work until something has happened."""
        deadline = time.monotonic() + timeout
        while not condition():
            if (time.monotonic() > deadline or self.code is not None) and not condition():  # maybe since the look above
                raise AssertionError(f"it never happened; {self}")
            wake_at = self._authority.wake_at()
            if wake_at is not None and wake_at <= time.monotonic():
                self._handle(TimePassed())
            for key, _ in self._selector.select(0.02):  # files of members are looked at
                key.data()

    def until_printed(self, member: int, text: str) -> None:
        """Wait until a member has printed something."""
        self.until(lambda: member in self.processes and text in self.output(member))

    def until_world(self, epoch: int) -> WorldOrder:
        """Wait until a world has been ordered."""
        self.until(lambda: epoch in self.orders)
        return self.orders[epoch]

    def until_members(self, *members: int) -> WorldOrder:
        """Wait until a world of these members has been ordered, whatever their ranks."""
        self.until(lambda: bool(self.orders) and set(self.orders[max(self.orders)].members) == set(members))
        return self.orders[max(self.orders)]

    def finish(self, timeout: float = worlds.HANGS_SECONDS) -> dict[int, Any]:
        """Wait for the end of the job, which has to be a success; return what the members' programs returned."""
        self.until(lambda: self.code is not None, timeout)
        assert self.code == 0, f"{self}"
        return {member: ast.literal_eval(self._path(member, "result").read_text(encoding="utf-8"))
                for member in self.processes if self._path(member, "result").exists()}

    def output(self, member: int) -> str:
        """Return what a member has printed so far, on both streams."""
        return self._path(member, "out").read_text(encoding="utf-8", errors="replace")

    def __str__(self) -> str:
        outputs = "\n".join(f"--- member {member} ({process.poll()})\n{self.output(member)}"
                            for member, process in self.processes.items())
        return f"code {self.code} {self.reason}\n" + "\n".join(self.notes) + f"\n{self._authority.summary()}\n{outputs}"

    # --- the launcher's work ---------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for command in self._authority.handle(event, time.monotonic()):
            match command:
                case StartMember():
                    self._start(command)
                case SendOrder(member, order):
                    self.asked += isinstance(order, AskAlive)
                    if isinstance(order, WorldOrder):
                        self.orders[order.epoch] = order
                    self._server(self._authority.world.everybody[member].host).send(member, order)
                case Look(member):
                    found = look_up(self.processes[member].pid)
                    if found is not None and found.state == "T":
                        self._handle(SeenStopped(member))
                case Kill(member):
                    self.kill(member)
                case Note(text):
                    self.notes.append(text)
                case EndJob(code, reason):
                    self.code, self.reason = code, reason

    def _start(self, command: StartMember) -> None:
        self._server(command.host)
        self._founders += [] if command.is_joiner else [command]
        if command.is_joiner:
            self._spawn(command, Hosts((tuple(range(command.size)),)))
        elif len(self._founders) == command.size:
            hosts = Hosts.of([founder.host for founder in self._founders])
            for founder in self._founders:
                self._spawn(founder, hosts)

    def _spawn(self, command: StartMember, hosts: Hosts) -> None:
        member = command.member
        environment = {
            **worlds.clean_environment(), "PYTHONPATH": worlds.PYTHON_PATH, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
            **launch_contract.rank_environment(hosts.world(command.rank), self._directory(command.host)),
            "HVDLITE_START_TIMEOUT": "120", **self._environment,
            launch_contract.MEMBER: str(member), launch_contract.SLOT: str(command.slot),
            launch_contract.HOSTNAME: command.host, **({launch_contract.JOINER: "1"} if command.is_joiner else {})}
        with open(self._path(member, "out"), "wb") as out:
            process = worlds.start(member, self._program, [str(self._path(member, "result"))], environment,
                                   (out.fileno(), out.fileno()), self._imported, self._environment)
        self.processes[member] = process
        self._ends[member] = os.dup(process.fileno()) if isinstance(process, warm.Rank) else os.pidfd_open(process.pid)
        self._selector.register(self._ends[member], selectors.EVENT_READ, lambda: self._ended(member))

    def _ended(self, member: int) -> None:
        self._selector.unregister(self._ends[member])
        os.close(self._ends.pop(member))
        host = self._authority.world.everybody[member].host
        if host not in self._servers:
            return  # the launcher is lost: nobody hears of it
        self._servers[host].forget(member)
        record = FailureRecord.read(self._directory(host), member)
        self._handle(MemberGone(member, self.processes[member].wait(), f"{record.kind}: {record.message}" if record else ""))

    def _server(self, host: str) -> MemberServer:
        if host not in self._servers:
            directory = self._directory(host)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            def received(member: int, message: MemberMessage | None, problem: str) -> None:
                assert message is not None, problem
                self._handle(MemberReported(member, _reachable(message)))

            self._servers[host] = MemberServer(self._selector, directory, received)
        return self._servers[host]

    def _directory(self, host: str) -> str:
        return str(Path(self._files.name) / host)

    def _path(self, member: int, kind: str) -> Path:
        return Path(self._files.name) / f"{member}.{kind}"


def _reachable(message: MemberMessage) -> MemberMessage:
    """Return a message with an address of this host where the sender cannot know one: names of hosts are made up here."""
    return Listening(message.epoch, ("127.0.0.1",), message.port) if isinstance(message, Listening) else message
