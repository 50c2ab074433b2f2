"""A short notation for what an authority hears and orders."""

from __future__ import annotations

from typing import Any, TypeVar

from hvdlite.membership.authority import Authority
from hvdlite.membership.events import (
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
)
from hvdlite.membership.messages import (
    Alive,
    AskAlive,
    BoundaryReport,
    Dismissed,
    MeetingFailed,
    MemberFinished,
    MemberIdle,
    MemberNoticed,
    MemberReady,
    Met,
    PrepareStop,
    StateReport,
    StopAt,
    StopNow,
    WorldOrder,
)
from tests.membership.invariants import validate

_Order = TypeVar("_Order")


class Talk:
    """An authority, what it has ordered in answer to the last event, and the time."""

    def __init__(self, limits: Limits, machines: dict[str, str] | None = None, **slots: int) -> None:
        self.now = 100.0
        self.authority = Authority(limits, self.now, str if machines is None else lambda host: machines.get(host, host))
        self.commands: list[Command] = []
        self.notes: list[str] = []
        self.change = 0  # the last one that was prepared
        if slots:
            self.hosts(**slots)

    def handle(self, event: Event) -> Talk:
        self.commands = self.authority.handle(event, self.now)
        validate(self.authority.world)
        for command in self.commands:
            if isinstance(command, SendOrder) and isinstance(command.order, PrepareStop):
                self.change = command.order.change
        self.notes += [command.text for command in self.commands if isinstance(command, Note)]
        return self

    # --- events

    def hosts(self, **slots: int) -> Talk:
        return self.handle(HostsSeen(slots))

    def ready(self, *members: int) -> Talk:
        return self._each(members, MemberReady())

    def met(self) -> Talk:
        return self._each(self.world, Met(self.epoch))

    def finished(self, *members: int) -> Talk:
        return self._each(members, MemberFinished(self.epoch))

    def idle(self, *members: int, commits: int = 0, boundaries: int = 0, at_rest: bool = False, has_state: bool = True,
             reason: str = "a peer was lost", blamed: tuple[int, ...] = ()) -> Talk:
        return self._each(members, MemberIdle(
            self.epoch, StateReport(has_state=has_state, commits=commits, boundaries=boundaries, at_rest=at_rest), reason,
            blamed))

    def alive(self, *members: int, in_user_code: bool = True) -> Talk:
        return self._each(members, Alive(self.epoch, in_user_code))

    def seen_stopped(self, *members: int) -> Talk:
        for member in members:
            self.handle(SeenStopped(member))
        return self

    def boundary(self, **told: int) -> Talk:
        """Answer the last `PrepareStop`: `boundary(m0=3, m1=4)`."""
        commands = []
        for member, boundary in told.items():
            commands += self.handle(MemberReported(int(member[1:]), BoundaryReport(self.change, boundary))).commands
        self.commands = commands
        return self

    def cannot_meet(self, member: int, *missing: int) -> Talk:
        return self.handle(MemberReported(member, MeetingFailed(self.epoch, "no route", missing)))

    def gone(self, member: int, code: int | None = -9, cause: str = "") -> Talk:
        return self.handle(MemberGone(member, code, cause))

    def noticed(self, *members: int, seconds: float | None = None) -> Talk:
        """Members get SIGTERM, or, with seconds, their host is to be left."""
        if seconds is None:
            return self._each(members, MemberNoticed())
        return self.handle(MembersNoticed(members, "hvdrun --leave", seconds))

    def lost(self, host: str) -> Talk:
        return self.handle(HostLost(host, "the cable was cut"))

    def wait(self, seconds: float) -> Talk:
        """Let time pass, with all that is due."""
        end, commands = self.now + seconds, []
        while (wake := self.authority.wake_at()) is not None and wake <= end:
            self.now = wake
            commands += self.handle(TimePassed()).commands
        self.now, self.commands = end, commands
        return self

    def _each(self, members: Any, message: Any) -> Talk:
        commands = []
        for member in members:
            commands += self.handle(MemberReported(member, message)).commands
        self.commands = commands
        return self

    # --- facts and orders

    @property
    def epoch(self) -> int:
        return self.authority.epoch

    @property
    def world(self) -> tuple[int, ...]:
        return self.authority.members

    def told(self, kind: type[_Order]) -> dict[int, _Order]:
        """Return the orders of a kind, by member."""
        return {command.member: command.order for command in self.commands
                if isinstance(command, SendOrder) and isinstance(command.order, kind)}

    def started(self) -> list[tuple[int, str, int]]:
        """Return the members that were started, with their hosts and slots."""
        return [(each.member, each.host, each.slot) for each in self.commands if isinstance(each, StartMember)]

    def killed(self) -> list[int]:
        return [command.member for command in self.commands if isinstance(command, Kill)]

    def stopped(self) -> list[int]:
        return list(self.told(StopNow))

    def dismissed(self) -> list[int]:
        return list(self.told(Dismissed))

    def asked(self) -> list[int]:
        return list(self.told(AskAlive))

    def looked_at(self) -> list[int]:
        return [command.member for command in self.commands if isinstance(command, Look)]

    def stop_at(self) -> set[int]:
        return {order.boundary for order in self.told(StopAt).values()}

    def order(self) -> WorldOrder:
        """Return the world that was ordered, the same for all of its members."""
        orders = self.told(WorldOrder)
        (order,) = set(orders.values())
        assert set(orders) == set(order.members) and order.members == self.world
        return order

    def end(self) -> EndJob:
        (end,) = [command for command in self.commands if isinstance(command, EndJob)]
        return end


def founded(np: int, *, met: bool = True, machines: dict[str, str] | None = None, slots: dict[str, int] | None = None,
            **limits: Any) -> Talk:
    """Return a job whose founders train: `np` of them on one host, if no others are given."""
    talk = Talk(Limits(np, **limits), machines, **(slots or {"a": np}))
    if met:
        talk.met().ready(*range(np))
    return talk
