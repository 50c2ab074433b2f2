"""The authority of a job: it alone orders worlds (docs/protocol.md#worlds). Pure. A job that is not elastic has one world.

The launcher passes what happens as events, and carries out the commands. An event is taken in first; then the rule of the
world's state is applied, until it leads to no other state. The modules beside this one decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from hvdlite.membership import events, messages
from hvdlite.membership.expectations import NOTHING
from hvdlite.membership.history import Failure, History
from hvdlite.membership.hosts import HostSlots, Slot
from hvdlite.membership.members import IN_FORCE, IN_WORLD, JOINING, JobWorld, Member, MemberState, WorldState
from hvdlite.membership.recovery import FailedMeetings, NextWorld, order, plan, recover

_HAVE_MET: Final = {MemberState.OUTSIDE, MemberState.TRAINING, MemberState.FINISHED}
_WORLD_LOST: Final = "its world was lost before it entered elastic.run"


class Authority:
    """Decides who is in which world; `events.py` lists what the launcher guarantees.

    Args:
        limits: what the user allows.
        now: the time, in seconds of any clock.
        machine_of: returns the machine of a host, if several names may stand for one machine with one job directory.
    """

    def __init__(self, limits: events.Limits, now: float, machine_of: Callable[[str], str] = str) -> None:
        self._limits = limits
        self._machine_of = machine_of
        self._now = now
        self._hosts = HostSlots(limits)
        self.world = JobWorld(limits, until=now + limits.elastic_timeout)  # for others to read
        self._meetings = FailedMeetings(self.world.everybody)
        self._history = History(limits.failures_without_progress)
        self._commands: list[events.Command] = []  # what the event leads to
        self._rules = {WorldState.FOUNDING: self._found, **dict.fromkeys(IN_FORCE, self._follow_world),
                       WorldState.ENDING: self._begin_next, WorldState.WAITING: self._begin_next,
                       WorldState.FINISHED: self._run_again}
        self._has_finished = False  # elastic.run has returned once on all members
        self._is_noted = False  # the user has been informed that nobody can join any more

    def handle(self, event: events.Event, now: float) -> list[events.Command]:
        """Take in an event, and return what must be done, in this order."""
        if self.is_over:
            return []
        self._now, self._commands, world = now, [], self.world
        match event:
            case events.HostsSeen(slots):
                self._hosts.see(slots)
            case events.MemberReported(id, message) if id in world.everybody:
                self._receive(world.everybody[id], message)
            case events.MemberGone(id) if id in world.everybody and world.everybody[id].state is not MemberState.GONE:
                self._gone(world.everybody[id], event)
            case events.HostLost(host, reason):
                self._lost(host, reason)
            case events.MembersNoticed(ids, reason, seconds):
                self._notice([world.everybody[id] for id in ids if id in world.everybody], reason, seconds)
            case events.SeenStopped(id) if id in world.everybody:
                world.seen_stopped(world.everybody[id], now)
            case events.TimePassed():  # what members have said meanwhile comes before it
                self._commands += world.expire(now)
        if self._limits.one_world:
            self._follow_only_world()
            return self._commands
        state = None
        while state is not world.state and not self.is_over:
            state = world.state
            self._rules[state]()
        if world.state in (*IN_FORCE, WorldState.ENDING, WorldState.WAITING):
            self._balance()
            self._plan_change()
        world.await_members(now)
        return self._commands

    def wake_at(self) -> float | None:
        """Return when `TimePassed` is due; None: after the next other event only."""
        if self.is_over or self._limits.one_world:
            return None
        cooldown = math.inf if self.world.state is WorldState.FINISHED else self._hosts.next_end(self._now)
        return None if (soonest := min(self.world.until, self.world.next_due(self._now), cooldown)) == math.inf else soonest

    @property
    def is_over(self) -> bool:
        """Whether `EndJob` has been returned."""
        return self.world.state is WorldState.OVER

    @property
    def epoch(self) -> int:
        """The number of the last world; 0 before the founders have been started."""
        return self.world.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the last world by rank, those that are gone included."""
        return tuple(member.id for member in self.world.members)

    def summary(self) -> list[str]:
        """Return lines for the end of the job: how many worlds there were, and who was lost and why."""
        return self._history.summary(self.epoch, len(self.members))

    def leaves(self, member: Member) -> str:
        """Return why a member is dismissed when the next world is ordered, which keeps the state; "" if it stays."""
        return member.notice or self._hosts.why_left(member.host, member.slot, self._now)

    # --- what has happened ---------------------------------------------------------------------------------------------

    def _receive(self, member: Member, message: messages.MemberMessage) -> None:
        world = self.world
        if not world.takes(member, message, self._now):
            return
        match message:
            case messages.BoundaryReport(change, boundary) if world.state is WorldState.PREPARING and change == world.change:
                world.boundaries[member.id], member.wait = boundary, NOTHING
            case messages.Alive(in_user_code=computes):
                member.wait = member.wait.prolonged(self._now, self._limits, computes=computes, survives=member.survives)
            case messages.MemberIdle(state_report=state_report, reason=reason):
                blamed = () if member.wait.why else message.blamed  # in a cut, both sides blame each other
                member.state_report, member.wait = state_report, NOTHING
                if world.state is not WorldState.STOPPING or not state_report.at_rest:
                    self._end_world(f"{world.name(member)}: {reason}")
                world.blame(blamed, f"it held up the others: {reason}", self._now)
            case messages.MemberNoticed():
                self._notice([member], "it got SIGTERM", self._limits.grace)
            case messages.MeetingFailed(reason=reason, missing=ranks):
                missing = [self.members[rank] for rank in ranks if 0 <= rank < len(self.members)]
                self._meetings.complain(missing or [member.id], self.members[0], reason)
                self._end_world(f"{world.name(member)} could not meet the others: {reason}")
            case messages.Listening(addresses=addresses) if (
                    addresses and member is world.members[0] and world.state is WorldState.MEETING):
                address = addresses[self._meetings.count % len(addresses)]
                others = [each for each in world.members if each is not member and each.state in IN_WORLD]
                self._commands += world.send(others, messages.CoordinatorAt(world.epoch, address, message.port))

    def _notice(self, members: Sequence[Member], reason: str, seconds: float) -> None:
        """From now on members count as if discovery had lost their slots, which have not failed."""
        for member in members:
            if not self.leaves(member):
                self._hosts.retire(member.host, member.slot, self._now)
        self._commands += self.world.notice(members, reason, seconds, self._now)

    def _gone(self, member: Member, event: events.MemberGone) -> None:
        world, before, survives, code = self.world, member.state, member.survives, event.code
        world.bury(member)
        in_world, has_finished = member in world.members, world.state is WorldState.FINISHED
        failure = Failure(member.id, (member.host, member.slot), world.name(member), code, event.cause, member.fault,
                          world.epoch, in_training=in_world and before is not MemberState.IDLE and not has_finished)
        if before is MemberState.DISMISSED:
            return
        if before is MemberState.KILLED and not member.fault:
            self._left(member, _WORLD_LOST)
        elif has_finished:
            if in_world and code != 0:
                self._failed(failure)
        elif (in_world and world.state is WorldState.ENDING
                and before in (MemberState.FIRST_MEETING, MemberState.OUTSIDE)):
            if code and self._history.blamed is None:
                self._failed(failure)  # it was the first; others have noticed it earlier
            else:
                self._left(member, _WORLD_LOST)
        elif why := self.leaves(member):
            self._left(member, f"{why}; {failure.why}" if code else why)
        elif code == 0 and not member.fault:
            self._hosts.retire(member.host, member.slot, self._now)
            if survives:  # else it may be a script without elastic.run, which ends as any other
                self._left(member, "it ended with code 0 before training had finished")
        else:
            self._failed(failure)
            if self._hosts.fail(member.host, member.slot, self._now):
                self._note_barred(member.host)

    def _lost(self, host: str, reason: str) -> None:
        """All members of a host are gone; this counts as one failure of the host, and as none of the training."""
        world, barred = self.world, self._hosts.lose(host, self._now)
        if not self._limits.one_world:
            self._note(f"host {host} was lost: {reason}")
        failed = sorted((member for member in world.living() if member.host == host), key=lambda each: each.id)
        for member in [each for each in world.alive() if each.host == host]:
            world.bury(member)
        for member, slot in [(each, (host, each.slot)) for each in failed]:
            self._failed(Failure(member.id, slot, world.name(member), None, "", reason, world.epoch, in_training=False))
        if barred:
            self._note_barred(host)

    def _failed(self, failure: Failure) -> None:
        if self._limits.one_world:
            return None if self.is_over else self._end_job(failure.shell_code, str(failure), failure)
        if self.world.state is WorldState.FINISHED:
            return self._note(self._history.add_at_end(failure, is_rank_0=failure.member == self.members[0]))
        self._history.add(failure)
        self._note(str(failure))
        if failure.member in self.members:
            self._history.left(failure.who, failure.why, failed=True)
            self._end_world(str(failure))

    def _left(self, member: Member, why: str) -> None:
        """A member has left without a failure; if it was in the world, this ends."""
        if member in self.world.members:
            self._history.left(self.world.name(member), why)
            self._end_world(f"{self.world.name(member)} has left: {why}")

    # --- rules of the world's states -----------------------------------------------------------------------------------

    def _found(self) -> None:
        limits, slots = self._limits, self._free()
        size = min(len(slots), limits.max_np or len(slots)) if limits.starts_with_all else limits.start_np
        if self.world.until <= self._now:
            self._give_up(f" after {limits.elastic_timeout:g} s")
        elif len(slots) >= limits.start_np:
            self._commands += [self.world.start(slot, rank, size, MemberState.FIRST_MEETING, self._now)
                               for rank, slot in enumerate(slots[:size])]
            self._commands += self.world.begin(self.world.alive())
        elif limits.hosts_are_fixed:
            self._give_up("")

    def _follow_only_world(self) -> None:
        """Start all ranks at once, and end when all have ended with 0. A failure ends the job at once (`_failed`)."""
        if self.world.state is WorldState.FOUNDING:
            self._found()
        elif not self.is_over and all(member.state is MemberState.GONE for member in self.world.members):
            self._end_job(0, "")

    def _follow_world(self) -> None:
        """Do what follows from the states of the world's members, while it is in force."""
        world, living = self.world, self.world.living()
        states = {member.state for member in living}
        is_whole = len(living) == len(world.members)
        if not living:  # all have ended with 0, and none has entered elastic.run
            self._end_job(0, "")
        elif not is_whole and any(member.survives for member in living):
            for member in world.members if not self._has_finished else ():  # else they have been noted, in `_run_again`
                if member.state is MemberState.GONE:
                    self._left(member, "it ended with code 0, and had not called elastic.run")
            self._end_world("a rank has ended before it called elastic.run again")
        elif is_whole and states == {MemberState.FINISHED}:
            world.enter(WorldState.FINISHED)
            self._has_finished = True
            self._commands += world.send(living, messages.AllFinished(), NOTHING)
            self._dismiss(world.alive(JOINING), "training has finished")
        elif world.state is WorldState.MEETING and is_whole and states <= _HAVE_MET:
            world.enter(WorldState.RUNNING)
            self._meetings = FailedMeetings(world.everybody)
            if world.order is not None:
                self._note(self._history.met(world.order, self._now))
        elif world.state is WorldState.PREPARING and all(member.id in world.boundaries for member in living):
            self._commands += world.stop_at_boundary()
        elif world.state is WorldState.STOPPING and states == {MemberState.IDLE}:
            world.enter(WorldState.ENDING)
        elif world.state is WorldState.STOPPING and states == {MemberState.IDLE, MemberState.FINISHED}:
            self._commands += world.stop(living, "the other ranks have stopped for another world", self._now)

    def _plan_change(self) -> None:
        """Begin a graceful change if there is a reason for one, and all members can take part in it."""
        world, living = self.world, self.world.living()
        if (world.state is not WorldState.RUNNING or len(living) < len(world.members)
                or any(member.state is not MemberState.TRAINING for member in living)):
            return
        staying, is_joined = self._staying(), world.next_joining() <= self._now
        is_allowed = self._limits.allows(self.epoch + 1)
        is_last = world.train_until() <= self._now and not (is_joined and is_allowed)
        if is_last or (is_allowed and (is_joined or 0 < staying < len(living))):  # else it trains on as long as it can
            self._history.began(self._now)
            self._commands += world.prepare_stop(self._now, is_last=is_last)
        elif not is_allowed:
            self._refuse_change(staying)

    def _refuse_change(self, staying: int) -> None:
        """Tell the user what the reset limit leaves out, when this changes; under Horovod's rule end the job instead."""
        world, limits = self.world, self._limits
        leaving = [world.name(member) for member in world.living() if staying and self.leaves(member)]
        free, discovered = (0 if self._has_finished else limits.room(len(self._free(world.living(), now)), staying)
                            for now in (self._now, math.inf))
        text, is_change = self._history.refused(leaving, free, discovered)
        if is_change and limits.ends_at_reset_limit:
            self._end_job(1, f"{limits.reset_limit_reached}, and the hosts have changed; {text}")
        elif text:
            self._note(f"{limits.reset_limit_reached}; {text}")

    def _end_world(self, reason: str) -> None:
        """Tell all members to stop at once, if this has not been done."""
        if self.world.state in IN_FORCE:
            self.world.enter(WorldState.ENDING)
            self.world.reason, self.world.is_last = reason, False
            self._history.began(self._now)
            self._commands += self.world.stop(self.world.living(), reason, self._now)

    def _begin_next(self) -> None:
        """Order the next world, when this one has ended on all of its members; or wait, or end the job."""
        world, survivors, limits = self.world, self.world.living(), self._limits
        if world.until <= self._now:
            return self._give_up(f" after {limits.elastic_timeout:g} s")
        if any(member.state is not MemberState.IDLE for member in survivors):
            return
        joiners = world.alive([MemberState.READY])
        nobody_stays = not joiners and all(member.notice for member in survivors or world.members)
        if nobody_stays and (world.is_last or not survivors):
            self._dismiss(survivors, "the job ends")
            return self._end_job(events.TOO_FEW, f"all ranks were told to leave: {world.members[0].notice}")
        recovery = recover({member.id: member.state_report for member in survivors if member.state_report is not None})
        has_lost = len(survivors) < len(world.members)
        error, world.reason = "" if has_lost or self._meetings.complaints else world.reason, ""
        why = "no rank that has the state is left" if not recovery.donors else self._history.conclude(
            (recovery.commits, recovery.boundaries), error, are_enough=len(survivors) >= limits.min_np)
        why = why or ("" if limits.allows(world.epoch + 1) else limits.reset_limit_reached)
        self._meetings.conclude(explained=has_lost)
        leaves = (lambda member: "") if nobody_stays else self.leaves
        planned = None if why else plan(survivors, joiners, leaves=leaves, meetings=self._meetings, max_np=limits.max_np)
        if planned is None:
            first = self._history.blamed
            why = why or f"the ranks cannot meet: {self._meetings.reason}"
            why += f"; the first failure: {first}" if first and first.fault else ""  # the launcher names others
            self._end_job(first.shell_code if first else 1, why, first)
        elif len(planned.members) >= limits.min_np:
            self._leave_out(planned)
            members = [world.everybody[id] for id in planned.members]
            self._history.joined(each.name_as(rank) for rank, each in enumerate(members) if each not in world.members)
            self._commands += world.begin(members, order(
                planned, world.epoch + 1, [member.host for member in members], self._machine_of, self._history.reason()))
        elif world.state is WorldState.ENDING:
            self._commands += world.wait_for_others(planned.members[0], planned.order_to_save,
                                                    self._now + limits.elastic_timeout)
            leaving = {world.name(world.everybody[id]): why for id, why in planned.left_out.items()}
            self._note(f"{len(planned.members)} of at least {limits.min_np} ranks are left: they wait for others, "
                       f"at most {limits.elastic_timeout:g} s; {self._history.reason(leaving)}")

    def _leave_out(self, planned: NextWorld) -> None:
        """Dismiss the members that are not in the next world."""
        donor = self.world.everybody[planned.members[0]]
        for id, why in planned.left_out.items():
            member = self.world.everybody[id]
            self._left(member, why)
            self._dismiss([member], why)
            if id in planned.unreachable and self._hosts.miss(member.host, member.slot, donor.host, self._now):
                self._note(f"{member.host} cannot be reached from {donor.host}: no more processes are started there")

    def _run_again(self) -> None:
        """Return to a running world when all members that are left have called elastic.run again.

        Until then nobody has to stop: a member may be busy with something that needs no other, and will see at the
        entrance that its world is lost.
        """
        world, living = self.world, self.world.living()
        if not world.alive():
            failure = self._history.failed_at_end
            self._end_job(failure.shell_code if failure else 0, str(failure or ""), failure)
        elif living and all(member.survives for member in living):
            world.enter(WorldState.RUNNING)
            self._history.begin_again({each.id: world.name(each) for each in world.members if each not in living})
            if any(member.state is MemberState.IDLE for member in living):
                self._end_world("the world was lost before all ranks had called elastic.run again")

    def _balance(self) -> None:
        """Start joiners on free slots, and dismiss those that cannot be admitted."""
        world, limits, free, staying = self.world, self._limits, self._free(), self._staying()
        joiners = sorted(world.alive(JOINING), key=lambda each: (each.state is MemberState.STARTING, each.id))
        lost = [each for each in joiners if self.leaves(each) or self._hosts.is_barred(each.host, self._now)]
        self._dismiss(lost, "its host is not used any more")
        joiners = [each for each in joiners if each not in lost]
        room = limits.room(len(joiners) + len(free), staying)
        if not limits.allows(world.epoch + 1) or (not staying and limits.max_np == 1):
            room = 0  # there is no other world
        elif self._has_finished:  # a joiner would begin with the script's first elastic.run
            if room and not self._is_noted:
                self._is_noted = True
                self._note(f"slots that stay free: {room}; ranks can join in the script's first hvd.elastic.run only")
            room = 0
        self._dismiss(joiners[room:], "there are enough ranks without it")
        living = world.living()
        if room > len(joiners) and any(each.survives for each in living) and all(
                each.state is not MemberState.FINISHED for each in living):
            self._commands += [world.start(slot, rank, rank + 1, MemberState.STARTING, self._now)
                               for rank, slot in enumerate(free[:room - len(joiners)], staying + len(joiners))]
        none_can_join = self._has_finished or (limits.hosts_are_fixed and self._hosts.next_end(self._now) == math.inf)
        if (world.state is WorldState.WAITING and none_can_join
                and all(member.state is MemberState.IDLE for member in world.alive())):
            self._give_up("; no other processes can be started")

    def _staying(self) -> int:
        """Return how many members of the world do not leave."""
        return sum(not self.leaves(member) for member in self.world.living())

    def _free(self, members: Iterable[Member] | None = None, now: float | None = None) -> list[Slot]:
        taken = {(member.host, member.slot) for member in (self.world.alive() if members is None else members)}
        return self._hosts.free(taken, self._now if now is None else now)

    def _dismiss(self, members: Iterable[Member], reason: str) -> None:
        self._commands += self.world.dismiss(members, reason, self._now)

    def _note(self, text: str) -> None:
        self._commands.append(events.Note(text))

    def _note_barred(self, host: str) -> None:
        self._note(f"no more processes are started on {host}{' for some time' if self._limits.cooldown else ''}")

    def _give_up(self, when: str) -> None:
        """End the job because there are too few slots or members."""
        is_beginning = self.world.state is WorldState.FOUNDING
        needed = f"{self._limits.start_np} slots" if is_beginning else f"{self._limits.min_np} ranks"
        there = len(self._free()) if is_beginning else self._staying()
        self._end_job(events.TOO_FEW, f"{needed} are needed; there were {there}{when}")

    def _end_job(self, code: int, reason: str, blamed: Failure | None = None) -> None:
        by_loss = blamed is not None and blamed.code is None
        grace = 0.0 if code == 0 else events.GRACE_AFTER_LOSS if by_loss else events.GRACE
        self._commands += self.world.end(code, reason, blamed.member if blamed and not by_loss else None, grace)
