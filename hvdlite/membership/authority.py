"""The authority of an elastic job: it alone orders worlds (docs/protocol.md#worlds). Pure.

The launcher owns one, passes what happens as events, and does what the commands say. A world passes through these stages:

- *running*: its members meet, and train. A joiner that is ready, or a host that discovery does not find any more, begins a
  graceful change, once all members have met and are in `elastic.run`: `PrepareStop` (*preparing*), and when all have told
  their boundaries, `StopAt` (*stopping*).
- *ending*: a member has failed, so all others are told to stop at once; it replaces a graceful change that is under way.
- When all members of the world are idle or gone, the next one is ordered. With too few members, the idle ones wait.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Final

from hvdlite.membership.changes import Changes
from hvdlite.membership.events import (
    Command,
    EndJob,
    Event,
    HostLost,
    HostsSeen,
    MemberGone,
    MemberSaid,
    Note,
    TimePassed,
    WorldBegun,
)
from hvdlite.membership.failures import Failure, FailureHistory
from hvdlite.membership.hosts import Hosts
from hvdlite.membership.limits import Limits
from hvdlite.membership.meetings import FailedMeetings
from hvdlite.membership.members import IN_WORLD, JOINING, Member, Phase
from hvdlite.membership.messages import (
    AllFinished,
    BoundaryTold,
    CoordinatorAt,
    Listening,
    MeetingFailed,
    MemberFinished,
    MemberHello,
    MemberIdle,
    MemberMessage,
    MemberReady,
    Met,
    PrepareStop,
    StopAt,
    WorldOrder,
)
from hvdlite.membership.planning import Plan, plan
from hvdlite.membership.recovery import recover
from hvdlite.membership.roster import Roster

TOO_FEW: Final = 75
"""The exit code of a job that had too few members for too long: EX_TEMPFAIL, try again later."""


class _Stage(enum.Enum):
    FOUNDING = enum.auto()  # too few slots so far
    RUNNING = enum.auto()
    PREPARING = enum.auto()
    STOPPING = enum.auto()
    ENDING = enum.auto()  # also while too few idle members wait
    FINISHED = enum.auto()  # elastic.run has returned on all members
    OVER = enum.auto()


_IN_FORCE = (_Stage.RUNNING, _Stage.PREPARING, _Stage.STOPPING)


def _itself(host: str) -> str:
    return host


class Authority:
    """Decides who is in which world.

    What the launcher guarantees:

    - It carries out commands in their order. Orders for a member that has not connected yet are kept until it says
      `MemberHello`. It passes on all messages of a member in their order, and before the member's `MemberGone`.
    - There is a `MemberGone` for each process that it has started, when its descendants are dead, too; after a `Kill`, soon.
    - `HostLost` stands for the `MemberGone` of all members of the host. It comes when they cannot be alive any more.
    - `TimePassed` comes at `wake_at`. `now` never falls.
    - After `EndJob` no event has an effect.

    Args:
        limits: what the user allows.
        now: the time, in seconds of any clock.
        machine_of: returns the machine of a host, if several names may stand for one machine with one job directory.
    """

    def __init__(self, limits: Limits, now: float, machine_of: Callable[[str], str] = _itself) -> None:
        self._limits = limits
        self._machine_of = machine_of
        self._stage = _Stage.FOUNDING
        self._hosts = Hosts(limits)
        self._roster = Roster(limits, self._hosts)
        self._failures = FailureHistory(limits.failures_without_progress)
        self._meetings = FailedMeetings(self.host_of)
        self._changes = Changes()
        self._order: WorldOrder | None = None  # of this world; None for the first one
        self._has_met = False
        self._change = 0  # the number of the last graceful change
        self._failure_at_end: Failure | None = None  # of a member that failed when all had finished
        self._gives_up_at = now + limits.elastic_timeout  # while there are too few slots or members; else infinity

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in an event, and return what must be done, in this order."""
        if self.is_over:
            return []
        self._roster.now = now
        if isinstance(event, HostsSeen):
            self._hosts.see(event.slots)
        elif isinstance(event, MemberSaid):
            self._said(event.member, event.message)
        elif isinstance(event, MemberGone):
            self._gone(event.member, event.code, event.cause)
        elif isinstance(event, HostLost):
            self._lost(event.host, event.reason)
        else:
            assert isinstance(event, TimePassed)
        self._settle()
        commands, self._roster.commands = self._roster.commands, []
        return commands

    def wake_at(self) -> float | None:
        """Return when `TimePassed` is due; None: after the next other event only."""
        times = [self._gives_up_at, *(member.deadline for member in self._roster.alive())]
        if self._stage is not _Stage.FINISHED:
            times.append(self._hosts.next_end(self._roster.now))
        return None if self.is_over or min(times) == math.inf else min(times)

    @property
    def is_over(self) -> bool:
        """Whether `EndJob` has been returned."""
        return self._stage is _Stage.OVER

    @property
    def epoch(self) -> int:
        """The number of the last world; 0 before the founders have been started."""
        return self._roster.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the last world by rank, those that are gone included."""
        return self._roster.world

    def rank_of(self, member: int) -> int | None:
        """Return a member's rank in the last world; None for one that is not in it."""
        return self._roster.rank_of(member)

    def host_of(self, member: int) -> str:
        """Return the host on which a member was started."""
        return self._roster[member].host

    def slot_of(self, member: int) -> int:
        """Return a member's slot on its host."""
        return self._roster[member].slot

    def summary(self) -> list[str]:
        """Return lines for the end of the job: how many worlds there were, and who was lost and why."""
        return self._changes.summary(self.epoch, len(self.members), self._failures)

    # --- what members say --------------------------------------------------------------------------------------------------

    def _said(self, sender: int, message: MemberMessage) -> None:
        member = self._roster.get(sender)
        if member is None or member.phase in (Phase.GONE, Phase.KILLED, Phase.DISMISSED) or isinstance(message, MemberHello):
            return
        if isinstance(message, MemberReady):
            member.is_ready = True
            if member.phase is Phase.STARTING:
                member.phase = Phase.READY
            elif member.phase is Phase.MEETING:
                member.phase = Phase.RUNNING
        elif isinstance(message, BoundaryTold):
            if self._stage is _Stage.PREPARING and message.change == self._change:
                member.boundary = message.boundary
        elif message.epoch == self.epoch and member.phase in IN_WORLD:
            self._said_in_world(member, message)

    def _said_in_world(self, member: Member,
                       message: MemberIdle | Listening | MeetingFailed | Met | MemberFinished) -> None:
        if isinstance(message, Met):
            if member.phase is Phase.MEETING:
                member.phase = Phase.RUNNING
        elif isinstance(message, MemberFinished):
            member.phase, member.is_ready = Phase.FINISHED, True
        elif isinstance(message, MemberIdle):
            member.phase, member.standing, member.is_ready, member.deadline = Phase.IDLE, message.standing, True, math.inf
            if self._stage is not _Stage.STOPPING or not message.standing.at_rest:
                self._end_world(f"{self._roster.who(member)}: {message.reason}")
        elif isinstance(message, MeetingFailed):
            missing = [self.members[rank] for rank in message.missing if 0 <= rank < len(self.members)]
            self._meetings.complain(missing or [member.id], self.members[0], message.reason)
            self._end_world(f"{self._roster.who(member)} could not meet the others: {message.reason}")
        elif member.id == self.members[0] and message.addresses and self._stage is _Stage.RUNNING:
            address = message.addresses[self._meetings.count % len(message.addresses)]
            for other in self._roster.living():
                if other is not member:
                    self._roster.tell(other, CoordinatorAt(self.epoch, address, message.port))

    # --- members that end --------------------------------------------------------------------------------------------------

    def _gone(self, sender: int, code: int | None, cause: str) -> None:
        member = self._roster.get(sender)
        if member is None or member.phase is Phase.GONE:
            return
        before, member.phase, member.deadline = member.phase, Phase.GONE, math.inf
        in_world = member.id in self.members
        who = self._roster.who(member)
        failure = Failure(member.id, who, code, cause, member.fault, self.epoch, in_world and before is not Phase.IDLE)
        if before is Phase.DISMISSED or (before is Phase.KILLED and not member.fault):
            return
        if self._stage is _Stage.FINISHED:
            if in_world and code != 0:
                self._failure_at_end = self._failure_at_end or failure
        elif in_world and not member.is_ready and self._stage is _Stage.ENDING:
            self._changes.left(who, "it ended because its world was lost before it entered elastic.run")
        elif not self._roster.is_placed(member):
            self._left(member, "its host was removed")
        elif code == 0 and not member.fault:
            self._hosts.retire(member.host, member.slot, self._roster.now)
            if member.is_ready:  # else it may be a script without elastic.run, which ends as any other
                self._left(member, "it ended with code 0 before training had finished")
        else:
            self._failed(failure)
            if self._hosts.fail(member.host, member.slot, self._roster.now):
                self._barred(member.host)

    def _failed(self, failure: Failure) -> None:
        self._failures.add(failure)
        self._note(str(failure))
        if failure.member in self.members:
            self._changes.left(failure.who, failure.why, failed=True)
            self._end_world(str(failure))

    def _left(self, member: Member, why: str) -> None:
        """A member has left without a failure; if it was in the world, this ends."""
        if member.id in self.members:
            who = self._roster.who(member)
            self._changes.left(who, why)
            self._end_world(f"{who} has left: {why}")

    def _lost(self, host: str, reason: str) -> None:
        """All members of a host are gone; this counts as one failure of the host, and as none of the training."""
        barred = self._hosts.lose(host, self._roster.now)
        self._note(f"host {host} was lost: {reason}")
        lost = [member for member in self._roster.alive() if member.host == host]
        failed = [member for member in lost if member.phase is not Phase.DISMISSED and member.id in self.members]
        for member in lost:
            member.phase, member.deadline = Phase.GONE, math.inf
        for member in failed:
            failure = Failure(member.id, self._roster.who(member), None, "", reason, self.epoch, False)
            if self._stage is _Stage.FINISHED:
                self._failure_at_end = self._failure_at_end or failure
            else:
                self._failed(failure)
        if barred:
            self._barred(host)

    def _barred(self, host: str) -> None:
        self._note(f"no more processes are started on {host}{' for some time' if self._limits.cooldown else ''}")
        if self._limits.whole_host:
            for member in self._roster.alive():
                if member.host == host and member.phase not in (Phase.KILLED, Phase.DISMISSED):
                    self._left(member, f"another process has failed on {host}")
                    self._roster.kill(member, f"another process has failed on {host}")

    # --- stages ------------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do what follows from all that is known."""
        self._expire()
        if self._stage is _Stage.FOUNDING:
            self._found()
        if self._stage in _IN_FORCE:
            self._follow_world()
        if self._stage in (_Stage.STOPPING, _Stage.ENDING) and all(
                member.phase is Phase.IDLE for member in self._roster.living()):
            self._begin_next()
        if self._stage in (*_IN_FORCE, _Stage.ENDING):
            self._balance()
            self._plan_change()
        if self._stage is _Stage.FINISHED and not self._roster.alive():
            failure = self._failure_at_end
            self._end_job(failure.shell_code if failure else 0, str(failure or ""))

    def _expire(self) -> None:
        for member in self._roster.alive():
            if member.deadline <= self._roster.now:
                if member.phase is not Phase.DISMISSED:
                    member.fault = f"it did not stop within {self._limits.quiesce_timeout:g} s"
                self._roster.kill(member, member.fault or "it did not exit when it was dismissed")
        if self._gives_up_at <= self._roster.now:
            self._give_up(f" after {self._limits.elastic_timeout:g} s")

    def _give_up(self, when: str) -> None:
        """End the job because there are too few slots or members."""
        if self._stage is _Stage.FOUNDING:
            reason = f"{self._limits.start_np} slots are needed; there were {len(self._roster.free())}{when}"
        else:
            reason = f"{self._limits.min_np} ranks are needed; there were {len(self._roster.living())}{when}"
        self._end_job(TOO_FEW, reason)

    def _found(self) -> None:
        """Start the members of the first world, if there are enough slots."""
        slots = self._roster.free()
        if len(slots) >= self._limits.start_np:
            self._roster.found(slots[:self._limits.start_np])
            self._stage, self._gives_up_at = _Stage.RUNNING, math.inf
            self._roster.commands.append(WorldBegun(1, self.members))
        elif self._limits.hosts_are_fixed:
            self._give_up("")

    def _follow_world(self) -> None:
        """Do what follows from the phases of the world's members, while it is in force."""
        living = self._roster.living()
        phases = {member.phase for member in living}
        is_whole = len(living) == len(self.members)
        if not living:  # all have ended with 0, and none has entered elastic.run
            self._end_job(0, "")
        elif not is_whole and any(member.is_ready for member in living):
            self._end_world("a rank has ended before it entered elastic.run")
        elif is_whole and phases == {Phase.FINISHED}:
            self._stage = _Stage.FINISHED
            for member in living:
                self._roster.tell(member, AllFinished())
            self._roster.dismiss(self._roster.alive(JOINING), "training has finished")
        elif self._stage is _Stage.PREPARING and all(member.boundary is not None for member in living):
            self._stage = _Stage.STOPPING
            boundary = max(member.boundary or 0 for member in living) + 1
            for member in living:
                self._roster.tell(member, StopAt(self._change, boundary))
        elif self._stage is _Stage.STOPPING and phases == {Phase.IDLE, Phase.FINISHED}:
            self._roster.stop(living, "the other ranks have stopped for another world")
        elif is_whole and not self._has_met and phases <= {Phase.RUNNING, Phase.FINISHED}:
            self._has_met = True
            self._meetings.clear()
            if self._order is not None:
                self._note(self._changes.met(self._order, self._roster.now))

    def _balance(self) -> None:
        """Start joiners on free slots, and dismiss those that cannot be admitted."""
        joiners = self._roster.joiners_by_progress()
        lost = [each for each in joiners
                if not self._roster.is_placed(each) or self._hosts.is_barred(each.host, self._roster.now)]
        self._roster.dismiss(lost, "its host is not used any more")
        joiners = [each for each in joiners if each not in lost]
        living, staying = self._roster.living(), self._roster.staying()
        free = self._roster.free()
        room = len(joiners) + len(free)
        if self._limits.max_np is not None:
            room = min(room, max(0, self._limits.max_np - len(staying)))
        if not self._has_resets():
            room = 0
        self._roster.dismiss(joiners[room:], "there are enough ranks without it")
        may_start = any(each.is_ready for each in living) and not any(each.phase is Phase.FINISHED for each in living)
        if may_start and room > len(joiners):
            self._roster.start_joiners(free[:room - len(joiners)], len(staying) + len(joiners))
        if (self._limits.hosts_are_fixed and self._gives_up_at < math.inf
                and self._hosts.next_end(self._roster.now) == math.inf
                and all(member.phase is Phase.IDLE for member in self._roster.alive())):
            self._give_up("; no other processes can be started")

    def _plan_change(self) -> None:
        """Begin a graceful change if there is a reason for one, and all members can take part in it."""
        living, staying = self._roster.living(), self._roster.staying()
        if (self._stage is not _Stage.RUNNING or not self._has_met or len(living) < len(self.members)
                or not all(member.is_ready and member.phase is Phase.RUNNING for member in living)
                or not self._has_resets()):
            return
        joiners = self._roster.alive([Phase.READY])
        if not staying and (not joiners or self._limits.max_np == 1):
            return  # nobody can take over the state: train on, as long as the hosts are there
        if joiners or len(staying) < len(living):
            self._stage = _Stage.PREPARING
            self._change += 1
            self._changes.began(self._roster.now)
            for member in living:
                member.boundary = None
                self._roster.tell(member, PrepareStop(self._change))

    def _end_world(self, reason: str) -> None:
        """Tell all members to stop at once, if this has not been done."""
        if self._stage in _IN_FORCE:
            self._stage = _Stage.ENDING
            self._changes.began(self._roster.now)
            self._roster.stop(self._roster.living(), reason)

    def _begin_next(self) -> None:
        """Order the next world, now that this one has ended on all of its members; or wait, or end the job."""
        self._stage = _Stage.ENDING
        survivors = self._roster.living()
        recovery = recover({member.id: member.standing for member in survivors if member.standing is not None})
        why = self._failures.conclude(recovery.commits) if recovery.donors else "no rank that has the state is left"
        if not why and not self._has_resets():
            why = f"the limit of {self._limits.reset_limit} resets has been reached"
        self._meetings.conclude(explained=len(survivors) < len(self.members))
        planned = None if why else plan(
            survivors, self._roster.alive([Phase.READY]), is_leaving=lambda member: not self._roster.is_placed(member),
            meetings=self._meetings, max_np=self._limits.max_np)
        if planned is None:
            first = self._failures.blamed
            why = why or f"the ranks cannot meet: {self._meetings.reason}"
            self._end_job(first.shell_code if first else 1, f"{why}; the first failure: {first}" if first else why)
            return
        if len(planned.members) >= self._limits.min_np:
            self._leave_out(planned)
            self._changes.joined([self._roster[member].host for member in planned.members if member not in self.members])
            self._order = self._roster.order(planned, self._changes.reason(), self._machine_of)
            self._stage, self._has_met, self._gives_up_at = _Stage.RUNNING, False, math.inf
            self._roster.commands.append(WorldBegun(self.epoch, self.members))
        elif self._gives_up_at == math.inf:
            self._gives_up_at = self._roster.now + self._limits.elastic_timeout
            self._note(f"{len(planned.members)} of at least {self._limits.min_np} ranks are left: they wait for others, "
                       f"at most {self._limits.elastic_timeout:g} s")

    def _leave_out(self, planned: Plan) -> None:
        """Dismiss the members that are not in the next world."""
        donor = self._roster[planned.members[0]]
        for id in sorted(planned.leaving | planned.unreachable):
            member = self._roster[id]
            why = "its host was removed" if id in planned.leaving else "it could not meet the other ranks"
            self._left(member, why)
            self._roster.dismiss([member], why)
            if id in planned.unreachable and member.host == donor.host:
                self._hosts.retire(member.host, member.slot, self._roster.now)
            elif id in planned.unreachable and not self._hosts.is_barred(member.host, self._roster.now):
                self._hosts.bar(member.host, self._roster.now)
                self._note(f"{member.host} cannot be reached from {donor.host}: no more processes are started there")

    def _has_resets(self) -> bool:
        return self._limits.reset_limit is None or self.epoch <= self._limits.reset_limit

    def _note(self, text: str) -> None:
        self._roster.commands.append(Note(text))

    def _end_job(self, code: int, reason: str) -> None:
        if not self.is_over:
            self._stage = _Stage.OVER
            self._roster.commands.append(EndJob(code, reason))
