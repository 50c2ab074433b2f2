"""A model of an elastic job around a real `Authority`: processes that answer late, freeze, and die at any moment.

Time is simulated. A process trains in steps, each with a collective that completes when all members of its world have
arrived at it. What must always be true is asserted wherever it could become false.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable

from hvdlite.membership.authority import Authority
from hvdlite.membership.events import (
    Command,
    EndJob,
    Event,
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
from hvdlite.membership.limits import Limits
from hvdlite.membership.messages import (
    Alive,
    AllFinished,
    AskAlive,
    BoundaryTold,
    CoordinatorAt,
    Dismissed,
    Listening,
    MeetingFailed,
    MemberFinished,
    MemberHello,
    MemberIdle,
    MemberMessage,
    MemberOrder,
    MemberReady,
    Met,
    PrepareStop,
    Standing,
    StopAt,
    StopNow,
    WorldOrder,
)
from hvdlite.membership.worlds import TOO_FEW

NEVER = 10**9
_SYNC = -1  # the step of the collective that carries rank 0's state


class Process:
    """A member's process."""

    def __init__(self, start: StartMember) -> None:
        self.start = start
        self.id, self.host = start.member, start.host
        self.doing = "starting"  # meeting, training, ending, idle, joining, finished, exiting, dead
        self.is_frozen = False
        self.waiting: list[Callable[[], None]] = []  # what it does when it is not frozen any more
        self.epoch = 0 if start.is_joiner else 1
        self.is_ready = False
        self.has_state = not start.is_joiner
        self.commits = 0
        self.at_rest = False
        self.order: WorldOrder | None = None
        self.has_address = False  # of rank 0, if it needs one
        self.step = _SYNC
        self.arrived = False  # at the collective of this step
        self.passed = 0  # boundaries of this world
        self.asked: int | None = None  # the change for which it waits at the next boundary
        self.stop_at: int | None = None
        self.waits_at_boundary = False
        self.last_up = self.last_down = 0.0  # when the last message arrives, in both directions

    @property
    def is_alive(self) -> bool:
        return self.doing != "dead"


class Job:
    """A job of processes, with an authority.

    Args:
        seed: of everything that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        draw = self.random
        self.hosts = {name: draw.randint(1, 3) for name in "abcd"[:draw.randint(1, 4)]}
        start = draw.randint(1, min(6, sum(self.hosts.values())))
        low = draw.randint(1, start)
        self.limits = Limits(
            start, low, draw.choice([None, start + draw.randint(0, 3)]), draw.choice([None, None, None, draw.randint(1, 6)]),
            elastic_timeout=draw.choice([20.0, 600.0]), cooldown=draw.choice([None, (1.0, 8.0), (1.0, 8.0)]),
            whole_host=draw.random() < 0.1, failures_without_progress=draw.choice([3, 3, 50]))
        self.now = 0.0
        self.authority = Authority(self.limits, self.now)
        self.steps = draw.randint(5, 150) if draw.random() < 0.3 else NEVER  # until training finishes
        self.has_finished = False
        self.commit_every = draw.randint(1, 4)
        self.processes: dict[int, Process] = {}
        self.worlds: dict[int, tuple[int, ...]] = {}
        self.gone: set[int] = set()  # as the authority knows
        self.standings: dict[int, tuple[int, Standing]] = {}  # what the authority was told, with the epoch
        self.dismissed: set[int] = set()
        self.cut: set[frozenset[str]] = set()  # hosts that cannot reach each other
        self.barred: set[str] = set()
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

    def later(self, process: Process, longest: float, action: Callable[[], None]) -> None:
        """Let a process do something after a while, if it is alive and when it is not frozen."""
        def act() -> None:
            if process.is_frozen:
                process.waiting.append(act)
            elif process.is_alive:
                action()
        self.at(self.random.uniform(0, longest), act)

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
        elif isinstance(event, MemberSaid) and isinstance(event.message, MemberIdle):
            self.standings[event.member] = (event.message.epoch, event.message.standing)
        for command in self.authority.handle(event, self.now):
            self.carry_out(command)
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

    def carry_out(self, command: Command) -> None:
        assert self.end is None, "a command after the end"
        if isinstance(command, StartMember):
            taken = {(other.host, other.start.slot) for other in self.processes.values() if other.id not in self.gone}
            assert (command.host, command.slot) not in taken and command.slot < self.hosts[command.host]
            assert command.host not in self.barred
            self.used.add((command.host, command.slot))
            process = self.processes[command.member] = Process(command)
            if not command.is_joiner:
                self.worlds[1] = (*self.worlds.get(1, ()), command.member)
            self.later(process, 3, lambda: self.begin(process))
        elif isinstance(command, Tell):
            assert command.member not in self.gone, f"{command} to a member that is gone"
            process = self.processes[command.member]
            order = command.order
            self.has_finished |= isinstance(order, AllFinished)
            if isinstance(order, WorldOrder):
                self.check_order(process, order)
            process.last_down = max(process.last_down, self.now + self.random.uniform(0, 0.2))
            self.at(process.last_down - self.now, lambda: self.deliver(process, order))
            self.dismissed |= {command.member} if isinstance(order, Dismissed) else set()
        elif isinstance(command, Kill):
            assert command.member not in self.gone
            self.at(self.random.uniform(0, 0.5), lambda: self.die(self.processes[command.member], -9))
        elif isinstance(command, WorldBegun):
            self.begun(command)
        elif isinstance(command, Note):
            assert command.text
            if "no more processes are started" in command.text and self.limits.cooldown is None:
                self.barred |= {host for host in "abcdef" if f"started on {host}" in command.text
                                or command.text.startswith(f"{host} cannot")}
        elif isinstance(command, EndJob):
            self.end = command

    def begun(self, command: WorldBegun) -> None:
        for member in self.worlds.get(command.epoch - 1, ()):
            process = self.processes[member]
            assert process.doing in ("idle", "dead", "exiting") or process.epoch == command.epoch, (member, process.doing)
        size = len(command.members)
        assert self.limits.min_np <= size <= (self.limits.max_np or size) and len(set(command.members)) == size
        assert command.epoch == len(self.worlds) + (command.epoch > 1) and self.gone.isdisjoint(command.members)
        best = [(standing.commits, member) for member, (epoch, standing) in self.standings.items()
                if epoch == command.epoch - 1 and member not in self.gone and standing.has_state]
        if command.epoch > 1:
            assert (max(best)[0], command.members[0]) in best, "the donor must have the greatest standing"
        self.worlds[command.epoch] = command.members

    def check_order(self, process: Process, order: WorldOrder) -> None:
        assert process.id in order.members and process.doing in ("idle", "joining", "dead")
        told = [self.standings[member][1] for member in order.members if member in self.standings]
        assert order.restore or all(standing.at_rest for standing in told if standing.has_state)
        assert sorted(rank for ranks in order.ranks_by_machine for rank in ranks) == list(range(len(order.members)))
        assert order.host_names == tuple(self.processes[member].host for member in order.members)

    # --- processes ---------------------------------------------------------------------------------------------------------

    def say(self, process: Process, message: MemberMessage) -> None:
        process.last_up = max(process.last_up, self.now + self.random.uniform(0, 0.2))
        self.at(process.last_up - self.now, lambda: self.hear(process, message))

    def hear(self, process: Process, message: MemberMessage) -> None:
        if process.id not in self.gone:
            self.tell_authority(MemberSaid(process.id, message))

    def world(self, process: Process) -> list[Process]:
        return [self.processes[member] for member in self.worlds[process.epoch]]

    def is_cut(self, one: Process, other: Process) -> bool:
        return frozenset((one.host, other.host)) in self.cut

    def begin(self, process: Process) -> None:
        self.say(process, MemberHello(process.id, 1000 + process.id))
        if process.start.is_joiner:
            self.say(process, MemberReady())
            process.is_ready, process.doing = True, "joining"
        elif process.doing == "starting":
            self.enter_meeting(process)

    def enter_meeting(self, process: Process) -> None:
        process.doing = "meeting"
        epoch = process.epoch
        world = self.world(process)
        if process.id == world[0].id and process.order is not None and len(process.order.ranks_by_machine) > 1:
            self.say(process, Listening(epoch, ("10.0.0.1", "10.1.0.1"), 4000))
        if self.is_cut(process, world[0]):
            self.later(process, 5, lambda: self.lose_world(process, epoch, "no route"))
        self.at(15, lambda: self.lose_world(process, epoch, "nobody came") if process.doing == "meeting" else None)
        self.meet(world, epoch)

    def meet(self, world: list[Process], epoch: int) -> None:
        for each in world:
            if each.epoch != epoch or each.doing != "meeting" or self.is_cut(each, world[0]):
                return
            needs_address = each is not world[0] and each.order is not None and len(each.order.ranks_by_machine) > 1
            if needs_address and not each.has_address:
                return
        for each in world:
            self.later(each, 0.3, functools.partial(self.met, each, epoch))

    def met(self, process: Process, epoch: int) -> None:
        if process.doing == "meeting" and process.epoch == epoch:
            process.doing = "training"
            self.say(process, Met(epoch))
            if process.is_ready:
                self.arrive_later(process)
            else:
                self.later(process, 3, lambda: self.enter_run(process))

    def enter_run(self, process: Process) -> None:
        process.is_ready = True
        self.say(process, MemberReady())
        if process.doing == "training":
            self.arrive_later(process)
        elif process.doing == "lost":
            self.lose_world(process, process.epoch, "its world had ended")

    def arrive_later(self, process: Process) -> None:
        at = process.epoch, process.step

        def arrive() -> None:
            if process.doing == "training" and (process.epoch, process.step) == at and not process.waits_at_boundary:
                process.arrived = True
                self.complete(process)
        self.later(process, 0.5, arrive)

    def complete(self, process: Process) -> None:
        """Complete the collective of a step if all members of the world have come to it."""
        world, step, epoch = self.world(process), process.step, process.epoch
        if all(each.epoch == epoch and (each.step > step or (each.step == step and each.arrived)) for each in world):
            assert self.authority.epoch == epoch, "an old world completes a collective"
            for each in world:
                if each.step == step and each.is_alive:
                    self.later(each, 0.1, functools.partial(self.completed, each, epoch, step))

    def completed(self, process: Process, epoch: int, step: int) -> None:
        if process.doing != "training" or (process.epoch, process.step) != (epoch, step) or not process.arrived:
            return
        process.arrived, process.at_rest = False, False
        process.step += 1
        if step == _SYNC:
            process.has_state = True
            process.commits = process.order.commits if process.order else 0
            self.arrive_later(process)
            return
        if process.step % self.commit_every == 0:
            process.commits += 1
        if process.asked is not None and process.stop_at is None:
            process.waits_at_boundary = True
        else:
            self.pass_boundary(process)

    def pass_boundary(self, process: Process) -> None:
        process.waits_at_boundary = False
        process.passed += 1
        if process.stop_at == process.passed:
            process.at_rest = True
            at = {each.step for each in self.world(process) if each.doing in ("ending", "idle") and each.at_rest
                  and each.epoch == process.epoch}
            assert at <= {process.step}, "members stop at different boundaries"
            process.doing = "ending"
            self.later(process, 1, lambda: self.become_idle(process, process.epoch, ""))
        elif process.step >= self.steps:
            assert process.stop_at is None or process.stop_at > process.passed
            process.doing = "finished"
            self.say(process, MemberFinished(process.epoch))
        else:
            assert process.stop_at is None or process.stop_at > process.passed, "it has passed the boundary already"
            self.arrive_later(process)

    def lose_world(self, process: Process, epoch: int, reason: str) -> None:
        """A collective or the meeting fails on this process, or it was told to stop."""
        if not process.is_alive or process.epoch != epoch or process.is_frozen:
            return
        if process.doing not in ("starting", "meeting", "training", "finished", "lost"):
            return
        if process.doing == "finished" and reason != "told":
            return  # it only waits for an order
        if not process.is_ready:
            if process.doing == "training" and self.random.random() < 0.5:
                process.doing = "lost"  # it sees the loss at the entrance of elastic.run only
                self.later(process, 20, lambda: self.enter_run(process) if not process.is_ready else None)
            elif process.doing != "lost":
                self.later(process, 1, lambda: self.die(process, 1, "WorldLostError: a peer was lost"))
            return
        if process.doing == "meeting" and reason != "told":
            missing: tuple[int, ...] = ()
            world = self.world(process)
            if process is world[0]:
                missing = tuple(rank for rank, each in enumerate(world) if each.doing != "meeting"
                                or self.is_cut(each, process))
            self.say(process, MeetingFailed(epoch, reason, missing))
        process.doing = "ending"
        self.later(process, 1, lambda: self.become_idle(process, epoch, reason))

    def become_idle(self, process: Process, epoch: int, reason: str) -> None:
        if process.doing == "ending" and process.epoch == epoch:
            process.doing = "idle"
            process.arrived = process.waits_at_boundary = False
            process.asked = process.stop_at = None
            self.say(process, MemberIdle(epoch, Standing(
                has_state=process.has_state, commits=process.commits, at_rest=process.at_rest), reason))

    def deliver(self, process: Process, order: MemberOrder) -> None:
        if process.is_frozen:
            process.waiting.append(lambda: self.deliver(process, order))
        elif process.is_alive:
            self.obey(process, order)

    def obey(self, process: Process, order: MemberOrder) -> None:
        if isinstance(order, StopNow):
            self.lose_world(process, order.epoch, "told")
        elif isinstance(order, AskAlive):
            self.say(process, Alive(order.epoch, in_user_code=self.random.random() < 0.5))
        elif isinstance(order, PrepareStop):
            if process.doing in ("training", "finished"):
                process.asked, process.stop_at = order.change, None
                self.say(process, BoundaryTold(order.change, process.passed))
        elif isinstance(order, StopAt):
            if process.asked == order.change:
                process.stop_at = order.boundary
                if process.waits_at_boundary:
                    self.pass_boundary(process)
        elif isinstance(order, WorldOrder):
            assert process.doing in ("idle", "joining") and process.epoch < order.epoch
            process.epoch, process.order, process.has_address = order.epoch, order, False
            process.step, process.passed, process.asked, process.stop_at = _SYNC, 0, None, None
            process.arrived = False
            process.at_rest = process.at_rest and not order.restore
            self.enter_meeting(process)
        elif isinstance(order, CoordinatorAt):
            if order.epoch == process.epoch:
                process.has_address = True
                self.meet(self.world(process), process.epoch)
        elif isinstance(order, (AllFinished, Dismissed)):
            assert process.doing == "finished" if isinstance(order, AllFinished) else process.doing in ("idle", "joining")
            process.doing = "exiting"
            slow = 12 if isinstance(order, Dismissed) and self.random.random() < 0.2 else 2
            self.later(process, slow, lambda: self.die(process, 0))

    # --- faults ------------------------------------------------------------------------------------------------------------

    def die(self, process: Process, code: int, cause: str = "", *, tell: bool = True) -> None:
        if not process.is_alive:
            return
        process.doing = "dead"
        if tell:
            when = max(process.last_up, self.now + self.random.uniform(0, 0.3))
            self.at(when - self.now, lambda: self.tell_gone(process, code, cause))
        for other in list(self.processes.values()):
            if other.is_alive and other.epoch == process.epoch and self.random.random() < 0.7:
                self.later(other, 0.5, functools.partial(self.lose_world, other, process.epoch, "a peer was lost"))

    def tell_gone(self, process: Process, code: int, cause: str) -> None:
        if process.id not in self.gone:
            self.tell_authority(MemberGone(process.id, code, cause))

    def freeze(self, process: Process, seconds: float) -> None:
        process.is_frozen = True

        def thaw() -> None:
            process.is_frozen = False
            waiting, process.waiting = process.waiting, []
            for action in waiting:
                action()
        self.at(seconds, thaw)

    def lose_host(self, host: str) -> None:
        for process in self.processes.values():
            if process.host == host:
                self.die(process, -9, tell=False)
        self.tell_authority(HostLost(host, "the connection was lost"))

    def discover(self) -> None:
        self.tell_authority(HostsSeen(dict(self.hosts)))

    def fault(self) -> None:
        """Let something go wrong."""
        draw = self.random
        alive = [process for process in self.processes.values() if process.is_alive]
        kind = draw.choices(
            ["die", "freeze", "host lost", "hosts", "error", "cut"], [8, 2, 0.5, 3, 2, 1.5])[0]
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
            self.die(draw.choice(alive), code, cause)
        elif kind == "freeze":
            self.freeze(draw.choice(alive), draw.uniform(0, 25))
        elif kind == "host lost":
            self.lose_host(draw.choice(alive).host)
        elif kind == "error":
            process = draw.choice(alive)
            self.lose_world(process, process.epoch, "a broken plane")
        else:
            self.has_cut = True
            self.cut ^= {frozenset(draw.sample("abcde", 2))}

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
            spoiled = {slot for slot in slots if slot in self.used or slot[0] in self.barred}
            usable = slots if self.limits.cooldown else slots - spoiled
            assert usable <= placed, f"{usable - placed} are not used"

    def check_end(self) -> None:
        """Check that the job had a reason to end."""
        assert self.end is not None
        reason = self.end.reason
        if self.has_finished:
            assert self.end.code == 0 or reason
        elif self.end.code == TOO_FEW:
            assert "are needed; there were" in reason
        elif "cannot meet" in reason:
            assert self.has_cut
        elif "no rank that has the state" in reason:
            assert not [process for process in self.processes.values() if process.doing == "idle" and process.has_state
                        and process.id not in self.dismissed]
        elif "resets" in reason:
            assert self.authority.epoch == (self.limits.reset_limit or 0) + 1
        else:
            assert "members have failed" in reason or self.end.code == 0 or self.authority.epoch == 1, reason


def play(seed: int) -> int:
    """Play a job; return how many events its authority has handled. What fails has a note with the seed."""
    job = Job(seed)
    try:
        _play(job)
    except Exception as error:
        raise AssertionError(f"seed {seed} after {job.now:.2f} s") from error
    return job.events


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
        job.cut.clear()
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
