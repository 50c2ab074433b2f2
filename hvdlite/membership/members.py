"""The members of an elastic job and their world: the states in which they can be, and what leads from one to the next.

`TRANSITIONS` has all that changes the state of a member. A method of `JobWorld` that changes states returns the commands for
it. `SUCCESSORS` has the order of a world's states; `authority.py` decides when it goes over from one to the next.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from hvdlite.membership import messages
from hvdlite.membership.events import (
    Command,
    EndJob,
    Kill,
    Limits,
    Look,
    MemberGone,
    Note,
    SendOrder,
    StartMember,
    WorldBegun,
)
from hvdlite.membership.expectations import NOTHING, Expectation
from hvdlite.membership.hosts import Slot
from hvdlite.membership.messages import StateReport, WorldOrder


class MemberState(enum.Enum):
    """Where a member is in its life."""

    STARTING = enum.auto()  # a joiner that is not at the entrance of elastic.run yet
    READY = enum.auto()  # a joiner that waits for its first world
    FIRST_MEETING = enum.auto()  # a founder that meets the others of world 1, in init()
    MEETING = enum.auto()  # it meets the others of a later world, in elastic.run
    OUTSIDE = enum.auto()  # it has met all others of its world, and is not in elastic.run
    TRAINING = enum.auto()  # it has met them, and is in elastic.run
    FINISHED = enum.auto()  # its training function has returned
    IDLE = enum.auto()  # its world has ended on it
    DISMISSED = enum.auto()  # it was ordered to exit
    KILLED = enum.auto()  # its messages do not count any more
    GONE = enum.auto()


_S: Final = MemberState
JOINING: Final = (_S.STARTING, _S.READY)
IN_WORLD: Final = (_S.FIRST_MEETING, _S.MEETING, _S.OUTSIDE, _S.TRAINING, _S.FINISHED)
SURVIVING: Final = (_S.READY, _S.MEETING, _S.TRAINING, _S.FINISHED, _S.IDLE)
"""These members go on in the next world when theirs is lost; others, which are not in elastic.run, end."""
_SAME: Final = {state: state for state in IN_WORLD}

BLAMED_SECONDS: Final = 1.0
"""See `JobWorld.blame`."""
JOINERS_WAIT: Final = (1.0, 30.0)
"""Seconds; see `JobWorld.next_joining`."""

TRANSITIONS: Final[Mapping[type, Mapping[MemberState, MemberState]]] = {
    # Messages of a member. A message of a member in another state is dropped.
    messages.MemberHello: {},
    messages.MemberReady: {
        _S.STARTING: _S.READY, _S.FIRST_MEETING: _S.TRAINING, _S.MEETING: _S.TRAINING, _S.OUTSIDE: _S.TRAINING},
    messages.Listening: _SAME,
    messages.Met: {_S.FIRST_MEETING: _S.OUTSIDE, _S.MEETING: _S.TRAINING},
    messages.MeetingFailed: _SAME,
    messages.Alive: _SAME,
    messages.BoundaryReport: {_S.TRAINING: _S.TRAINING, _S.FINISHED: _S.FINISHED},
    messages.MemberFinished: dict.fromkeys(IN_WORLD, _S.FINISHED),
    messages.MemberIdle: dict.fromkeys(IN_WORLD, _S.IDLE),
    messages.MemberNoticed: {**_SAME, **{state: state for state in (*JOINING, _S.IDLE)}},
    # Orders to it. There is no order for a member in another state.
    messages.CoordinatorAt: _SAME,
    messages.AskAlive: _SAME,
    messages.PrepareStop: {_S.TRAINING: _S.TRAINING},
    messages.StopAt: {_S.TRAINING: _S.TRAINING, _S.FINISHED: _S.FINISHED},
    messages.StopNow: _SAME,
    messages.AllFinished: {_S.FINISHED: _S.OUTSIDE},
    messages.SaveState: {_S.IDLE: _S.IDLE},
    messages.WorldOrder: dict.fromkeys((_S.READY, _S.IDLE), _S.MEETING),
    messages.Dismissed: dict.fromkeys((_S.READY, _S.IDLE), _S.DISMISSED),
    # What becomes of its process.
    Kill: dict.fromkeys(set(_S) - {_S.KILLED, _S.GONE}, _S.KILLED),
    MemberGone: dict.fromkeys(set(_S) - {_S.GONE}, _S.GONE),
}


@dataclasses.dataclass(eq=False)
class Member:
    """A process of an elastic job.

    Attributes:
        state: changed by `TRANSITIONS` only.
        state_report: what it reported when its last world ended on it; None before.
        wait: what it is expected to do.
        started_at: when its process was started, in seconds.
        ready_at: when it was at the entrance of elastic.run, if it is a joiner.
        fault: why it was killed, if that is its own failure; "" if it was not, or if others are the reason.
        notice: why it is to leave; "" if it was not told to.
        train_until: when it stops training if all others were told to leave, too; the rest of its time is for a checkpoint.
        leave_by: when it is killed if it is still there.
    """

    id: int
    host: str
    slot: int
    state: MemberState
    state_report: StateReport | None = None
    wait: Expectation = NOTHING
    started_at: float = 0.0
    ready_at: float = math.inf
    fault: str = ""
    notice: str = ""
    train_until: float = math.inf
    leave_by: float = math.inf

    @property
    def survives(self) -> bool:
        """Whether it goes on when others are lost."""
        return self.state in SURVIVING

    def name_as(self, rank: int) -> str:
        """Return its name, for people: the number of its process, which it keeps, where that is not its rank."""
        return f"rank {rank}{'' if rank == self.id else f' (process {self.id})'} on {self.host}"


class WorldState(enum.Enum):
    """Where the present world is."""

    FOUNDING = enum.auto()  # there have been too few slots
    MEETING = enum.auto()  # until all members have met
    RUNNING = enum.auto()
    PREPARING = enum.auto()  # until all members have reported their boundaries, for a graceful change
    STOPPING = enum.auto()  # until all have stopped at the same boundary
    ENDING = enum.auto()  # all were ordered to stop at once
    WAITING = enum.auto()  # too few members, all idle, wait for others
    FINISHED = enum.auto()  # elastic.run has returned on all members; it may be called again
    OVER = enum.auto()


IN_FORCE: Final = (WorldState.MEETING, WorldState.RUNNING, WorldState.PREPARING, WorldState.STOPPING)

SUCCESSORS: Final[Mapping[WorldState, tuple[WorldState, ...]]] = {
    WorldState.FOUNDING: (WorldState.MEETING, WorldState.OVER),
    WorldState.MEETING: (WorldState.RUNNING, WorldState.ENDING, WorldState.FINISHED, WorldState.OVER),
    WorldState.RUNNING: (WorldState.PREPARING, WorldState.ENDING, WorldState.FINISHED, WorldState.OVER),
    WorldState.PREPARING: (WorldState.STOPPING, WorldState.ENDING, WorldState.FINISHED),
    WorldState.STOPPING: (WorldState.ENDING, WorldState.FINISHED),
    WorldState.ENDING: (WorldState.MEETING, WorldState.WAITING, WorldState.OVER),
    WorldState.WAITING: (WorldState.MEETING, WorldState.OVER),
    WorldState.FINISHED: (WorldState.RUNNING, WorldState.OVER),
    WorldState.OVER: (),
}


@dataclasses.dataclass
class JobWorld:
    """The present world, and all members that there have been.

    Attributes:
        until: when the job is given up, while there are too few slots or members; else infinity.
        state: changed by `enter` only.
        epoch: its number; 0 before the founders have been started.
        members: by rank, those that have gone since included.
        everybody: all members, by their ids.
        order: what its members were sent; None for the first one.
        change: the number of the job's last graceful change.
        boundaries: what members have reported for it, by their ids.
        is_last: whether the job ends with it, because all members were told to leave.
        reason: why it is lost, if it is.
    """

    limits: Limits
    until: float
    state: WorldState = WorldState.FOUNDING
    epoch: int = 0
    members: tuple[Member, ...] = ()
    everybody: dict[int, Member] = dataclasses.field(default_factory=dict)
    order: WorldOrder | None = None
    change: int = 0
    boundaries: dict[int, int] = dataclasses.field(default_factory=dict)
    is_last: bool = False
    reason: str = ""

    def alive(self, states: Collection[MemberState] | None = None) -> list[Member]:
        """Return the members, of this world or not, whose processes have not ended, by their ids.

        Args:
            states: only those in one of these states.
        """
        there = [each for each in self.everybody.values() if each.state is not MemberState.GONE]
        return there if states is None else [each for each in there if each.state in states]

    def living(self) -> list[Member]:
        """Return the members of this world, by rank, without those that are gone or dismissed."""
        return [member for member in self.members if member.state not in (MemberState.GONE, MemberState.DISMISSED)]

    def name(self, member: Member) -> str:
        """Return a member's name in this world, for people."""
        if member not in self.members:
            return f"new process {member.id} on {member.host}"
        return member.name_as(self.members.index(member))

    # --- what changes states -------------------------------------------------------------------------------------------

    def enter(self, state: WorldState) -> None:
        """Go over to another state."""
        assert state in SUCCESSORS[self.state], f"{self.state.name} -> {state.name}"
        self.state = state

    def begin(self, members: Iterable[Member], order: WorldOrder | None = None) -> list[Command]:
        """Make members a new world, for which they have an order if it is not the first one."""
        self.enter(WorldState.MEETING)
        self.epoch, self.members, self.order, self.until = self.epoch + 1, tuple(members), order, math.inf
        sent = [] if order is None else self.send(self.members, order)
        return [*sent, WorldBegun(self.epoch, tuple(member.id for member in self.members))]

    def start(self, slot: Slot, rank: int, size: int, state: MemberState, now: float) -> StartMember:
        """Make a member of a process that is started."""
        member = Member(len(self.everybody), *slot, state, started_at=now)
        self.everybody[member.id] = member
        return StartMember(member.id, *slot, rank, size, is_joiner=state is MemberState.STARTING)

    def next_joining(self) -> float:
        """Return when joiners that are ready come in; infinity if none is.

        They wait for others that have been started, so that all come in one change: as long again as the first of them
        needed, within `JOINERS_WAIT`.
        """
        ready = self.alive([MemberState.READY])
        if not ready or not self.alive([MemberState.STARTING]):
            return -math.inf if ready else math.inf
        first = min(ready, key=lambda member: member.ready_at)
        shortest, longest = JOINERS_WAIT
        return first.ready_at + min(max(first.ready_at - first.started_at, shortest), longest)

    def next_due(self, now: float) -> float:
        """Return when members are asked or killed, or joiners come in."""
        joining = self.next_joining() if self.state is WorldState.RUNNING else math.inf
        last = self.train_until() if self.state is WorldState.RUNNING else math.inf
        times = [min(each.wait.kill_at, each.wait.ask_at, each.wait.stopped_until) for each in self.alive()]
        times += [each.leave_by for each in self.alive() if self.state is not WorldState.FINISHED]
        return min([when for when in (joining, last) if when > now] + times, default=math.inf)

    def train_until(self) -> float:
        """Return when all members stop for the last time; infinity if one of them was not told to leave."""
        return max((member.train_until for member in self.living()), default=math.inf)

    def takes(self, member: Member, message: messages.MemberMessage, now: float) -> bool:
        """Return whether a message counts; the member is in the state to which it leads from now on."""
        state = TRANSITIONS[type(message)].get(member.state)
        if state is None or getattr(message, "epoch", self.epoch) != self.epoch:
            return False
        if state is MemberState.READY and member.state is MemberState.STARTING:
            member.ready_at = now
        member.state = state
        return True

    def send(self, members: Sequence[Member], order: messages.MemberOrder, wait: Expectation | None = None) -> list[Command]:
        """Send an order to members, which have to obey within a time if it is given."""
        for member in members:
            member.state, member.wait = TRANSITIONS[type(order)][member.state], wait or member.wait
        return [SendOrder(member.id, order) for member in members]

    def wait_for_others(self, donor: int, order: messages.SaveState, until: float) -> list[Command]:
        """Wait for more members until some time, because a world would have too few; the donor saves its state."""
        self.enter(WorldState.WAITING)
        self.until = until
        return self.send([self.everybody[donor]], order)

    def prepare_stop(self, now: float, *, is_last: bool) -> list[Command]:
        """Ask all members for their boundaries, for a graceful change, or for the end of the job."""
        self.enter(WorldState.PREPARING)
        self.change, self.boundaries, self.is_last = self.change + 1, {}, is_last
        wait = Expectation("boundary", ask_at=now + self.limits.quiesce_timeout / 2)
        return self.send(self.living(), messages.PrepareStop(self.change), wait)

    def stop_at_boundary(self) -> list[Command]:
        """Stop all members at the boundary after the greatest that they have reported."""
        self.enter(WorldState.STOPPING)
        return self.send(self.living(), messages.StopAt(self.change, max(self.boundaries.values()) + 1, self.is_last))

    def notice(self, members: Iterable[Member], reason: str, seconds: float, now: float) -> list[Command]:
        """Tell members to leave within some seconds, unless they have less time already; return a line for the user.

        See docs/protocol.md#notices.
        """
        told = [each for each in members if each.state not in (MemberState.KILLED, MemberState.GONE) and (
            not each.notice or now + seconds < each.leave_by)]
        for member in told:
            member.notice, member.train_until, member.leave_by = reason, now + seconds / 2, now + seconds
        limit = f" within {seconds:g} s" if seconds < math.inf else ""
        return [Note(f"{', '.join(map(self.name, told))}: to leave{limit} ({reason})")] if told else []

    def stop(self, members: Iterable[Member], reason: str, now: float) -> list[Command]:
        """Order members to end the world at once, unless this has been done."""
        timeout, give_up_at = self.limits.quiesce_timeout, now + self.limits.stall_shutdown
        stopping = [each for each in members if each.state in IN_WORLD and each.wait.what != "stop"]
        for member in stopping:
            kill_at = give_up_at if member.survives else min(now + timeout, give_up_at)  # the others end in any case
            member.wait = Expectation("stop", kill_at, now + timeout / 2, give_up_at, member.wait.is_noted)
        return self.send(stopping, messages.StopNow(self.epoch, reason))

    def dismiss(self, members: Iterable[Member], reason: str, now: float) -> list[Command]:
        """End members that are in no world: those that listen are dismissed, the others are killed."""
        ended: list[Command] = []
        for member in members:
            if member.state is MemberState.STARTING:
                ended += self.kill(member, reason)
            else:
                wait = Expectation("exit", ask_at=now + self.limits.quiesce_timeout / 2)
                ended += self.send([member], messages.Dismissed(reason), wait)
        return ended

    def kill(self, member: Member, reason: str) -> list[Command]:
        """Kill a member; what it sends until it is gone does not count."""
        member.state, member.wait, member.leave_by = TRANSITIONS[Kill][member.state], NOTHING, math.inf
        self.boundaries.pop(member.id, None)  # it stops at none
        return [Kill(member.id, reason)]

    def bury(self, member: Member) -> None:
        """A member is gone."""
        member.state, member.wait, member.leave_by = TRANSITIONS[MemberGone][member.state], NOTHING, math.inf

    def end(self, code: int, reason: str, blamed: int | None, grace: float) -> list[Command]:
        """End the job; see `EndJob`."""
        self.enter(WorldState.OVER)
        return [EndJob(code, reason, blamed, grace, ends_healthy=any(member.survives for member in self.living()))]

    def seen_stopped(self, member: Member, now: float) -> None:
        """The process of a member is stopped; this counts if it was asked, and has not answered."""
        if member.wait != NOTHING and member.wait.ask_at == math.inf:
            member.wait = dataclasses.replace(member.wait, stopped_until=now + self.limits.quiesce_timeout / 2)

    def blame(self, ranks: Iterable[int], why: str, now: float) -> None:
        """Kill the members that others have waited for in vain, unless they stop within `BLAMED_SECONDS`: they may hang."""
        until = now + BLAMED_SECONDS
        for member in [self.members[rank] for rank in ranks if rank < len(self.members)]:
            if member.wait.what == "stop" and not member.wait.why:
                member.wait = dataclasses.replace(member.wait, kill_at=until, give_up_at=until, why=why)

    def expire(self, now: float) -> list[Command]:
        """Kill and ask the members whose time has come."""
        done: list[Command] = []
        limits = self.limits
        for member in self.alive():
            wait = member.wait
            if member.leave_by <= now and self.state is not WorldState.FINISHED:
                member.fault = "it had not left in time"
                done += self.kill(member, member.fault)
            elif wait.ask_at <= now < wait.give_up_at:
                done += [] if wait.what == "exit" else self._note(member)
                # When it should have been killed already, the authority itself stood still: nobody has asked the member.
                kill_at = min(now + limits.heartbeat, wait.give_up_at if wait.kill_at <= now else wait.kill_at)
                member.wait = dataclasses.replace(member.wait, kill_at=kill_at, ask_at=math.inf)
                done += [] if wait.what == "exit" else self.send([member], messages.AskAlive(self.epoch))
                done.append(Look(member.id))
            elif min(wait.kill_at, wait.stopped_until) <= now:
                given = limits.stall_shutdown if wait.give_up_at <= now else limits.heartbeat
                expected = "answer" if self.state is WorldState.FINISHED else "stop"
                reason = wait.why or f"it did not {expected} within {given:g} s"
                if wait.stopped_until <= now:
                    reason = "its process was stopped while others waited for it"
                if wait.what == "exit":
                    reason = "it did not exit when it was dismissed"
                elif wait.why or wait.what != "stop" or member.survives:  # else others are the reason
                    member.fault = reason
                done += self.kill(member, reason)
        return done

    def _note(self, member: Member) -> list[Command]:
        """Tell the user, once, that others wait for a member."""
        waits = self.state is WorldState.ENDING or any(each.state is MemberState.IDLE for each in self.living())
        if not waits or member.wait.is_noted or member.state is MemberState.FINISHED or not (
                member.survives or self.state is WorldState.FINISHED):
            return []
        member.wait = dataclasses.replace(member.wait, is_noted=True)
        where, limit = "reached the boundary at which all ranks stop", "as long as it computes"
        if self.state is WorldState.ENDING:
            where = "stopped"
            limit = f"{self.limits.stall_shutdown:g} s" if self.limits.stall_shutdown < math.inf else limit
        elif self.state is WorldState.FINISHED:
            where = "called elastic.run again"
        return [Note(f"{self.name(member)} has not {where}; the others wait for it, at most "
                     f"{self.limits.heartbeat:g} s if it does not answer, else {limit}")]

    def await_members(self, now: float) -> None:
        """Watch members that were ordered nothing, but run while others wait."""
        states = {member.state for member in self.living()}
        if self.state is WorldState.FINISHED:
            others_wait = MemberState.IDLE in states  # their world was lost; they have called elastic.run again
        else:
            others_wait = (self.state in (WorldState.MEETING, WorldState.RUNNING, WorldState.STOPPING)
                           and not states.isdisjoint((MemberState.FINISHED, MemberState.IDLE)))
        for member in self.living():
            if not others_wait or member.state not in (MemberState.OUTSIDE, MemberState.TRAINING):
                if member.wait.what == "life":
                    member.wait = NOTHING
            elif member.wait == NOTHING:
                member.wait = Expectation("life", ask_at=now + self.limits.quiesce_timeout)
