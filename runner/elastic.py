"""The run of an elastic job: it goes on when members end, and when hosts come and go.

`membership.authority` decides; this loop tells it what happens and does what it commands. Members are processes with ids
that are never used again; messages about processes carry a member's id where those of other jobs carry a rank.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from hvdlite.core import launch_contract
from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import FailureRecord
from hvdlite.core.texts import printable, with_texts
from hvdlite.membership import messages as members
from hvdlite.membership.authority import Authority
from hvdlite.membership.events import (
    Command,
    EndJob,
    HostLost,
    HostsSeen,
    Kill,
    MemberGone,
    MemberSaid,
    Note,
    StartMember,
    Tell,
    TimePassed,
    WorldBegun,
)
from hvdlite.membership.events import Event as MembershipEvent
from hvdlite_runner import commands, failures, monitor
from hvdlite_runner import messages as orders
from hvdlite_runner.agents import Stopped
from hvdlite_runner.discovery import Discovery, DiscoveryScript, FixedHosts
from hvdlite_runner.elastic_hosts import HostPool, Link
from hvdlite_runner.elastic_options import ElasticSettings
from hvdlite_runner.failures import Exit
from hvdlite_runner.host_probe import own_addresses
from hvdlite_runner.job import JobSettings
from hvdlite_runner.job_output import JobOutput
from hvdlite_runner.job_workers import JobWorkers
from hvdlite_runner.member_starts import MemberStarts
from hvdlite_runner.messages import Event, Exited, FromMember, Output, ProgressReply, Result, Started, StartRefused
from hvdlite_runner.output import format_ranks
from hvdlite_runner.placement import LOCAL, Host
from hvdlite_runner.remote_agent import RemoteAgent, bootstrap_input
from hvdlite_runner.task_files import TaskFiles
from hvdlite_runner.termination import GRACE


def run_elastic_job(settings: JobSettings, elastic: ElasticSettings, inherited: Mapping[str, str],
                    observer: monitor.ProgressObserver | None = None, rank_hosts: dict[int, str] | None = None) -> int:
    """Run an elastic job to its end; return 0 when training has finished, else the first failure's exit code.

    Args:
        settings: as for `run_job`, without hosts.
        observer: called with the progress of the current world's ranks every second.
        rank_hosts: kept up to date with the host of each rank.

    Raises:
        LaunchError: when the job cannot begin.
        CommandError: when a system refuses to start the command.
    """
    job = _ElasticJob(settings, elastic, inherited, observer, {} if rank_hosts is None else rank_hosts)
    code = 1
    with job.workers.handles_signals():
        try:
            job.run()
            code = job.report()
        finally:
            code = job.close(code)
    return code


class _ElasticJob:
    """The state of one elastic job."""

    def __init__(self, settings: JobSettings, elastic: ElasticSettings, inherited: Mapping[str, str],
                 observer: monitor.ProgressObserver | None, rank_hosts: dict[int, str]) -> None:
        self._settings, self._elastic, self._inherited = settings, elastic, inherited
        self._observer, self._rank_hosts = observer, rank_hosts
        self._output = JobOutput(settings, observer, self._names, self._rank_of)
        self.workers = JobWorkers(
            inherited, self._take, self._on_lost, self._output.note, None if observer is None else self._observe,
            lambda remote: self._hosts.unreached(remote, time.monotonic()))
        self._task = TaskFiles(settings.task_directory)
        self._discovery: Discovery
        if elastic.script is None:
            self._discovery = FixedHosts(elastic.slots)
        else:
            self._discovery = DiscoveryScript(elastic.script, elastic.slots_per_host, self._output.note,
                                              self.workers.local.watch, self.workers.local.forget)
        self._hosts = HostPool(self.workers.selector, elastic.is_local, self._reach, self._leave, self._output.note,
                               settings.start_timeout, settings.shell.silence)
        self._authority = Authority(elastic.limits, time.monotonic(), self._hosts.machine_of)
        self._starts = MemberStarts(settings, elastic.limits.max_np, self.workers, self._hosts, self._task.key())
        self._events: deque[MembershipEvent] = deque()
        self._running: dict[int, str] = {}  # the machine of each member whose process has not ended
        self._last_ranks: dict[int, int] = {}  # of members that have been in a world
        self._exits: list[Exit] = []
        self._records: dict[int, FailureRecord] = {}
        self._problems: dict[int, str] = {}  # why members were ended
        self._refused: commands.CommandError | None = None
        self._end: EndJob | None = None
        self._listening: dict[str, tuple[int, members.Listening]] = {}  # rank 0, while its machine's addresses are asked for

    def run(self) -> None:
        """Run the job to its end, and clean up."""
        try:
            self.begin()
            self.loop()
        except Stopped:
            pass
        finally:
            self.end()

    def begin(self) -> None:
        """Prepare this host, and tell the user what follows from the options."""
        self._output.watch(self.workers.selector, self.workers.pause)
        self.workers.local.prepare()
        self._task.watch_caller(self.workers.selector, lambda: self.workers.termination.interrupt(signal.SIGTERM))
        for line in self._settings.notice.splitlines():
            self._output.note(line)

    def loop(self) -> None:
        while self._refused is None:
            now = time.monotonic()
            ended_by_user = self.workers.user_has_ended_job()
            if not ended_by_user:
                self._discover(now)
                self._decide(now)
            if not self._running and (ended_by_user or self._end is not None):
                return
            if not self._events or ended_by_user:
                wake_at = self._authority.wake_at()
                self.workers.turn([self._output.console.flush_due(), self._discovery.wait(now), self._hosts.wait(now),
                                   None if wake_at is None else max(0.0, wake_at - now)])
        raise self._refused

    def end(self) -> None:
        """End all processes of the job on all hosts, and show their last output."""
        self._discovery.close()
        self.workers.end()
        self._hosts.close()
        self._output.finish()
        if self._observer is not None:
            self._observer.finish()
        self._task.remove_abandoned()

    def close(self, code: int) -> int:
        """Wait for the readers of the output, and return hvdrun's exit code."""
        termination = self.workers.termination
        code = self._output.close(code, termination.user_signal, lambda: termination.late_signal)
        self.workers.close()
        return code

    def report(self) -> int:
        """Print the summary and the first failure; return the exit code."""
        user_signal = self.workers.termination.user_signal
        went_on = self._authority.epoch > 1  # else it has ended like any other job
        if went_on:
            for line in self._authority.summary():
                self._output.note(line)
        if user_signal:
            self._output.note(f"ended by {signal.Signals(user_signal).name}")
            return 128 + user_signal
        assert self._end is not None
        self._task.write_members(self._authority.members)
        if self._end.code == 0 and self._task.problem:
            self._output.note(self._task.problem)
            return launch_contract.RESULTS_LOST
        if self._end.code == 0:
            return 0
        cause = failures.root_cause(self._to_blame() if went_on else self._exits, self._records)
        if cause is not None and cause.exit.ended_by_us and cause.record is None:
            cause = None  # it was ended because of the reason
        is_its_code = cause is not None and self._end.code in {ended.shell_code for ended in self._exits}
        if went_on or not is_its_code:
            self._output.note(self._end.reason)
        if cause is None:
            self._task.write_cause(-1, self._end.reason)
            return self._end.code
        if went_on:
            cause = dataclasses.replace(cause, consequences=())  # of other worlds, too, whose ranks were others
        lines = cause.describe(self._authority.host_of(cause.exit.rank), self._who(cause.exit.rank), repeats=went_on)
        for line in lines:
            self._output.note(line)
        self._task.write_cause(cause.exit.rank, lines[0])
        return cause.exit.shell_code if is_its_code else self._end.code

    def _to_blame(self) -> list[Exit]:
        """Return the ends of processes that can be the cause of the job's end."""
        assert self._end is not None
        member = self._end.member
        if member is not None:
            origin = self._records[member].origin if member in self._records else member
            return [ended for ended in self._exits if ended.rank in (member, origin)]
        return [ended for ended in self._exits if not ended.ended_by_us]

    # --- what happens ------------------------------------------------------------------------------------------------------

    def _discover(self, now: float) -> None:
        slots = self._discovery.turn(now)
        if slots is not None:
            self._hosts.set_slots(slots)
        usable = self._hosts.turn(now, self._is_in_use)
        if usable is None:
            return
        needed, limits = sum(usable.values()), self._elastic.limits
        if self._authority.epoch == 0 and needed < limits.start_np:
            if limits.hosts_are_fixed:
                raise LaunchError("\n".join(self._hosts.problems()))
            offered = ",".join(f"{name}:{count}" for name, count in usable.items()) or "no host"
            self._output.note(f"-np {limits.start_np} is more than the {needed} slots that were discovered ({offered}); "
                              f"waiting for more, at most {limits.elastic_timeout:g} s (--elastic-timeout)")
        self._events.append(HostsSeen(usable))

    def _decide(self, now: float) -> None:
        """Tell the authority what has happened, and do what it commands."""
        wake_at = self._authority.wake_at()
        if wake_at is not None and wake_at <= now:
            self._events.append(TimePassed())
        while self._events and self._end is None and self._refused is None:
            self._carry_out(self._authority.handle(self._events.popleft(), time.monotonic()))
        if self._end is not None:
            self._events.clear()

    def _carry_out(self, commanded: Sequence[Command]) -> None:
        self._start_members([command for command in commanded if isinstance(command, StartMember)])
        for command in commanded:
            if isinstance(command, Tell):
                self._send(command.member, orders.ToMember(command.member, members.frame(command.order)))
            elif isinstance(command, Kill):
                self._send(command.member, orders.KillMember(command.member))
            elif isinstance(command, Note):
                self._output.note(command.text)
            elif isinstance(command, WorldBegun):
                self._begin_world(command.members)
            elif isinstance(command, EndJob):
                self._end = command
                self.workers.termination.schedule(GRACE if command.code else 0.0)

    def _start_members(self, starting: Sequence[StartMember]) -> None:
        width = len(str(self._elastic.limits.start_np - 1))
        for each in starting:
            name = f"member.{each.member}" if each.is_joiner else f"rank.{each.rank:0{width}d}"
            try:
                self._output.open_files(each.member, name)
            except LaunchError as error:
                if not each.is_joiner:
                    raise
                self._output.note(str(error))
        for machine, order in self._starts.orders(starting):
            self._running[order.member] = machine
            self.workers.give_task(machine, self._task)
            self._send(order.member, order)
        if self._starts.notice:
            self._output.note(self._starts.notice)
            self._starts.notice = ""

    def _send(self, member: int, order: orders.StartMember | orders.KillMember | orders.ToMember) -> None:
        machine = self._running.get(member)
        remote = None if machine in (None, LOCAL) else self.workers.remote(machine or "")
        if remote is not None:
            remote.send(order)
        elif machine == LOCAL:
            self.workers.local.obey(order)

    def _begin_world(self, world: Sequence[int]) -> None:
        self._last_ranks |= {member: rank for rank, member in enumerate(world)}
        self._output.expect(len(world))
        if self._observer is not None:
            for rank in self._rank_hosts:
                self._observer.ended(rank, {})
        self._rank_hosts.clear()
        self._rank_hosts |= {rank: self._authority.host_of(member) for rank, member in enumerate(world)}

    # --- what worker groups tell -------------------------------------------------------------------------------------------

    def _take(self, machine: str, event: Event) -> None:
        if isinstance(event, Output):
            self._output.feed(event)
        elif isinstance(event, FromMember):
            self._take_message(event)
        elif isinstance(event, Exited):
            self._take_exit(event)
        elif isinstance(event, orders.AgentReady):
            self._take_ready(machine, event)
        elif isinstance(event, Started):
            self._output.started(f"member {event.rank}", event, machine, verbose=self._settings.verbose)
        elif isinstance(event, orders.RouteReply):
            self._take_route(machine, event)
        elif isinstance(event, Result):
            self._task.write_result(event)
        elif isinstance(event, StartRefused):
            self._take_refusal(machine, event)
        elif isinstance(event, ProgressReply):
            self._observe(machine, event)

    def _take_message(self, event: FromMember) -> None:
        if event.problem:
            self._problems[event.member] = f"hvdrun has ended it for what it sent: {printable(event.problem)}"
            self._send(event.member, orders.KillMember(event.member))
            return
        for message in with_texts(members.Frames(orders=False).feed(event.content), printable):
            if isinstance(message, members.Listening):
                self._take_listening(event.member, message)
            else:
                self._events.append(MemberSaid(event.member, message))

    def _take_listening(self, member: int, message: members.Listening) -> None:
        """Find the addresses at which other hosts reach rank 0: its host's agent knows how they are reached from here."""
        machine = self._running.get(member, LOCAL)
        remote = self.workers.remote(machine)
        others = dict.fromkeys(self._running.values())
        here = "" if remote is None else self.workers.address_for(remote)
        hosts = [here if other == LOCAL else Host(other).address for other in others if other != machine]
        if remote is None:
            addresses = own_addresses(hosts, self._settings.interfaces)
            self._events.append(MemberSaid(member, _at(message, addresses)))
        else:
            self._listening[machine] = (member, message)
            remote.send(orders.RouteRequest(hosts, list(self._settings.interfaces), listen=False))

    def _take_route(self, machine: str, event: orders.RouteReply) -> None:
        if machine in self._listening:
            member, message = self._listening.pop(machine)
            self._events.append(MemberSaid(member, _at(message, event.addresses)))

    def _take_exit(self, event: Exited) -> None:
        if self._running.pop(event.rank, None) is None:
            return
        ended = Exit(event.rank, event.code, ended_by_us=event.by_us)
        cause = self._problems.pop(event.rank, "")
        self._exits.append(ended)
        if event.record is not None:
            self._records[event.rank] = record = failures.record_of(event.record, time.time())
            cause = cause or f"{record.kind}: {record.message}"
        if ended.failed and not event.by_us:
            self._output.console.reveal(event.rank)
        self._output.close_files(event.rank)
        self._events.append(MemberGone(event.rank, event.code, cause))

    def _take_refusal(self, machine: str, event: StartRefused) -> None:
        reason = event.reason if machine == LOCAL else f"host {machine}: {event.reason}"
        if self._authority.epoch <= 1 and self._refused is None:
            self._refused = commands.CommandError(reason, event.code)
        elif self._running.pop(event.member, None) is not None:
            self._events.append(MemberGone(event.member, event.code, reason))

    def _take_ready(self, machine: str, event: orders.AgentReady) -> None:
        remote = self.workers.remote(machine)
        if remote is not None:
            self._hosts.ready(remote)
            if self._settings.verbose:
                self._output.note(f"host {machine} is {event.describe()}")

    def _on_lost(self, remote: RemoteAgent) -> None:
        """Handle the end of a link: the machine's members end by themselves."""
        machine, reason = remote.host.name, remote.failure_reason()
        self.workers.local.forget(remote.pid)
        for member in [member for member, where in self._running.items() if where == machine]:
            del self._running[member]
            self._output.close_files(member)
        self._events.append(HostLost(machine, reason))
        self._hosts.lost(remote, time.monotonic())

    def _observe(self, machine: str, event: ProgressReply) -> None:
        """Show the progress of a machine's members, by their ranks."""
        if self._observer is not None:
            ranks = {member: self._authority.rank_of(member) for member in event.ranks}
            self._observer.take(machine, ProgressReply(
                {rank: event.ranks[member] for member, rank in ranks.items() if rank is not None}, event.waits))

    # --- hosts -------------------------------------------------------------------------------------------------------------

    def _reach(self, name: str) -> RemoteAgent:
        self.workers.ignore_stop_signal()
        directory = self._settings.working_directory or commands.current_directory()
        remote = self.workers.agents.add(Host(name), self._settings.shell, bootstrap_input(
            directory, self._inherited, self._settings.shell.silence))
        self.workers.local.watch(remote.pid)
        return remote

    def _leave(self, link: Link) -> None:
        assert isinstance(link, RemoteAgent)
        self.workers.agents.discard(link)

    def _is_in_use(self, name: str) -> bool:
        return name in self._running.values()

    # --- names -------------------------------------------------------------------------------------------------------------

    def _rank_of(self, member: int) -> int:
        """Return a member's rank in the last world that it was in; -1 for none."""
        return self._last_ranks.get(member, -1)

    def _names(self, some: Iterable[int]) -> str:
        """Return how members are called in the prefix of their output: by rank, or +id before they have one."""
        ranks = {member: self._rank_of(member) for member in sorted(some)}
        ranked = format_ranks(rank for rank in ranks.values() if rank >= 0)
        return ",".join(filter(None, [ranked, *(f"+{member}" for member, rank in ranks.items() if rank < 0)]))

    def _who(self, member: int) -> str:
        rank = self._rank_of(member)
        return f"rank {rank}" if rank >= 0 else f"new process {member}"


def _at(message: members.Listening, addresses: Sequence[str]) -> members.Listening:
    return members.Listening(message.epoch, tuple(addresses) or message.addresses, message.port)
