"""A model of an elastic job around a real `Authority`: processes that answer late, freeze, and die at any moment.

Time is simulated. What must always be true is asserted wherever it could become false. `process.py` has the processes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable

from hvdlite.membership.authority import Authority
from hvdlite.membership.events import (
    TOO_FEW,
    Command,
    EndJob,
    Event,
    HostLost,
    HostsSeen,
    Kill,
    Limits,
    Look,
    MemberGone,
    MemberReported,
    MembersNoticed,
    Note,
    SeenStopped,
    SendOrder,
    StartMember,
    TimePassed,
    WorldBegun,
)
from hvdlite.membership.members import MemberState
from hvdlite.membership.messages import (
    AllFinished,
    Dismissed,
    MemberIdle,
    MemberMessage,
    MemberNoticed,
    StateReport,
    WorldOrder,
)
from tests.membership.invariants import validate
from tests.membership.process import Process

NEVER = 10**9


class Job:
    """A job of processes, with an authority.

    Args:
        seed: of everything that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        draw = self.random
        self.hosts = {name: draw.randint(1, 3) for name in "abcd"[:draw.randint(1, 4)]}
        start = draw.randint(1, min(6, sum(self.hosts.values())))
        low = draw.randint(1, start)
        self.limits = Limits(
            start, low, draw.choice([None, start + draw.randint(0, 3)]), draw.choice([None, None, None, draw.randint(1, 6)]),
            elastic_timeout=draw.choice([20.0, 600.0]), cooldown=draw.choice([None, (1.0, 8.0), (1.0, 8.0)]),
            whole_host=draw.random() < 0.1, failures_without_progress=draw.choice([3, 3, 50]),
            starts_with_all=draw.random() < 0.2, ends_at_reset_limit=draw.random() < 0.1, grace=draw.choice([3.0, 30.0]))
        self.now = 0.0
        self.authority = Authority(self.limits, self.now)
        self.steps = draw.randint(5, 150) if draw.random() < 0.3 else NEVER  # until training finishes
        self.has_finished = False
        self.commit_every = draw.randint(1, 4)
        self.joins = draw.choice([0.0, 0.0, 0.1])  # how probable it is that a process joins after a step
        self.other_random = random.Random(f"bodies {seed}")
        self.counts = self.other_random.random() < 0.4  # its loop counts bodies
        self.processes: dict[int, Process] = {}
        self.worlds: dict[int, tuple[int, ...]] = {}
        self.gone: set[int] = set()  # as the authority knows
        self.state_reports: dict[int, tuple[int, StateReport]] = {}  # what the authority was told, with the epoch
        self.dismissed: set[int] = set()
        self.killed: set[int] = set()
        self.cut: set[frozenset[str]] = set()  # hosts that cannot reach each other
        self.barred: set[str] = set()
        self.unreachable: set[str] = set()  # from other hosts
        self.used: set[tuple[str, int]] = set()
        self.has_cut = False  # ever
        self.end: EndJob | None = None
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._wake: float | None = None

    # --- time --------------------------------------------------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._serial), action))

    def run(self, seconds: float) -> None:
        """Let time pass, or less if the job ends."""
        until = self.now + seconds
        while self.end is None and self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until

    # --- the launcher ------------------------------------------------------------------------------------------------------

    def tell_authority(self, event: Event) -> None:
        if self.end is not None:
            assert self.authority.handle(event, self.now) == []
            return
        self.events += 1
        if isinstance(event, MemberGone):
            self.gone.add(event.member)
            self.used.add((self.processes[event.member].host, self.processes[event.member].start.slot))
        elif isinstance(event, HostLost):
            self.gone |= {process.id for process in self.processes.values() if process.host == event.host}
            self.used |= {(event.host, slot) for slot in range(9)}
        elif isinstance(event, MemberReported) and isinstance(event.message, MemberIdle):
            self.state_reports[event.member] = (event.message.epoch, event.message.state_report)
        for command in self.authority.handle(event, self.now):
            self.carry_out(command)
        validate(self.authority.world)
        wake = self.authority.wake_at()
        if wake is not None and wake != self._wake:
            assert wake > self.now
            self._wake = wake
            self.at(wake - self.now, lambda: self.wake_up(wake))

    def wake_up(self, when: float) -> None:
        if self._wake == when:
            self._wake = None
            self.now = max(self.now, when)
            self.tell_authority(TimePassed())

    def make_process(self, start: StartMember) -> Process:
        return Process(self, start)

    def carry_out(self, command: Command) -> None:
        assert self.end is None, "a command after the end"
        if isinstance(command, StartMember):
            taken = {(other.host, other.start.slot) for other in self.processes.values() if other.id not in self.gone}
            assert (command.host, command.slot) not in taken and command.slot < self.hosts[command.host]
            assert command.host not in self.barred | self.unreachable
            self.used.add((command.host, command.slot))
            process = self.processes[command.member] = self.make_process(command)
            if not command.is_joiner:
                self.worlds[1] = (*self.worlds.get(1, ()), command.member)
            process.later(3, process.begin)
        elif isinstance(command, SendOrder):
            assert command.member not in self.gone, f"{command} to a member that is gone"
            assert command.member not in self.killed, f"{command} to a member that was killed"
            process = self.processes[command.member]
            order = command.order
            self.has_finished |= isinstance(order, AllFinished)
            if isinstance(order, WorldOrder):
                self.check_order(process, order)
            process.last_down = max(process.last_down, self.now + self.random.uniform(0, 0.2))
            self.at(process.last_down - self.now, lambda: process.deliver(order))
            self.dismissed |= {command.member} if isinstance(order, Dismissed) else set()
        elif isinstance(command, Kill):
            assert command.member not in self.gone | self.killed
            self.killed.add(command.member)
            self.at(self.random.uniform(0, 0.5), lambda: self.processes[command.member].die(-9))
        elif isinstance(command, Look):
            if self.processes[command.member].is_frozen:
                self.at(self.random.uniform(0, 0.5), lambda: self.tell_authority(SeenStopped(command.member)))
        elif isinstance(command, WorldBegun):
            self.begun(command)
        elif isinstance(command, Note):
            assert command.text
            if "no more processes are started" in command.text:
                self.unreachable |= {host for host in "abcdef" if command.text.startswith(f"{host} cannot")}
                if self.limits.cooldown is None:
                    self.barred |= {host for host in "abcdef" if f"started on {host}" in command.text}
        elif isinstance(command, EndJob):
            self.end = command

    def begun(self, command: WorldBegun) -> None:
        for member in self.worlds.get(command.epoch - 1, ()):
            process = self.processes[member]
            assert process.doing in ("idle", "dead", "exiting") or process.epoch == command.epoch, (member, process.doing)
        size = len(command.members)
        assert self.limits.min_np <= size <= (self.limits.max_np or size) and len(set(command.members)) == size
        assert command.epoch == len(self.worlds) + (command.epoch > 1) and self.gone.isdisjoint(command.members)
        told = {member: state_report for member, (epoch, state_report) in self.state_reports.items()
                if epoch == command.epoch - 1 and member not in self.gone and state_report.has_state}
        last = self.last_position(told.values())
        rests = [(self.resumes(each, last), not each.is_behind, each.commits) for each in told.values()]
        if command.epoch > 1:
            donor = told[command.members[0]]
            assert (self.resumes(donor, last), not donor.is_behind, donor.commits) == max(rests), (donor, rests)
        self.worlds[command.epoch] = command.members

    def check_order(self, process: Process, order: WorldOrder) -> None:
        assert process.id in order.members and process.doing in ("idle", "joining", "dead")
        told = [self.state_reports[member][1] for member in order.members if member in self.state_reports]
        having = [state_report for state_report in told if state_report.has_state]
        resumes = any(self.resumes(state_report, self.last_position(having)) for state_report in having)
        assert not (order.restore and resumes), "it could go on without a commit"
        assert order.restore or resumes or (all(state_report.at_rest for state_report in having)
                                            and not all(state_report.is_behind for state_report in having))
        if resumes:
            assert (order.commits, order.boundaries) == self.last_position(having)
        assert sorted(rank for ranks in order.ranks_by_machine for rank in ranks) == list(range(len(order.members)))
        assert order.host_names == tuple(self.processes[member].host for member in order.members)

    @staticmethod
    def last_position(told: Iterable[StateReport]) -> tuple[int, int]:
        return max(((each.commits, each.boundaries) for each in told if not each.is_behind), default=(-1, -1))

    @staticmethod
    def resumes(told: StateReport, last: tuple[int, int]) -> bool:
        return told.can_resume and not told.is_behind and (told.commits, told.boundaries) == last

    # --- processes ---------------------------------------------------------------------------------------------------------

    def hear(self, process: Process, message: MemberMessage) -> None:
        if process.id not in self.gone:
            self.tell_authority(MemberReported(process.id, message))

    def tell_gone(self, process: Process, code: int, cause: str) -> None:
        if process.id not in self.gone:
            self.tell_authority(MemberGone(process.id, code, cause))

    def is_cut(self, one: Process, other: Process) -> bool:
        return frozenset((one.host, other.host)) in self.cut

    # --- faults ------------------------------------------------------------------------------------------------------------

    def lose_host(self, host: str) -> None:
        for process in self.processes.values():
            if process.host == host:
                process.die(-9, tell=False)
        self.tell_authority(HostLost(host, "the connection was lost"))

    def discover(self) -> None:
        self.unreachable &= set(self.hosts)
        self.tell_authority(HostsSeen(dict(self.hosts)))

    def fault(self) -> None:
        """Let something go wrong."""
        draw = self.random
        alive = [process for process in self.processes.values() if process.is_alive]
        kind = draw.choices(
            ["die", "freeze", "host lost", "hosts", "error", "cut", "notice", "leave"], [8, 2, 0.5, 3, 2, 1.5, 2, 1])[0]
        if kind == "hosts":
            name = draw.choice("abcde")
            count = draw.randint(0, 3)
            self.hosts.pop(name, None)
            if count:
                self.hosts[name] = count
            else:
                self.used = {slot for slot in self.used if slot[0] != name}
            self.discover()
        elif not alive:
            return
        elif kind == "die":
            code, cause = draw.choice([(-9, ""), (-11, ""), (1, ""), (1, f"ValueError: {draw.randint(0, 30)}"), (0, "")])
            draw.choice(alive).die(code, cause)
        elif kind == "freeze":
            draw.choice(alive).freeze(draw.uniform(0, 25))
        elif kind == "notice":
            self.notice([draw.choice(alive)], self.limits.grace)
        elif kind == "leave":
            host = draw.choice(alive).host
            self.notice([each for each in alive if each.host == host], draw.choice([2.0, 20.0, float("inf")]), host)
        elif kind == "host lost":
            self.lose_host(draw.choice(alive).host)
        elif kind == "error":
            process = draw.choice(alive)
            process.lose_world(process.epoch, "a broken plane")
        else:
            self.has_cut = True
            self.cut ^= {frozenset(draw.sample("abcde", 2))}

    def notice(self, members: list[Process], seconds: float, host: str = "") -> None:
        """Members get SIGTERM, which ends those outside of elastic.run; or their host is to be left."""
        if host:
            self.hosts.pop(host, None)
            self.discover()
            self.tell_authority(MembersNoticed(tuple(each.id for each in members), "hvdrun --leave", seconds))
        for each in members:
            if not host and each.is_ready and not each.is_frozen:
                self.used.add((each.host, each.start.slot))
                each.say(MemberNoticed())
            elif not host:
                each.die(-15)
            self.at(seconds + 2, lambda each=each: self.check_left(each))  # type: ignore[misc]

    def check_left(self, member: Process) -> None:
        """Check that a member that was told to leave has left, when its time is over; one that was dismissed has more."""
        told = self.authority.world.everybody[member.id]
        is_leaving = told.state is MemberState.DISMISSED and self.now < told.leave_by
        assert not told.notice or not member.is_alive or is_leaving or self.has_finished, f"{member.id} is still there"

    def calm(self) -> None:
        """Let nothing go wrong any more."""
        self.cut.clear()

    # --- a whole job -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the job when nothing has gone wrong for long: the world is as large as allowed, and nobody is left over."""
        alive = [process for process in self.processes.values() if process.is_alive]
        members = self.authority.members
        assert {process.id for process in alive} == set(members), "a process is in no world"
        assert {process.doing for process in alive} == {"training"}
        if self.limits.reset_limit is None and len(members) < (self.limits.max_np or 99):
            placed = {(process.host, process.start.slot) for process in alive}
            slots = {(host, slot) for host, count in self.hosts.items() for slot in range(count)}
            spoiled = {slot for slot in slots if slot[0] in self.barred or (slot in self.used and not self.limits.cooldown)}
            usable = {slot for slot in slots - spoiled if slot[0] not in self.unreachable}
            assert usable <= placed, f"{usable - placed} are not used"

    def check_end(self) -> None:
        """Check that the job had a reason to end."""
        assert self.end is not None
        reason = self.end.reason
        if self.has_finished:
            assert self.end.code == 0 or reason
        elif self.end.code == TOO_FEW:
            assert "are needed; there were" in reason or "all ranks were told to leave" in reason
        elif "cannot meet" in reason:
            assert self.has_cut
        elif "no rank that has the state" in reason:
            assert not [process for process in self.processes.values() if process.doing == "idle" and process.has_state
                        and process.id not in self.dismissed]
        elif "resets" in reason:
            assert self.authority.epoch == (self.limits.reset_limit or 0) + 1
        else:
            no_progress = "members have failed" in reason or "worlds in a row have ended" in reason
            assert no_progress or self.end.code == 0 or self.authority.epoch == 1, reason


def play(seed: int) -> int:
    """Play a job; return how many events its authority has handled. What fails has a note with the seed."""
    job = Job(seed)
    play_job(job)
    return job.events


def play_job(job: Job) -> None:
    """Let things go wrong in a job for some time, then let it recover, and finish if it can."""
    try:
        _play(job)
    except Exception as error:
        raise AssertionError(f"seed {job.seed} after {job.now:.2f} s") from error


def _play(job: Job) -> None:
    job.discover()
    if job.random.random() < 0.8:
        job.run(12)
    for _ in range(job.random.randint(1, 25)):
        job.run(job.random.choice([0.2, 1.0, 4.0, 10.0]))
        if job.end is None:
            job.fault()
    job.run(5)
    if job.end is None:
        job.calm()
        job.hosts = dict(job.hosts) or {"a": 1}
        job.discover()
        job.run(60)
        if job.authority.wake_at() is not None:
            job.run(650)
    if job.end is None and job.steps < NEVER:
        job.run(300)
    if job.end is None:
        job.check()
        job.steps = 1 + max(process.step for process in job.processes.values() if process.is_alive)
        job.run(60)
        assert job.end is not None and (job.end.code, job.end.reason) == (0, ""), job.end
    else:
        job.check_end()
