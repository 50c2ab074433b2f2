"""The authority of an elastic job: it alone orders worlds (docs/protocol.md#worlds). Pure.

The launcher owns one, passes what happens as events, and does what the commands say. This file takes in the events;
`worlds.py` has what follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from hvdlite.membership.events import Command, Event, HostLost, HostsSeen, MemberGone, MemberSaid, TimePassed
from hvdlite.membership.failures import Failure
from hvdlite.membership.hosts import Hosts
from hvdlite.membership.limits import Limits
from hvdlite.membership.members import IN_WORLD, NOTHING, SURVIVING, Member, Phase
from hvdlite.membership.messages import (
    Alive,
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
)
from hvdlite.membership.roster import Roster
from hvdlite.membership.stages import Stage
from hvdlite.membership.worlds import Worlds

_WORLD_LOST: Final = "its world was lost before it entered elastic.run"


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
        self._hosts = Hosts(limits)
        self._roster = Roster(limits, self._hosts)
        self._worlds = Worlds(limits, self._roster, self._hosts, machine_of, now)

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
            self._gone(event)
        elif isinstance(event, HostLost):
            self._lost(event.host, event.reason)
        else:
            assert isinstance(event, TimePassed)
        self._worlds.settle()
        commands, self._roster.commands = self._roster.commands, []
        return commands

    def wake_at(self) -> float | None:
        """Return when `TimePassed` is due; None: after the next other event only."""
        times = [self._worlds.gives_up_at,
                 *(min(member.wait.kill_at, member.wait.ask_at) for member in self._roster.alive())]
        if self._worlds.stage is not Stage.FINISHED:
            times.append(self._hosts.next_end(self._roster.now))
        return None if self.is_over or min(times) == math.inf else min(times)

    @property
    def is_over(self) -> bool:
        """Whether `EndJob` has been returned."""
        return self._worlds.stage is Stage.OVER

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
        return self._worlds.changes.summary(self.epoch, len(self.members), self._worlds.failures)

    # --- what members say --------------------------------------------------------------------------------------------------

    def _said(self, sender: int, message: MemberMessage) -> None:
        member = self._roster.get(sender)
        if member is None or member.phase in (Phase.GONE, Phase.KILLED, Phase.DISMISSED) or isinstance(message, MemberHello):
            return
        if isinstance(message, MemberReady):
            if member.phase is Phase.STARTING:
                member.phase = Phase.READY
            elif member.phase in (Phase.FIRST_MEETING, Phase.MEETING, Phase.OUTSIDE):
                member.phase = Phase.TRAINING
        elif isinstance(message, BoundaryTold):
            if self._worlds.stage is Stage.PREPARING and message.change == self._worlds.change:
                member.boundary, member.wait = message.boundary, NOTHING
        elif message.epoch == self.epoch and member.phase in IN_WORLD:
            self._said_in_world(member, message)

    def _said_in_world(self, member: Member,
                       message: MemberIdle | Alive | Listening | MeetingFailed | Met | MemberFinished) -> None:
        if isinstance(message, Met):
            if member.phase is Phase.FIRST_MEETING:
                member.phase = Phase.OUTSIDE
            elif member.phase is Phase.MEETING:
                member.phase = Phase.TRAINING
        elif isinstance(message, MemberFinished):
            member.phase = Phase.FINISHED
        elif isinstance(message, MemberIdle):
            member.phase, member.standing, member.wait = Phase.IDLE, message.standing, NOTHING
            if self._worlds.stage is not Stage.STOPPING or not message.standing.at_rest:
                self._worlds.end_world(f"{self._roster.who(member)}: {message.reason}")
        elif isinstance(message, Alive):
            self._roster.is_alive(member, in_user_code=message.in_user_code)
        elif isinstance(message, MeetingFailed):
            missing = [self.members[rank] for rank in message.missing if 0 <= rank < len(self.members)]
            self._worlds.meetings.complain(missing or [member.id], self.members[0], message.reason)
            self._worlds.end_world(f"{self._roster.who(member)} could not meet the others: {message.reason}")
        elif member.id == self.members[0] and message.addresses and self._worlds.stage is Stage.MEETING:
            address = message.addresses[self._worlds.meetings.count % len(message.addresses)]
            for other in self._roster.living():
                if other is not member:
                    self._roster.tell(other, CoordinatorAt(self.epoch, address, message.port))

    # --- members that end --------------------------------------------------------------------------------------------------

    def _gone(self, event: MemberGone) -> None:
        member, code = self._roster.get(event.member), event.code
        if member is None or member.phase is Phase.GONE:
            return
        before, member.phase, member.wait = member.phase, Phase.GONE, NOTHING
        in_world = member.id in self.members
        failure = Failure(member.id, self._roster.who(member), code, event.cause, member.fault, self.epoch,
                          in_training=in_world and before is not Phase.IDLE and not event.is_consequence
                          and self._worlds.stage is not Stage.FINISHED)
        if before is Phase.DISMISSED:
            return
        if before is Phase.KILLED and not member.fault:
            self._worlds.left(member, _WORLD_LOST)  # nothing of a joiner, which is in no world
            return
        if self._worlds.stage is Stage.FINISHED:
            if in_world and code != 0:
                self._failed_at_end(failure, is_consequence=event.is_consequence)
        elif in_world and before in (Phase.FIRST_MEETING, Phase.OUTSIDE) and (
                event.is_consequence or self._worlds.stage is Stage.ENDING):
            if code and not event.is_consequence and self._worlds.failures.blamed is None:
                self._failed(failure)  # it was the first; its consequence has been seen earlier
            else:
                self._worlds.left(member, _WORLD_LOST)
        elif why := self._roster.leaves(member):
            self._worlds.left(member, why)
        elif code == 0 and not member.fault:
            self._hosts.retire(member.host, member.slot, self._roster.now)
            if before in SURVIVING:  # else it may be a script without elastic.run, which ends as any other
                self._worlds.left(member, "it ended with code 0 before training had finished")
        else:
            self._failed(failure)
            if self._hosts.fail(member.host, member.slot, self._roster.now):
                self._barred(member.host)

    def _failed(self, failure: Failure) -> None:
        self._worlds.failures.add(failure)
        self._worlds.note(str(failure))
        if failure.member in self.members:
            self._worlds.changes.left(failure.who, failure.why, failed=True)
            self._worlds.end_world(str(failure))

    def _failed_at_end(self, failure: Failure, *, is_consequence: bool = False) -> None:
        """A member has failed after `elastic.run` has returned everywhere; the others go on to their ends.

        The job succeeds nevertheless if a rank other than 0 was killed or lost, and no other rank misses it: training has
        finished, and rank 0 keeps the result. An exception, and the loss of rank 0, are failures of the job.
        """
        worlds = self._worlds
        worlds.failures.add(failure)
        if (failure.code or -1) < 0 and self._roster.rank_of(failure.member) != 0:
            worlds.note(f"{failure}; training had finished")
            worlds.lost_at_end = worlds.lost_at_end or failure
        else:
            worlds.note(str(failure))
            worlds.failure_at_end = worlds.failure_at_end or (worlds.lost_at_end if is_consequence else None) or failure

    def _lost(self, host: str, reason: str) -> None:
        """All members of a host are gone; this counts as one failure of the host, and as none of the training."""
        barred = self._hosts.lose(host, self._roster.now)
        self._worlds.note(f"host {host} was lost: {reason}")
        lost = [member for member in self._roster.alive() if member.host == host]
        failed = [member for member in lost if member.phase is not Phase.DISMISSED and member.id in self.members]
        for member in lost:
            member.phase, member.wait = Phase.GONE, NOTHING
        for member in failed:
            failure = Failure(member.id, self._roster.who(member), None, "", reason, self.epoch, in_training=False)
            if self._worlds.stage is Stage.FINISHED:
                self._failed_at_end(failure)
            else:
                self._failed(failure)
        if barred:
            self._barred(host)

    def _barred(self, host: str) -> None:
        self._worlds.note(f"no more processes are started on {host}{' for some time' if self._limits.cooldown else ''}")
