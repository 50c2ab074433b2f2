"""The run of a job: start the ranks, show their output, notice their end, and end the others.

One loop waits for the pipes and pidfds of this host's ranks and for the links to other hosts; it does not poll.
`termination.py` schedules the signals that end ranks after a failure or the user's signal.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from hvdlite.core import launch_contract
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import FailureRecord
from hvdlite_runner import commands, failures, host_probe, monitor
from hvdlite_runner.agents import Agents, Stopped, rendezvous_address
from hvdlite_runner.failures import Exit
from hvdlite_runner.messages import (
    Event,
    Exited,
    Output,
    ProgressReply,
    ProgressRequest,
    Result,
    Signal,
    Start,
    Started,
    StartRefused,
    Stop,
)
from hvdlite_runner.output import Console, format_ranks
from hvdlite_runner.placement import LOCAL, HostRanks
from hvdlite_runner.remote_agent import RemoteAgent, bootstrap_input
from hvdlite_runner.shells import Shell
from hvdlite_runner.termination import GRACE, GRACE_AFTER_LOSS, Termination
from hvdlite_runner.worker_group import KILL_SECONDS, POLL_WITHOUT_PIDFD, WorkerGroup

_CHECK_SECONDS = 1.0  # seconds between checks for silent hosts, and between samples of the ranks' progress


@dataclasses.dataclass(frozen=True)
class JobSettings:
    """The command of a job, its ranks, and how to show their output."""

    hosts: Sequence[HostRanks]  # one for each host, in rank order; the launcher's own host is called `LOCAL`
    command: Sequence[str]
    environment: Mapping[str, str]  # added to the inherited environment
    shell: Shell = dataclasses.field(default_factory=Shell)
    working_directory: str = ""  # on other hosts; "" for the launcher's
    start_timeout: float = 60.0
    interfaces: Sequence[str] = ()
    coordinator_port: int = 0  # 0 for any
    over_tcp: bool = False  # whether ranks of one host use TCP among themselves too
    share_cores: bool = True  # whether to set OMP_NUM_THREADS to each rank's share of its host's cores
    output_directory: str | None = None
    prefix: bool = True
    timestamps: bool = False
    show: str = "all"  # or "rank0", "errors"
    fold: bool = False
    bind: bool = False
    verbose: bool = False
    task_directory: str | None = None  # of `hvdlite.run`: a function for the ranks, and the folder for its results
    notice: str = ""  # notes for the user; printed once, when the ranks are started

    @property
    def ranks(self) -> list[int]:
        """All ranks, ascending."""
        return sorted(rank for host_ranks in self.hosts for rank in host_ranks.ranks)


def run_job(settings: JobSettings, inherited: Mapping[str, str], observer: monitor.ProgressObserver | None = None) -> int:
    """Run a job to its end and return the launcher's exit code: 0, or the first failure's.

    Meanwhile the process's signal handlers are replaced, and it adopts the orphans of its descendants.

    Args:
        observer: called with the ranks' progress every second.

    Raises:
        LaunchError: when the output cannot be written or hosts cannot be reached; one line for each host.
        CommandError: when a system refuses to start the command.
    """
    job = _Job(settings, inherited, observer)
    with job.handles_signals():  # before there is anything to clean up
        job.open_files()
        try:
            job.connect_hosts()
            job.start()
            job.loop()
        except Stopped:
            pass
        finally:
            job.end()
        return job.report()


class _Job:
    """The state of one job."""

    def __init__(self, settings: JobSettings, inherited: Mapping[str, str],
                 observer: monitor.ProgressObserver | None) -> None:
        self._settings, self._inherited, self._observer = settings, inherited, observer
        self._selector = selectors.DefaultSelector()
        self._termination = Termination()
        self._console = Console(self._write, self._prefix, shown=self._shown, clock=time.monotonic,
                                fold=len(settings.ranks) if settings.fold else 0)
        self._workers = WorkerGroup(self._selector, lambda event: self._take(LOCAL, event), inherited)
        self._agents = Agents(self._selector, lambda remote, event: self._take(remote.host.name, event), self._on_host_lost,
                              lambda: bool(self._termination.user_signal))
        self._files: dict[tuple[int, str], int] = {}
        self._rank_hosts = {rank: host_ranks.host.name for host_ranks in settings.hosts for rank in host_ranks.ranks}
        self._running: set[int] = set()
        self._exits: list[Exit] = []
        self._records: dict[int, FailureRecord] = {}
        self._lost: list[str] = []  # the reason, by host, in order
        self._refused: commands.CommandError | None = None
        self._last_check = 0.0
        self._abandoned = False  # the caller of `hvdlite.run` has ended

    def handles_signals(self) -> AbstractContextManager[None]:
        """Return a context in which the user's signals end the job."""
        return self._termination.handlers(self._selector)

    def open_files(self) -> None:
        """Create the files for the ranks' output, if requested.

        Raises:
            LaunchError: when they cannot be created.
        """
        if self._settings.output_directory is None:
            return
        width = len(str(len(self._settings.ranks) - 1))
        try:
            for rank in self._settings.ranks:
                folder = Path(self._settings.output_directory) / f"rank.{rank:0{width}d}"
                folder.mkdir(parents=True, exist_ok=True)
                for name in ("stdout", "stderr"):
                    self._files[rank, name] = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:
            raise LaunchError(f"cannot write to --output-filename {self._settings.output_directory}: "
                              f"{error.filename}: {error.strerror}") from None

    def connect_hosts(self) -> None:
        """Start the agents of all hosts in parallel, and check that the hosts can participate."""
        self._workers.prepare()
        if self._settings.task_directory is not None:  # standard input ends when the caller of `hvdlite.run` does
            self._selector.register(0, selectors.EVENT_READ, self._on_caller_exit)
        others = [host_ranks.host for host_ranks in self._settings.hosts if host_ranks.host.name != LOCAL]
        directory = self._settings.working_directory or os.getcwd()
        if others:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a stopped launcher could not be told from a cut link
        self._agents.reach(others, self._settings.shell, bootstrap_input(directory, self._inherited),
                           self._settings.start_timeout)
        for remote in self._agents.remotes:
            self._workers.watch(remote.pid)
            if self._settings.verbose and remote.ready is not None:
                self._note(f"host {remote.host.name} is {remote.ready.hostname}: {remote.ready.cores} cores, "
                           f"Python {remote.ready.python}, agent {remote.ready.pid}")

    def start(self) -> None:
        for line in self._settings.notice.splitlines():
            self._note(line)
        rendezvous = self._rendezvous_variables()
        task_payload = b""
        if self._settings.task_directory is not None:
            task_payload = (Path(self._settings.task_directory) / launch_contract.TASK_FILE).read_bytes()
        self._running = set(self._settings.ranks)
        threads = {host_ranks.host.name: max(1, self._cores(host_ranks.host.name) // len(host_ranks.ranks))
                   for host_ranks in self._settings.hosts}
        if self._settings.share_cores:
            self._note_threads(threads)
        for host_ranks in self._settings.hosts:
            given = {"OMP_NUM_THREADS": str(threads[host_ranks.host.name])} if self._settings.share_cores else {}
            order = Start([dataclasses.astuple(world) for world in host_ranks.worlds], list(self._settings.command),
                          {**given, **self._settings.environment, **rendezvous}, self._settings.bind, task_payload)
            remote = self._remote(host_ranks.host.name)
            if remote is None:
                self._workers.start(order, stop=lambda: bool(self._termination.user_signal))
            else:
                remote.send(order)
        if self._termination.user_signal:
            self._running &= set(self._workers.running) | {rank for remote in self._agents.remotes
                                                           for rank in self._ranks_of(remote.host.name)}

    def loop(self) -> None:
        while self._running and self._refused is None:
            self._agents.turn(self._timeout())
            self._workers.notice()
            self._send_due_signals()
            self._check_hosts()
        if self._refused is not None:
            raise self._refused

    def end(self) -> None:
        """End all processes of the job on all hosts, and show their last output."""
        self._termination.is_over = True
        for remote in self._agents.remotes:
            remote.send(Stop())
        self._workers.end()
        self._agents.end(KILL_SECONDS + GRACE)
        self._console.finish()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._selector.close()
        if self._observer is not None:
            self._observer.finish()
        if self._abandoned and self._settings.task_directory is not None:
            shutil.rmtree(self._settings.task_directory, ignore_errors=True)  # only the launcher can remove it

    def report(self) -> int:
        """Print the first failure; return the exit code."""
        if self._termination.user_signal:
            self._note(f"ended by {signal.Signals(self._termination.user_signal).name}")
            return 128 + self._termination.user_signal
        cause = failures.root_cause(self._exits, self._records)
        if self._lost and (cause is None or cause.exit.ended_by_us or cause.record is not None):
            for reason in self._lost:
                self._note(reason)
            self._write_cause(-1, "; ".join(self._lost))
            if self._exits:
                ranks = format_ranks(exit.rank for exit in self._exits if exit.failed)
                self._note(f"ranks {ranks} ended as a consequence")
            return 1
        if cause is None:
            return 0
        self._console.reveal(cause.exit.rank)
        several = len(self._settings.hosts) > 1
        lines = cause.describe(self._rank_hosts[cause.exit.rank] if several else "")
        for line in lines:
            self._note(line)
        self._write_cause(cause.exit.rank, lines[0])
        return cause.exit.shell_code

    def _on_caller_exit(self) -> None:
        if not os.read(0, 4096):
            self._selector.unregister(0)
            self._abandoned = True
            self._termination.interrupt(signal.SIGTERM)

    def _rendezvous_variables(self) -> dict[str, str]:
        """Return the variables with which the ranks of several hosts find and authenticate each other."""
        key = secrets.token_hex()
        if self._settings.task_directory is not None:
            key = (Path(self._settings.task_directory) / launch_contract.KEY_FILE).read_text(encoding="ascii")
        assignment = self._settings.hosts
        if len(assignment) > 1:
            agents: dict[RemoteAgent | None,
                         str] = {self._remote(host_ranks.host.name): host_ranks.host.address for host_ranks in assignment}
            first = self._remote(assignment[0].host.name)
            del agents[first]
            if None in agents and first is not None:
                agents[None] = host_probe.route_to(first.host.address) or ""
            where = rendezvous_address(self._agents, first, agents, self._settings.interfaces,
                                       self._settings.coordinator_port)
        elif self._settings.over_tcp:
            where = f"127.0.0.1:{_free_port()}"
        else:
            return {} if self._settings.task_directory is None else {launch_contract.SECRET: key}
        if self._settings.verbose:
            self._note(f"rank 0 listens at {where}")
        return {launch_contract.COORDINATOR: where, launch_contract.SECRET: key}

    def _take(self, host: str, event: Event) -> None:
        if isinstance(event, Output):
            self._console.feed(event.rank, event.stream, event.content)
            if (event.rank, event.stream) in self._files:
                os.write(self._files[event.rank, event.stream], event.content)
        elif isinstance(event, Started):
            if self._settings.verbose:
                self._note(f"rank {event.rank} is process {event.pid}" + (f" on {host}" if host != LOCAL else ""))
        elif isinstance(event, Exited):
            self._take_exit(event)
        elif isinstance(event, Result) and self._settings.task_directory is not None:
            name = f"{launch_contract.RESULT_FILE}.{event.rank}"
            (Path(self._settings.task_directory) / name).write_bytes(event.content)
        elif isinstance(event, StartRefused) and self._refused is None:
            where = "" if host == LOCAL else f"host {host}: "
            self._refused = commands.CommandError(where + event.reason, event.code)
        elif isinstance(event, ProgressReply) and self._observer is not None:
            self._observer.take(host, event)

    def _take_exit(self, event: Exited) -> None:
        self._running.discard(event.rank)
        ended = Exit(event.rank, event.code, ended_by_us=event.by_us)
        self._exits.append(ended)
        if self._observer is not None:
            self._observer.ended(event.rank, event.progress)
        if event.record is not None:
            self._records[event.rank] = FailureRecord(**event.record)
        if ended.failed:
            self._termination.schedule(GRACE)

    def _on_host_lost(self, remote: RemoteAgent) -> None:
        """Handle the end of a link: the host's ranks count as lost, and end by themselves."""
        ranks = self._ranks_of(remote.host.name)
        if self._termination.is_over or not self._running & ranks:
            return
        self._running -= ranks
        self._lost.append(f"{remote.failure_reason()} (with ranks {format_ranks(ranks)})")
        self._termination.schedule(GRACE_AFTER_LOSS)

    def _send_due_signals(self) -> None:
        for signum in self._termination.due():
            self._workers.signal(signum)
            for remote in self._agents.remotes:
                remote.send(Signal(signum))

    def _timeout(self) -> float | None:
        waits = self._termination.waits()
        if self._workers.needs_polling():
            waits.append(POLL_WITHOUT_PIDFD)
        if self._agents.remotes or self._observer is not None:
            waits.append(_CHECK_SECONDS)
        folded = self._console.flush_due()
        if folded is not None:
            waits.append(folded)
        return min(waits, default=None)

    def _check_hosts(self) -> None:
        """Count silent hosts as lost, and request the ranks' progress."""
        now = time.monotonic()
        if now - self._last_check < _CHECK_SECONDS:
            return
        self._last_check = now
        for remote in self._agents.remotes:
            if remote.timed_out(now):
                remote.mark_lost("was lost: nothing has been last_heard of it for some seconds")
                self._on_host_lost(remote)
            elif self._observer is not None:
                remote.send(ProgressRequest())
        if self._observer is not None:
            self._observer.take(LOCAL, ProgressReply(*monitor.sample(self._workers)))

    def _remote(self, host: str) -> RemoteAgent | None:
        return next((remote for remote in self._agents.remotes if remote.host.name == host), None)

    def _ranks_of(self, host: str) -> set[int]:
        return {rank for rank, where in self._rank_hosts.items() if where == host}

    def _cores(self, host: str) -> int:
        remote = self._remote(host)
        return commands.cores() if remote is None or remote.ready is None else remote.ready.cores

    def _note_threads(self, threads: Mapping[str, int]) -> None:
        if len(threads) == 1:
            (host, count), ranks = next(iter(threads.items())), len(self._settings.ranks)
            self._note(f"OMP_NUM_THREADS={count} ({self._cores(host)} cores for {ranks} ranks); set it yourself to change "
                       "that")
        else:
            each = ", ".join(f"{count} on {host}" for host, count in threads.items())
            self._note(f"OMP_NUM_THREADS={each}; set it yourself to change that")

    def _note(self, text: str) -> None:
        self._console.note(f"hvdrun: {text}")

    def _write(self, name: str, text: str) -> None:
        if self._observer is not None:
            self._observer.clear_table()
        _write(name, text)

    def _write_cause(self, rank: int, text: str) -> None:
        """Write the first failure for the caller of `hvdlite.run`."""
        if self._settings.task_directory is not None:
            path = Path(self._settings.task_directory) / launch_contract.CAUSE_FILE
            path.write_text(json.dumps({"rank": rank, "text": text}), encoding="utf-8")

    def _shown(self, rank: int, name: str) -> bool:
        return {"all": True, "rank0": rank == 0, "errors": name == "stderr"}[self._settings.show]

    def _prefix(self, ranks: str, name: str) -> str:
        when = f"{time.asctime()} " if self._settings.timestamps else ""
        return f"{when}[{ranks}]<{name}>:" if self._settings.prefix else when


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _write(name: str, text: str) -> None:
    """Write to the launcher's own stream; a closed reader or a missing character does not end the job."""
    stream = sys.stdout if name == "stdout" else sys.stderr
    try:
        stream.write(text.encode(stream.encoding, "replace").decode(stream.encoding))
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
