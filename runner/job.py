"""The run of a job: start the ranks, show their output, notice their end, and end the others.

An elastic job, which goes on when ranks end, is in `elastic.py`; both consist of the same parts.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from hvdlite.core import launch_contract
from hvdlite.core.addresses import loopback
from hvdlite.core.errors import LaunchError
from hvdlite.core.held_port import HeldPort
from hvdlite.core.launch_contract import FailureRecord
from hvdlite_runner import commands, failures, monitor
from hvdlite_runner.agents import Stopped, probed
from hvdlite_runner.failures import Exit
from hvdlite_runner.job_output import JobOutput
from hvdlite_runner.job_workers import JobWorkers
from hvdlite_runner.messages import Event, Exited, Output, ProgressReply, Result, Start, Started, StartRefused
from hvdlite_runner.output import format_ranks
from hvdlite_runner.placement import LOCAL, HostRanks
from hvdlite_runner.remote_agent import RemoteAgent, bootstrap_input
from hvdlite_runner.shells import Shell
from hvdlite_runner.task_files import TaskFiles
from hvdlite_runner.termination import GRACE, GRACE_AFTER_LOSS


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
    has_input: bool = False  # whether rank 0, on the launcher's own host, gets the launcher's standard input
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
    code = 1
    with job.handles_signals():  # before there is anything to clean up
        try:
            job.run()
            code = job.report()
        finally:
            code = job.close(code)
    return code


class _Job:
    """The state of one job."""

    def __init__(self, settings: JobSettings, inherited: Mapping[str, str],
                 observer: monitor.ProgressObserver | None) -> None:
        self._settings, self._inherited, self._observer = settings, inherited, observer
        self._output = JobOutput(settings, observer)
        self._output.expect(len(settings.ranks))
        self._workers = JobWorkers(inherited, self._take, self._on_host_lost, self._output.note,
                                   None if observer is None else observer.take)
        self._task = TaskFiles(settings.task_directory)
        self._rank_hosts = {rank: host_ranks.host.name for host_ranks in settings.hosts for rank in host_ranks.ranks}
        self._held_port: HeldPort | None = None  # at which rank 0 will listen
        self._store_port: HeldPort | None = None  # at which it will have torch.distributed's store
        self._running: set[int] = set()
        self._exits: list[Exit] = []
        self._records: dict[int, FailureRecord] = {}
        self._lost: list[str] = []  # the reason, by host, in order
        self._refused: commands.CommandError | None = None

    def handles_signals(self) -> AbstractContextManager[None]:
        """Return a context in which the user's signals end the job."""
        return self._workers.handles_signals()

    def run(self) -> None:
        """Start the ranks, wait for their end, and clean up."""
        self.open_files()
        try:
            self.connect_hosts()
            self.start()
            self.loop()
        except Stopped:
            pass
        finally:
            self.end()

    def open_files(self) -> None:
        """Create the files for the ranks' output, if requested.

        Raises:
            LaunchError: when they cannot be created.
        """
        width = len(str(len(self._settings.ranks) - 1))
        for rank in self._settings.ranks:
            self._output.open_files(rank, f"rank.{rank:0{width}d}")

    def connect_hosts(self) -> None:
        """Start the agents of all hosts in parallel, and check that the hosts can participate."""
        self._output.watch(self._workers.selector, self._workers.pause)
        self._workers.local.prepare()
        self._task.watch_caller(self._workers.selector, lambda: self._workers.termination.interrupt(signal.SIGTERM))
        others = [host_ranks.host for host_ranks in self._settings.hosts if host_ranks.host.name != LOCAL]
        if others:
            directory = self._settings.working_directory or commands.current_directory()
            self._workers.ignore_stop_signal()
            try:
                self._workers.agents.reach(others, self._settings.shell, bootstrap_input(
                    directory, self._inherited, self._settings.shell.silence), self._settings.start_timeout)
            finally:  # before anything reaps orphans
                for remote in self._workers.agents.remotes:
                    self._workers.local.watch(remote.pid)
        for remote in self._workers.agents.remotes:
            if self._settings.verbose and remote.ready is not None:
                self._output.note(f"host {remote.host.name} is {remote.ready.describe()}")

    def start(self) -> None:
        for line in self._settings.notice.splitlines():
            self._output.note(line)
        rendezvous = self._rendezvous_variables()
        for_torch = self._torch_variables(rendezvous.get(launch_contract.COORDINATOR, ""))
        self._running = set(self._settings.ranks)
        threads = {host_ranks.host.name: max(1, self._workers.cores(host_ranks.host.name) // len(host_ranks.ranks))
                   for host_ranks in self._settings.hosts}
        if self._settings.share_cores:
            self._note_threads(threads)
        for host_ranks in self._settings.hosts:
            given = {"OMP_NUM_THREADS": str(threads[host_ranks.host.name])} if self._settings.share_cores else {}
            environment = {**given, **for_torch, **self._settings.environment, **rendezvous,
                           launch_contract.HOSTNAME: host_ranks.host.name}
            order = Start([dataclasses.astuple(world) for world in host_ranks.worlds],
                          commands.to_bytes(self._settings.command), commands.values_to_bytes(environment),
                          self._settings.bind, self._settings.has_input and 0 in host_ranks.ranks)
            self._workers.give_task(host_ranks.host.name, self._task)
            remote = self._workers.remote(host_ranks.host.name)
            if remote is None:
                self._workers.local.start(order, stop=self._workers.user_has_ended_job)
            else:
                remote.send(order)
        if self._workers.user_has_ended_job():
            self._running &= set(self._workers.local.running) | {
                rank for remote in self._workers.agents.remotes for rank in self._ranks_of(remote.host.name)}

    def loop(self) -> None:
        while self._running and self._refused is None:
            self._workers.turn([self._output.console.flush_due()])
        if self._refused is not None:
            raise self._refused

    def end(self) -> None:
        """End all processes of the job on all hosts, and show their last output."""
        self._workers.end()
        self._output.finish()
        if self._observer is not None:
            self._observer.finish()
        self._task.remove_abandoned()

    def close(self, code: int) -> int:
        """Wait for the readers of the output, and return hvdrun's exit code."""
        termination = self._workers.termination
        code = self._output.close(code, termination.user_signal, lambda: termination.late_signal)
        self._workers.close()
        return code

    def report(self) -> int:
        """Print the first failure; return the exit code."""
        user_signal = self._workers.termination.user_signal
        if user_signal:
            self._output.note(f"ended by {signal.Signals(user_signal).name}")
            return 128 + user_signal
        cause = failures.root_cause(self._exits, self._records)
        if self._lost and (cause is None or cause.exit.ended_by_us or cause.record is not None):
            for reason in self._lost:
                self._output.note(reason)
            self._task.write_cause(-1, "; ".join(self._lost))
            if self._exits:
                ranks = format_ranks(exit.rank for exit in self._exits if exit.failed)
                self._output.note(f"ranks {ranks} ended as a consequence")
            return 1
        if cause is None:
            self._task.write_members(self._settings.ranks)
            if self._task.problem:
                self._output.note(self._task.problem)
                return launch_contract.RESULTS_LOST
            return 0
        self._output.console.reveal(cause.exit.rank)
        several = len(self._settings.hosts) > 1
        lines = cause.describe(self._rank_hosts[cause.exit.rank] if several else "", repeats=self._settings.show == "rank0")
        for line in lines:
            self._output.note(line)
        self._task.write_cause(cause.exit.rank, lines[0])
        return cause.exit.shell_code

    def _rendezvous_variables(self) -> dict[str, str]:
        """Return the variables with which the ranks find and authenticate each other.

        Ranks of one host need the key where they meet through torch's store, and for `hvdlite.run`.
        """
        key = self._task.key()
        assignment = self._settings.hosts
        if len(assignment) > 1:
            where = self._workers.rendezvous_address([host_ranks.host for host_ranks in assignment],
                                                     self._settings.interfaces, self._settings.coordinator_port)
        elif self._settings.over_tcp:
            address = loopback()
            if not address:
                raise LaunchError("the ranks are to connect by TCP (HVDLITE_CONTROL=tcp), and this host has neither "
                                  "127.0.0.1 nor ::1: run `ip link set lo up`, or let them use Unix sockets")
            self._held_port = HeldPort(host=address)
            where = f"[{address}]:{self._held_port.port}" if ":" in address else f"{address}:{self._held_port.port}"
        else:
            return {launch_contract.SECRET: key}
        if self._settings.verbose:
            self._output.note(f"rank 0 listens at {where}")
        return {launch_contract.COORDINATOR: where, launch_contract.SECRET: key}

    def _torch_variables(self, coordinator: str) -> dict[str, str]:
        """Return where rank 0 has the store by which `torch.distributed` lets ranks meet; what the user has set prevails.

        Args:
            coordinator: host:port where rank 0 listens, if there are several hosts.
        """
        first, address = self._settings.hosts[0].host, loopback() or "127.0.0.1"
        if len(self._settings.hosts) > 1:
            address, port = coordinator.rpartition(":")[0].strip("[]"), self._workers.agents.store_port
        elif first.name == LOCAL:
            self._store_port = HeldPort()
            port = self._store_port.port
        else:
            with probed(self._workers.agents, self._workers.remote(first.name), []) as routed:
                port = routed.store_port
        stale = commands.another_jobs_torch_variables(self._inherited)
        users = {name: self._inherited[name] for name in (launch_contract.MASTER_ADDR, launch_contract.MASTER_PORT)
                 if name in self._inherited and name not in stale}
        return {launch_contract.MASTER_ADDR: address, launch_contract.MASTER_PORT: str(port), **users}

    def _take(self, host: str, event: Event) -> None:
        if isinstance(event, Output):
            self._output.feed(event)
        elif isinstance(event, Started):
            self._output.started(f"rank {event.rank}", event, host, verbose=self._settings.verbose)
        elif isinstance(event, Exited):
            self._take_exit(event)
        elif isinstance(event, Result):
            self._task.write_result(event)
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
            self._records[event.rank] = failures.record_of(event.record, time.time())
        if ended.failed:
            self._workers.termination.schedule(GRACE)

    def _on_host_lost(self, remote: RemoteAgent) -> None:
        """Handle the end of a link: the host's ranks count as lost, and end by themselves."""
        ranks = self._ranks_of(remote.host.name)
        if not self._running & ranks:
            return
        self._running -= ranks
        self._lost.append(f"{remote.failure_reason()} (with ranks {format_ranks(ranks)})")
        self._workers.termination.schedule(GRACE_AFTER_LOSS)

    def _ranks_of(self, host: str) -> set[int]:
        return {rank for rank, where in self._rank_hosts.items() if where == host}

    def _note_threads(self, threads: Mapping[str, int]) -> None:
        if len(threads) == 1:
            (host, count), ranks = next(iter(threads.items())), len(self._settings.ranks)
            self._output.note(f"OMP_NUM_THREADS={count} ({self._workers.cores(host)} cores for {ranks} ranks); set it "
                              "yourself to change that")
        else:
            each = ", ".join(f"{count} on {host}" for host, count in threads.items())
            self._output.note(f"OMP_NUM_THREADS={each}; set it yourself to change that")
