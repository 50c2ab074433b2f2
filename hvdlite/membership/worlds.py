"""The worlds of an elastic job, one after the other: when one is ordered, changed and ended. Pure.

A world passes through these stages:

- *meeting*: its members meet.
- *running*: they have met, and train. A joiner that is ready, or a host that discovery does not find any more, begins a
  graceful change, once all members are in `elastic.run`: `PrepareStop` (*preparing*), and when all have told their
  boundaries, `StopAt` (*stopping*).
- *ending*: a member has failed, so all others are told to stop at once; it replaces a graceful change that is under way.
- When all members of the world are idle or gone, the next one is ordered. With too few members, the idle ones wait
  (*waiting*).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from hvdlite.membership.awaited import Awaited
from hvdlite.membership.changes import Changes
from hvdlite.membership.events import EndJob, WorldBegun
from hvdlite.membership.failures import Failure, FailureHistory
from hvdlite.membership.hosts import Hosts
from hvdlite.membership.limits import Limits
from hvdlite.membership.meetings import FailedMeetings
from hvdlite.membership.members import BOUNDARY, HAVE_MET, JOINING, NOTHING, Member, Phase, Wait
from hvdlite.membership.messages import AllFinished, PrepareStop, StopAt, WorldOrder
from hvdlite.membership.planning import Plan, plan
from hvdlite.membership.recovery import recover
from hvdlite.membership.roster import Roster
from hvdlite.membership.stages import IN_FORCE, Stage

TOO_FEW: Final = 75
"""The exit code of a job that had too few members for too long: EX_TEMPFAIL, try again later."""


class Worlds:
    """Orders worlds, from what is known of members and hosts.

    Args:
        limits: what the user allows.
        roster: the members.
        hosts: where members can be started.
        machine_of: returns the machine of a host.
        now: the time.

    Attributes:
        stage: of the current world.
        failures: of members.
        failure_at_end: the first failure of a member when all had finished; None if the job succeeds.
        lost_at_end: the first loss of a member then which by itself is no failure of the job.
    """

    def __init__(self, limits: Limits, roster: Roster, hosts: Hosts, machine_of: Callable[[str], str], now: float) -> None:
        self._limits = limits
        self._roster = roster
        self._hosts = hosts
        self._machine_of = machine_of
        self.stage = Stage.FOUNDING
        self.failures = FailureHistory(limits.failures_without_progress)
        self.failure_at_end: Failure | None = None
        self.lost_at_end: Failure | None = None
        self.meetings = FailedMeetings(lambda member: roster[member].host)
        self.changes = Changes()
        self.change = 0  # the number of the last graceful change
        self.gives_up_at = now + limits.elastic_timeout  # while there are too few slots or members; else infinity
        self._order: WorldOrder | None = None  # of this world; None for the first one
        self._awaited = Awaited(limits, roster)
        self._runs_finished = 0  # how often elastic.run has returned on all members
        self._is_noted = False  # whether the user has been told that nobody can join any more
        self._end_reason = ""  # why this world is lost, if it is

    def settle(self) -> None:
        """Do what follows from all that is known."""
        self._awaited.expire(self.stage)
        if self.gives_up_at <= self._roster.now:
            self._give_up(f" after {self._limits.elastic_timeout:g} s")
        if self.stage is Stage.FOUNDING:
            self._found()
        if self.stage is Stage.FINISHED:
            self._run_again()
        if self.stage in IN_FORCE:
            self._follow_world()
        self._awaited.begin_to_ask(self.stage)
        if self.stage in (Stage.STOPPING, Stage.ENDING, Stage.WAITING) and all(
                member.phase is Phase.IDLE for member in self._roster.living()):
            self._begin_next()
        if self.stage in (*IN_FORCE, Stage.ENDING, Stage.WAITING):
            self._balance()
            self._plan_change()
        if self.stage is Stage.FINISHED and not self._roster.alive():
            failure = self.failure_at_end
            self._end_job(failure.shell_code if failure else 0, str(failure or ""), failure)

    def _give_up(self, when: str) -> None:
        """End the job because there are too few slots or members."""
        if self.stage is Stage.FOUNDING:
            reason = f"{self._limits.start_np} slots are needed; there were {len(self._roster.free())}{when}"
        else:
            reason = f"{self._limits.min_np} ranks are needed; there were {len(self._roster.living())}{when}"
        self._end_job(TOO_FEW, reason)

    def _found(self) -> None:
        """Start the members of the first world, if there are enough slots."""
        slots = self._roster.free()
        if len(slots) >= self._limits.start_np:
            self._roster.found(slots[:self._limits.start_np])
            self.stage, self.gives_up_at = Stage.MEETING, math.inf
            self._roster.commands.append(WorldBegun(1, self._roster.world))
        elif self._limits.hosts_are_fixed:
            self._give_up("")

    def _follow_world(self) -> None:
        """Do what follows from the phases of the world's members, while it is in force."""
        living = self._roster.living()
        phases = {member.phase for member in living}
        is_whole = len(living) == len(self._roster.world)
        if not living:  # all have ended with 0, and none has entered elastic.run
            self._end_job(0, "")
        elif not is_whole and any(member.survives for member in living):
            self.end_world("a rank has ended before it entered elastic.run")
        elif is_whole and phases == {Phase.FINISHED}:
            self.stage = Stage.FINISHED
            self._runs_finished += 1
            for member in living:
                member.phase, member.wait = Phase.OUTSIDE, NOTHING
                self._roster.tell(member, AllFinished())
            self._roster.dismiss(self._roster.alive(JOINING), "training has finished")
        elif self.stage is Stage.PREPARING and all(member.boundary is not None for member in living):
            self.stage = Stage.STOPPING
            boundary = max(member.boundary or 0 for member in living) + 1
            for member in living:
                self._roster.tell(member, StopAt(self.change, boundary))
        elif self.stage is Stage.STOPPING and phases == {Phase.IDLE, Phase.FINISHED}:
            self._roster.stop(living, "the other ranks have stopped for another world")
        elif is_whole and self.stage is Stage.MEETING and phases <= {*HAVE_MET}:
            self.stage = Stage.RUNNING
            self.meetings.clear()
            if self._order is not None:
                self.note(self.changes.met(self._order, self._roster.now))

    def _run_again(self) -> None:
        """Return to a running world when all members that are left have called elastic.run again.

        Until then nobody is told to stop: a member may be busy with something that needs no other, and will see at the
        entrance that its world is lost.
        """
        living = self._roster.living()
        if living and all(member.survives for member in living):
            self.stage, self.failure_at_end, self.lost_at_end = Stage.RUNNING, None, None
            self.failures.begin_again()
            failures = {failure.member: failure.why for failure in self.failures.all}
            for member in (self._roster[id] for id in self._roster.world):
                if member not in living:
                    self.changes.left(self._roster.who(member), failures.get(member.id, "it did not call elastic.run again"),
                                      failed=member.id in failures)
            if any(member.phase is Phase.IDLE for member in living):
                self.end_world("the world was lost before all ranks had called elastic.run again")

    def _balance(self) -> None:
        """Start joiners on free slots, and dismiss those that cannot be admitted."""
        joiners = self._roster.joiners_by_progress()
        lost = [each for each in joiners
                if self._roster.leaves(each) or self._hosts.is_barred(each.host, self._roster.now)]
        self._roster.dismiss(lost, "its host is not used any more")
        joiners = [each for each in joiners if each not in lost]
        living, staying = self._roster.living(), self._roster.staying()
        free = self._roster.free()
        room = len(joiners) + len(free)
        if self._limits.max_np is not None:
            room = min(room, max(0, self._limits.max_np - len(staying)))
        if not self._has_resets() or (not staying and self._limits.max_np == 1):
            room = 0  # there is no other world
        elif self._runs_finished:  # a joiner would begin with the script's first elastic.run
            if room and not self._is_noted:
                self._is_noted = True
                self.note(f"slots that stay free: {room}; ranks can join in the script's first hvd.elastic.run only")
            room = 0
        self._roster.dismiss(joiners[room:], "there are enough ranks without it")
        may_start = any(each.survives for each in living) and not any(each.phase is Phase.FINISHED for each in living)
        if may_start and room > len(joiners):
            self._roster.start_joiners(free[:room - len(joiners)], len(staying) + len(joiners))
        none_can_join = self._runs_finished or (
            self._limits.hosts_are_fixed and self._hosts.next_end(self._roster.now) == math.inf)
        if (none_can_join and self.stage is Stage.WAITING
                and all(member.phase is Phase.IDLE for member in self._roster.alive())):
            self._give_up("; no other processes can be started")

    def _plan_change(self) -> None:
        """Begin a graceful change if there is a reason for one, and all members can take part in it."""
        living, staying = self._roster.living(), self._roster.staying()
        if (self.stage is not Stage.RUNNING or len(living) < len(self._roster.world)
                or not all(member.phase is Phase.TRAINING for member in living)
                or not self._has_resets()):
            return
        joiners = self._roster.alive([Phase.READY])
        if not staying and not joiners:
            return  # nobody can take over the state: train on, as long as the hosts are there
        if joiners or len(staying) < len(living):
            self.stage = Stage.PREPARING
            self.change += 1
            self.changes.began(self._roster.now)
            for member in living:
                member.boundary, member.wait = None, Wait(BOUNDARY, self._roster.now + self._limits.quiesce_timeout)
                self._roster.tell(member, PrepareStop(self.change))

    def left(self, member: Member, why: str) -> None:
        """A member has left without a failure; if it was in the world, this ends."""
        if member.id in self._roster.world:
            who = self._roster.who(member)
            self.changes.left(who, why)
            self.end_world(f"{who} has left: {why}")

    def end_world(self, reason: str) -> None:
        """Tell all members to stop at once, if this has not been done."""
        if self.stage in IN_FORCE:
            self.stage = Stage.ENDING
            self._end_reason = reason
            self.changes.began(self._roster.now)
            self._roster.stop(self._roster.living(), reason)

    def _begin_next(self) -> None:
        """Order the next world, now that this one has ended on all of its members; or wait, or end the job."""
        survivors = self._roster.living()
        recovery = recover({member.id: member.standing for member in survivors if member.standing is not None})
        is_explained = len(survivors) < len(self._roster.world) or self.meetings.has_complaints
        error, self._end_reason = "" if is_explained else self._end_reason, ""
        why = self.failures.conclude(recovery.commits, error) if recovery.donors else "no rank that has the state is left"
        if not why and not self._has_resets():
            why = f"the limit of {self._limits.reset_limit} resets has been reached"
        self.meetings.conclude(explained=len(survivors) < len(self._roster.world))
        planned = None if why else plan(
            survivors, self._roster.alive([Phase.READY]), is_leaving=lambda member: bool(self._roster.leaves(member)),
            meetings=self.meetings, max_np=self._limits.max_np)
        if planned is None:
            first = self.failures.blamed
            why = why or f"the ranks cannot meet: {self.meetings.reason}"
            self._end_job(first.shell_code if first else 1, f"{why}; the first failure: {first}" if first else why, first)
            return
        if len(planned.members) >= self._limits.min_np:
            self._leave_out(planned)
            new = [member for member in planned.members if member not in self._roster.world]
            self.changes.joined([self._roster[member].host for member in new])
            self._order = self._roster.order(planned, self.changes.reason(), self._machine_of)
            self.stage, self.gives_up_at = Stage.MEETING, math.inf
            self._roster.commands.append(WorldBegun(self._roster.epoch, self._roster.world))
        elif self.stage is not Stage.WAITING:
            self.stage = Stage.WAITING
            self.gives_up_at = self._roster.now + self._limits.elastic_timeout
            self.note(f"{len(planned.members)} of at least {self._limits.min_np} ranks are left: they wait for others, "
                       f"at most {self._limits.elastic_timeout:g} s")

    def _leave_out(self, planned: Plan) -> None:
        """Dismiss the members that are not in the next world."""
        donor = self._roster[planned.members[0]]
        for id in sorted(planned.leaving | planned.unreachable):
            member = self._roster[id]
            why = self._roster.leaves(member) if id in planned.leaving else "it could not meet the other ranks"
            self.left(member, why)
            self._roster.dismiss([member], why)
            if id in planned.unreachable and member.host == donor.host:
                self._hosts.retire(member.host, member.slot, self._roster.now)
            elif id in planned.unreachable and not self._hosts.is_barred(member.host, self._roster.now):
                self._hosts.bar(member.host, self._roster.now)
                self.note(f"{member.host} cannot be reached from {donor.host}: no more processes are started there")

    def _has_resets(self) -> bool:
        return self._limits.reset_limit is None or self._roster.epoch <= self._limits.reset_limit

    def note(self, text: str) -> None:
        self._roster.note(text)

    def _end_job(self, code: int, reason: str, blamed: Failure | None = None) -> None:
        if self.stage is not Stage.OVER:
            self.stage = Stage.OVER
            self._roster.commands.append(EndJob(code, reason, blamed.member if blamed and blamed.code is not None else None))
