"""The run of a job: its processes are started, their output is shown, their ends are noticed, and what is left is ended.

`membership.authority` decides; this loop reports to it what happens, and carries out its commands. A job that is not elastic
has one world, which its first failure ends. In an elastic one, members end and hosts come and go. Processes have keys that
are never used again: in a job that is not elastic they are the ranks. One loop waits for the pipes and pidfds of this host's
processes and for the links to other hosts; it does not poll.

The way of a member's death: `WorkerGroup.notice` -> `Job` -> `Authority.handle` -> `MemberServer` -> in the other members
`MemberClient` -> `Runtime.stop` -> `elastic.run` (`training/elastic/loop.py`), and back with `MemberIdle`; then `recovery`
and a `WorldOrder`. The ranks may notice the death first, by their control plane: whichever comes first ends the world.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence

from hvdlite.core.errors import LaunchError
from hvdlite.core.texts import printable, with_texts
from hvdlite.membership import messages as membership_messages
from hvdlite.membership.authority import Authority
from hvdlite.membership.events import (
    GRACE,
    Command,
    EndJob,
    HostLost,
    HostsSeen,
    Kill,
    Look,
    MemberGone,
    MemberReported,
    Note,
    SeenStopped,
    SendOrder,
    StartMember,
    TimePassed,
    WorldBegun,
)
from hvdlite.membership.events import Event as MembershipEvent
from hvdlite_runner import messages as orders
from hvdlite_runner.host import commands
from hvdlite_runner.host.polled_program import DiscoveryScript
from hvdlite_runner.host.worker_group import KILL_SECONDS, WorkerGroup
from hvdlite_runner.job.ending import Ending, Exit, WorkerProcess, WorkerProcesses, dated, verdict, verdict_on_signal
from hvdlite_runner.job.hosts import HostPool, Stopped
from hvdlite_runner.job.notices import HostNotices
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.job.starts import Starts, listening_at
from hvdlite_runner.job.task_files import TaskFiles
from hvdlite_runner.messages import Event, Exited, FromMember, Output, ProgressReply, Result, Started, StartRefused
from hvdlite_runner.output.job_output import JobOutput, ProgressObserver
from hvdlite_runner.placement import LOCAL, format_ranks

_SAMPLE_SECONDS = 1.0
"""Seconds between samples of the processes' progress."""
_END_SECONDS = KILL_SECONDS + GRACE
"""Seconds to wait for agents at the end."""


def run_job(settings: JobSettings, inherited: Mapping[str, str], observer: ProgressObserver | None = None) -> int:
    """Run a job to its end and return the launcher's exit code: 0, or the first failure's.

    Meanwhile the process's signal handlers are replaced, and it adopts the orphans of its descendants.

    Args:
        inherited: the launcher's environment.
        observer: called with the progress of the current world's ranks every second.

    Raises:
        LaunchError: when the job cannot begin: the output cannot be written, or hosts cannot be reached; one line for each
            host.
        CommandError: when a system refuses to start the command.
    """
    job = Job(settings, inherited, observer or ProgressObserver())
    code = 1
    with job.ending.handlers(job.selector):  # before there is anything to clean up
        try:
            job.run()
            code = job.report()
        finally:
            code = job.close(code)
    return code


class Job:
    """The state of one job; see `run_job`."""

    def __init__(self, settings: JobSettings, inherited: Mapping[str, str], observer: ProgressObserver) -> None:
        self.selector = selectors.DefaultSelector()
        self.ending = Ending(settings.grace)
        self._settings, self._inherited, self._observer = settings, inherited, observer
        self._is_elastic = not settings.limits.one_world
        self._processes = WorkerProcesses(names_hosts=self._is_elastic)
        self._output = JobOutput(settings.output, observer, self._processes.rank_of)
        self._local = WorkerGroup(self.selector, lambda event: self._take(LOCAL, event), inherited, self._is_ended_by_user)
        self._task = TaskFiles(settings.task_directory)
        self._with_task: set[str] = set()  # the machines that have it
        self._discovery = None if settings.script is None else DiscoveryScript(
            settings.script, settings.slots_per_host, self._output.note, self._local)
        self._hosts = HostPool(
            self.selector, settings, inherited, take=self._take, lost=self._on_lost, note=self._output.note,
            local=self._local, ending=self.ending)
        self._authority = Authority(settings.limits, time.monotonic(), self._hosts.machine_of)
        self._starts = Starts(settings, self._hosts, inherited, self._task.key(), self._output.note)
        self._notices = HostNotices(self.selector, self._hosts, self._processes)
        self._events: deque[MembershipEvent] = deque()
        self._lost: list[str] = []  # why hosts were lost, in order
        self._end: EndJob | None = None
        self._refused: commands.CommandError | None = None
        # Rank 0, while the addresses of its machine are asked for.
        self._listening: dict[str, tuple[int, membership_messages.Listening]] = {}
        self._last_sample = 0.0

    def run(self) -> None:
        """Run the job to its end, and clean up."""
        try:
            self._begin()
            self._loop()
        except Stopped:
            pass
        finally:
            self._clean_up()

    def report(self) -> int:
        """Print the summary and the first failure; return the exit code."""
        if self._authority.epoch > 1:
            for line in self._authority.summary():
                self._output.note(line)
        self._task.write_members(self._authority.members)
        ended = verdict_on_signal(self.ending, self._processes.exits, self._processes.rank_of) or verdict(
            self._end, self._processes.exits, self._processes.records(), lost=self._lost, problem=self._task.problem,
            name=self._processes.name, worlds=self._authority.epoch, one_world=not self._is_elastic,
            tracebacks=self._output.console.last_blocks)
        for key in (ended.key, *ended.others):
            self._output.console.reveal(key)
        for line in ended.lines:
            self._output.note(line, is_failure=True)
        if ended.reason:
            self._task.write_cause(ended.key, ended.reason)
        return ended.code

    def close(self, code: int) -> int:
        """Wait for the readers of the output, and return hvdrun's exit code."""
        code = self._output.close(code, self.ending.user_signal, lambda: self.ending.later_signal)
        self.selector.close()
        return code

    def _begin(self) -> None:
        """Prepare this host, and tell the user what follows from the options."""
        self._output.watch(self.selector, self._pause)
        self._local.prepare(grace=self._settings.limits.grace if self._is_elastic else 0.0)
        self._task.watch_caller(self.selector, lambda: self.ending.interrupt(signal.SIGTERM))
        for line in self._settings.notice.splitlines():
            self._output.note(line)
        if self._is_elastic:
            self._notices.listen(self._local.directory)
        for rank in () if self._is_elastic else range(self._settings.limits.start_np):
            self._open_files(rank, self._settings.limits.start_np)
        if self._discovery is None:
            self._hosts.set_slots(self._settings.slots)

    def _loop(self) -> None:
        while self._refused is None:
            now = time.monotonic()
            if not self._is_ended_by_user():
                self._discover(now)
                self._events += self._notices.events()
            if self._authority.epoch or not self._is_ended_by_user():  # members may need orders to come to their end
                self._decide(now)
            if not self._processes.running and (self._is_ended_by_user() or self._end is not None):
                return
            if self._refused is None and (not self._events or self._is_ended_by_user()):
                self._wait(now)
        raise self._refused

    def _wait(self, now: float) -> None:
        """Wait until something happens or is due, and handle it."""
        wake_at = self._authority.wake_at()
        waits = [self.ending.wait(), self._output.console.flush_due(), self._hosts.wait(now),
                 None if self._discovery is None or self._is_ended_by_user() else self._discovery.wait(now),
                 None if wake_at is None else max(0.0, wake_at - now),
                 _SAMPLE_SECONDS if self._observer.wants_samples else None,
                 self._local.wait()]
        self._hosts.take_events(min((wait for wait in waits if wait not in (None, math.inf)), default=None))
        self._local.notice()
        for signum in self.ending.due():
            self._output.console.drops_interrupts = not self._settings.verbose and self.ending.user_signal == signal.SIGINT
            if line := self.ending.explain(signum, self._inherited):
                self._output.note(line)
            self._local.obey(orders.Signal(signum))
            self._hosts.send(orders.Signal(signum))
        now = time.monotonic()
        if self._observer.wants_samples and now - self._last_sample >= _SAMPLE_SECONDS:
            self._last_sample = now
            self._hosts.send(orders.ProgressRequest())
            self._observe(LOCAL, self._local.sample())

    def _clean_up(self) -> None:
        """End all processes of the job on all hosts, and show their last output."""
        self.ending.is_over = True
        if self._discovery is not None:
            self._discovery.close()
        self._notices.close()
        self._hosts.stop()
        self._local.end()
        self._hosts.end(_END_SECONDS)
        self._output.finish()
        self._observer.finish()
        self._task.remove_abandoned()

    # --- the authority's events and commands -----------------------------------------------------------------------------

    def _discover(self, now: float) -> None:
        if self._discovery is not None and (slots := self._discovery.turn(now)) is not None:
            self._hosts.set_slots(slots)
        usable = self._hosts.turn(now, self._processes.on)
        if usable is None:
            return
        needed, limits = sum(usable.values()), self._settings.limits
        if self._authority.epoch == 0 and needed < limits.start_np:
            if limits.hosts_are_fixed:
                raise LaunchError("\n".join(self._hosts.problems()))
            offered = ",".join(f"{name}:{count}" for name, count in usable.items()) or "no host"
            self._output.note(f"{limits.start_np} slots are needed, and {needed} were discovered ({offered}); "
                              f"waiting for more, at most {limits.elastic_timeout:g} s (--elastic-timeout)")
        self._events.append(HostsSeen(usable))

    def _decide(self, now: float) -> None:
        """Report to the authority what has happened, and carry out its commands."""
        wake_at = self._authority.wake_at()
        if wake_at is not None and wake_at <= now:
            self._events.append(TimePassed())
        while self._events and self._end is None and self._refused is None:
            self._carry_out(self._authority.handle(self._events.popleft(), time.monotonic()))
        if self._end is not None:
            self._events.clear()

    def _carry_out(self, commanded: Sequence[Command]) -> None:
        if not self._is_ended_by_user():
            self._start([command for command in commanded if isinstance(command, StartMember)])
        for command in commanded:
            match command:
                case SendOrder() | Kill() | Look():
                    self._send(command.member, command)
                case Note(text):
                    self._output.note(text)
                case WorldBegun(_, world):
                    self._begin_world(world)
                case EndJob():
                    self._end = command
                    self.ending.has_ended(command.grace)

    def _start(self, starting: Sequence[StartMember]) -> None:
        if not starting:
            return
        for each in starting:
            if self._is_elastic:
                self._open_files(each.member, each.size, is_joiner=each.is_joiner)
            self._processes[each.member] = WorkerProcess(self._hosts.machine_of(each.host), each.host)
        self._processes.running.update(each.member for each in starting)  # if a host is lost now, they are lost with it
        for machine, order in self._starts.orders(starting).items():
            keys = [each.key for each in order.processes]
            if machine not in self._with_task:
                self._with_task.add(machine)
                for content in self._task.pieces():
                    self._send(keys[0], orders.TaskPiece(content))
            self._send(keys[0], order)
            if machine != LOCAL and self._hosts.remote(machine) is None:  # lost: the authority is notified of it
                self._processes.running.difference_update(keys)
            elif machine == LOCAL and self._is_ended_by_user():  # some of them were not started any more
                self._processes.running -= set(keys) - set(self._local.running)

    def _open_files(self, key: int, size: int, *, is_joiner: bool = False) -> None:
        """Create the files for a process's output, if requested; without those of a joiner the job goes on.

        Args:
            size: of the first world.
        """
        width = len(str(size - 1))
        try:
            self._output.open_files(key, f"member.{key}" if is_joiner else f"rank.{key:0{width}d}")
        except LaunchError as error:
            if not is_joiner:
                raise
            self._output.note(str(error))

    def _send(self, key: int, order: orders.Start | orders.TaskPiece | Kill | Look | SendOrder) -> None:
        """Send an order to the machine of a process that runs."""
        if key not in self._processes.running:
            return
        machine = self._processes[key].machine
        remote = self._hosts.remote(machine)
        if remote is not None:
            remote.send(order)
        elif machine == LOCAL:
            self._local.obey(order)

    def _begin_world(self, world: Sequence[int]) -> None:
        rank_hosts = self._processes.begin_world(world)
        self._output.expect(len(world))
        self._observer.begin_world(rank_hosts)
        self._last_sample = 0.0  # other hosts answer before the next one, which is shown

    # --- events of worker groups -----------------------------------------------------------------------------------------

    def _take(self, machine: str, event: Event) -> None:
        match event:
            case Output():
                self._output.feed(event)
            case FromMember():
                self._take_message(event)
            case Exited():
                self._take_exit(event)
            case orders.AgentReady() if self._settings.verbose:
                self._output.note(f"host {machine} is {event.describe()}")
            case Started():
                who = f"member {event.key}" if self._is_elastic else f"rank {event.key}"
                self._output.started(who, event, machine, verbose=self._settings.verbose)
            case orders.RouteReply() if machine in self._listening:
                key, message = self._listening.pop(machine)
                self._events.append(MemberReported(key, listening_at(message, event.addresses)))
            case orders.HostNoticed():
                self._notices.take(machine, event)
            case Note(text):
                self._output.note(text if machine == LOCAL else f"host {machine}: {text}")
            case SeenStopped():
                self._events.append(event)
            case Result():
                self._task.write_result(event)
            case StartRefused():
                self._take_refusal(machine, event)
            case ProgressReply():
                self._observe(machine, event)

    def _take_message(self, event: FromMember) -> None:
        if event.problem:
            self._processes[event.member].problem = f"hvdrun has ended it for what it sent: {printable(event.problem)}"
            self._send(event.member, Kill(event.member, event.problem))
            return
        message = with_texts(event.message, printable)
        if isinstance(message, membership_messages.Listening):
            machine = self._processes[event.member].machine
            others = dict.fromkeys(self._processes[each].machine for each in sorted(self._processes.running))
            found = self._starts.listening(machine, message, others)
            if found is None:
                self._listening[machine] = (event.member, message)
                return
            message = found
        self._events.append(MemberReported(event.member, message))

    def _take_exit(self, event: Exited) -> None:
        if event.key not in self._processes.running:
            return  # its host has been given up
        self._processes.running.discard(event.key)
        process, by_user = self._processes[event.key], event.by_us and self._is_ended_by_user()
        self._processes.exits.append(ended := Exit(event.key, event.code, ended_by_us=event.by_us, by_user=by_user))
        cause = process.problem
        if event.record is not None:
            process.record = dated(event.record, time.time())
            cause = cause or f"{process.record.kind}: {process.record.message}"
        if event.key in self._authority.members:
            self._observer.ended(process.rank, event.progress)
        if self._is_elastic:
            if ended.code and not event.by_us:
                self._output.console.reveal(event.key)
            self._output.close_files(event.key)
        self._events.append(MemberGone(event.key, event.code, cause))

    def _take_refusal(self, machine: str, event: StartRefused) -> None:
        reason = event.reason if machine == LOCAL else f"host {machine}: {event.reason}"
        if self._authority.epoch <= 1:
            self._refused = self._refused or commands.CommandError(reason, event.code)
        elif event.key in self._processes.running:
            self._processes.running.discard(event.key)
            self._events.append(MemberGone(event.key, event.code, reason))

    def _on_lost(self, machine: str, reason: str) -> None:
        """Handle the end of a link: the machine's processes end by themselves."""
        gone = self._processes.on(machine)
        self._processes.running.difference_update(gone)
        if self._is_elastic:
            for key in gone:
                self._output.close_files(key)
        elif gone:
            self._lost.append(f"{reason} (with ranks {format_ranks(gone)})")
        if self._authority.epoch:  # else the pool is aware of it, and there is nothing to lose yet
            self._events.append(HostLost(machine, reason.removeprefix(f"host {machine} was lost: ")))

    def _observe(self, machine: str, event: ProgressReply) -> None:
        """Show the progress of a machine's processes, by their ranks."""
        world = set(self._authority.members)
        ranks = {self._processes[key].rank: sample for key, sample in event.ranks.items() if key in world}
        self._observer.take(machine, ProgressReply(ranks, event.waits))

    def _pause(self, paused: bool) -> None:
        self._local.pause(paused)
        self._hosts.pause(paused)

    def _is_ended_by_user(self) -> bool:
        return bool(self.ending.user_signal)
