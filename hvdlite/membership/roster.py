"""The roster of an elastic job: its members, the world that they are in, and the commands that concern one of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from hvdlite.membership.events import Command, Kill, Note, StartMember, Tell
from hvdlite.membership.hosts import Hosts, Slot
from hvdlite.membership.limits import Limits
from hvdlite.membership.members import EXIT, IN_WORLD, JOINING, LIFE, NOTHING, STOP, Member, Phase, Wait
from hvdlite.membership.messages import AskAlive, Dismissed, MemberOrder, StopNow, WorldOrder
from hvdlite.membership.planning import Plan


class Roster:
    """All members that there have been, and the last world.

    Args:
        limits: the sizes and times.
        hosts: the slots on which members may be.
    """

    def __init__(self, limits: Limits, hosts: Hosts) -> None:
        self._limits = limits
        self._hosts = hosts
        self._all: dict[int, Member] = {}
        self.epoch = 0
        self.world: tuple[int, ...] = ()  # by rank, those that have gone since included
        self.commands: list[Command] = []  # to be done, in this order
        self.now = 0.0

    def __getitem__(self, member: int) -> Member:
        return self._all[member]

    def get(self, member: int) -> Member | None:
        """Return a member; None if none was started with this id."""
        return self._all.get(member)

    def alive(self, phases: Iterable[Phase] = Phase) -> list[Member]:
        """Return the members whose processes have not ended, by their ids.

        Args:
            phases: only those in one of these phases.
        """
        return [member for member in self._all.values() if member.phase is not Phase.GONE and member.phase in phases]

    def living(self) -> list[Member]:
        """Return the members of the world, by rank, without those that are gone or dismissed."""
        world = [self._all[member] for member in self.world]
        return [member for member in world if member.phase not in (Phase.GONE, Phase.DISMISSED)]

    def staying(self) -> list[Member]:
        """Return the living members of the world, without those that leave."""
        return [member for member in self.living() if not self.leaves(member)]

    def leaves(self, member: Member) -> str:
        """Return why a member is not to be in the next world; "" if it stays.

        It is dismissed when the next world is ordered, so that the last state is not lost with it.
        """
        if not self._hosts.has(member.host, member.slot):
            return "its host was removed"
        if self._limits.whole_host and self._hosts.is_barred(member.host, self.now):
            return f"another process has failed on {member.host}"
        return ""

    def free(self) -> list[Slot]:
        """Return the slots on which members can be started."""
        return self._hosts.free({(member.host, member.slot) for member in self.alive()}, self.now)

    def rank_of(self, member: int) -> int | None:
        """Return a member's rank in the last world; None for one that is not in it."""
        return self.world.index(member) if member in self.world else None

    def who(self, member: Member) -> str:
        """Return a member's name, for people."""
        rank = self.rank_of(member.id)
        return f"a new process on {member.host}" if rank is None else f"rank {rank} on {member.host}"

    def found(self, slots: Sequence[Slot]) -> None:
        """Start the members of the first world."""
        self.epoch = 1
        self.world = tuple(self._start(slot, rank, len(slots), Phase.FIRST_MEETING) for rank, slot in enumerate(slots))

    def start_joiners(self, slots: Sequence[Slot], size: int) -> None:
        """Start joiners; the first one has the provisional rank `size`."""
        for rank, slot in enumerate(slots, size):
            self._start(slot, rank, rank + 1, Phase.STARTING)

    def _start(self, slot: Slot, rank: int, size: int, phase: Phase) -> int:
        member = Member(len(self._all), *slot, phase)
        self._all[member.id] = member
        self.commands.append(StartMember(member.id, *slot, rank, size, is_joiner=phase is Phase.STARTING))
        return member.id

    def note(self, text: str) -> None:
        """Tell the user something."""
        self.commands.append(Note(text))

    def tell(self, member: Member, order: MemberOrder) -> None:
        """Send an order to a member."""
        self.commands.append(Tell(member.id, order))

    def stop(self, members: Iterable[Member], reason: str) -> None:
        """Tell members to end the world at once, unless they have been told."""
        for member in members:
            if member.phase in IN_WORLD and member.wait.what != STOP:
                timeout = self._limits.quiesce_timeout
                member.wait = Wait(STOP, self.now + timeout, self.now + timeout / 2, self.now + self._limits.elastic_timeout,
                                   member.wait.is_noted)
                self.tell(member, StopNow(self.epoch, reason))

    def ask(self, member: Member) -> None:
        """Ask a member for which others wait whether it lives."""
        kill_at = min(member.wait.kill_at, self.now + self._limits.quiesce_timeout)
        member.wait = dataclasses.replace(member.wait, kill_at=kill_at, ask_at=math.inf)
        self.tell(member, AskAlive(self.epoch))

    def is_alive(self, member: Member, *, in_user_code: bool) -> None:
        """A member has answered `ask`: wait for it longer, if it was told to stop and computes, or was not told."""
        wait, timeout = member.wait, self._limits.quiesce_timeout
        if wait.what == LIFE:
            member.wait = dataclasses.replace(wait, kill_at=math.inf, ask_at=self.now + 2 * timeout)
        elif wait.what != STOP or not member.survives:  # others cannot go on in another world
            return
        elif in_user_code:
            member.wait = dataclasses.replace(
                wait, kill_at=min(self.now + timeout, wait.give_up_at), ask_at=self.now + timeout / 2)
        else:  # its background thread may be slow to end, while the script computes
            member.wait = dataclasses.replace(wait, ask_at=self.now + timeout / 8)

    def dismiss(self, members: Iterable[Member], reason: str) -> None:
        """End members that are in no world: those that listen are told, the others are killed."""
        for member in members:
            if member.phase is Phase.STARTING:
                self.kill(member, reason)
            else:
                member.phase, member.wait = Phase.DISMISSED, Wait(EXIT, self.now + self._limits.quiesce_timeout)
                self.tell(member, Dismissed(reason))

    def kill(self, member: Member, reason: str) -> None:
        """Kill a member; what it says until it is gone does not count."""
        member.phase, member.wait = Phase.KILLED, NOTHING
        self.commands.append(Kill(member.id, reason))

    def order(self, plan: Plan, reason: str, machine_of: Callable[[str], str]) -> WorldOrder:
        """Order a world."""
        members = [self._all[member] for member in plan.members]
        machines: dict[str, list[int]] = {}
        for rank, member in enumerate(members):
            machines.setdefault(machine_of(member.host), []).append(rank)
        self.epoch += 1
        self.world = plan.members
        order = WorldOrder(
            epoch=self.epoch, members=plan.members, ranks_by_machine=tuple(map(tuple, machines.values())),
            host_names=tuple(member.host for member in members), restore=plan.restore, commits=plan.commits, reason=reason)
        for member in members:
            member.phase, member.standing, member.boundary = Phase.MEETING, None, None
            self.tell(member, order)
        return order

    def joiners_by_progress(self) -> list[Member]:
        """Return the joiners: those that are ready first, and else by their ids."""
        return sorted(self.alive(JOINING), key=lambda member: (member.phase is Phase.STARTING, member.id))
