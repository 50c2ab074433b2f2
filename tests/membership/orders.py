"""All orders of so many events of three members, from several beginnings; of states that are equal, one is followed.

What has to be true after each event is asserted here and in `World.validate`. `python -m tests.membership --depth 7`
goes further than the tests.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from hvdlite.membership.authority import Authority
from hvdlite.membership.events import (
    Command,
    EndJob,
    Event,
    HostLost,
    HostsSeen,
    Kill,
    Limits,
    MemberGone,
    MemberReported,
    SendOrder,
    StartMember,
    TimePassed,
    WorldBegun,
)
from hvdlite.membership.members import TRANSITIONS, MemberState, WorldState
from hvdlite.membership.messages import (
    Alive,
    BoundaryReport,
    MeetingFailed,
    MemberFinished,
    MemberIdle,
    MemberNoticed,
    MemberReady,
    Met,
    StateReport,
    WorldOrder,
)
from hvdlite.membership.recovery import recover
from tests.membership.invariants import validate
from tests.membership.talk import Talk, founded

_Thing = TypeVar("_Thing")
MEMBERS = 3
SLOTS = {"a": 2, "b": 1}


def there_are_no_slots() -> Talk:
    return Talk(Limits(MEMBERS))


def three_meet() -> Talk:
    return founded(3, met=False, slots=SLOTS, max_np=3)


def three_are_outside() -> Talk:
    return three_meet().met()


def three_train() -> Talk:
    return founded(3, slots=SLOTS, min_np=2)


def two_train_and_one_joins() -> Talk:
    return founded(2, slots=SLOTS, max_np=3, cooldown=(1.0, 4.0))


def two_prepare_to_stop_for_a_third() -> Talk:
    return two_train_and_one_joins().ready(2)


def two_stop_for_a_third() -> Talk:
    return two_prepare_to_stop_for_a_third().boundary(m0=1, m1=2)


def one_waits_for_another() -> Talk:
    return founded(2, slots=SLOTS, min_np=2, max_np=3).gone(0).idle(1)


def three_have_finished() -> Talk:
    return three_train().finished(0, 1, 2)


BEGINNINGS: tuple[Callable[[], Talk], ...] = (
    there_are_no_slots, three_meet, three_are_outside, three_train, two_train_and_one_joins, two_prepare_to_stop_for_a_third,
    two_stop_for_a_third, one_waits_for_another, three_have_finished)


def events(authority: Authority) -> Iterator[tuple[Event, bool]]:
    """Return all events that may come next and are not dropped, and whether each is a rare one."""
    world = authority.world
    for member in list(world.everybody.values())[:MEMBERS]:
        for message, is_rare in (
                (MemberReady(), False), (Met(world.epoch), False), (MemberFinished(world.epoch), False),
                (BoundaryReport(world.change, member.id), False),
                (MemberIdle(world.epoch, StateReport(commits=1, at_rest=True)), False),
                (MemberIdle(world.epoch, StateReport(commits=member.id)), False),
                (Alive(world.epoch, in_user_code=True), True), (MemberNoticed(), True),
                (MeetingFailed(world.epoch, "no route"), True)):
            if member.state in TRANSITIONS[type(message)]:
                yield MemberReported(member.id, message), is_rare
        if member.state is not MemberState.GONE:
            yield MemberGone(member.id, 0), False
            yield MemberGone(member.id, -9), False
    yield HostsSeen(SLOTS), world.state is not WorldState.FOUNDING
    yield HostsSeen({"a": 2}), True
    yield HostLost("b", "the cable was cut"), True
    if authority.wake_at() is not None:
        yield TimePassed(), False


def key(authority: Authority, now: float) -> bytes:
    """Return what tells an authority from others: what it will do from now on, without lines for people."""
    world, history, hosts, meetings = authority.world, authority._history, authority._hosts, authority._meetings
    members = []
    for member in world.everybody.values():
        wait, report = member.wait, member.state_report
        members.append((member.state.value, report and (report.commits, report.at_rest), bool(member.fault), wait.what,
                        wait.kill_at - now, wait.ask_at - now, wait.give_up_at - now, wait.is_noted, bool(member.notice),
                        member.train_until - now, member.leave_by - now))
    facts = (
        world.state.value, world.epoch, authority.members, members, world.until - now, sorted(world.boundaries.items()),
        bool(world.reason), world.is_last, hosts._slots, sorted(hosts._lost), sorted(hosts._left_out), hosts._failures,
        vars(hosts._retired), vars(hosts._barred),
        now if hosts._failures or hosts._retired._until else 0.0, history._progress, history._worlds, history._errors,
        history._progress_at_error, [(each.member, each.in_training) for each in history._new],
        [(each.member, each.slot) for each in history._without_progress], history._blamed and history._blamed.member,
        history.failed_at_end is None, sorted(meetings.complaints),
        sorted(meetings._unreached), meetings.count, authority._has_finished)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def copied(thing: _Thing) -> _Thing:
    """Return a copy with copies of its containers."""
    new = copy.copy(thing)
    vars(new).update({name: value.copy() for name, value in vars(new).items() if isinstance(value, (dict, list, set))})
    return new


def copy_of(authority: Authority) -> Authority:
    """Return an authority that goes on by itself."""
    new = copy.copy(authority)
    new.world, new._history, new._hosts = copied(new.world), copied(new._history), copied(new._hosts)
    new._hosts._retired, new._hosts._barred = copied(new._hosts._retired), copied(new._hosts._barred)
    everybody = new.world.everybody = {id: copy.copy(member) for id, member in new.world.everybody.items()}
    new.world.members = tuple(everybody[member.id] for member in new.world.members)
    new._meetings = copied(new._meetings)
    new._meetings._members = everybody
    new._rules = {state: getattr(new, rule.__name__) for state, rule in new._rules.items()}
    return new


def check(authority: Authority, event: Event, before: WorldState, reports: dict[int, StateReport | None],
          states: dict[int, MemberState], commands: list[Command], now: float) -> None:
    """Check what the authority has commanded after an event."""
    validate(authority.world)
    wake_at = authority.wake_at()
    assert wake_at is None or wake_at > now
    ends = [command for command in commands if isinstance(command, EndJob)]
    assert authority.is_over == bool(ends) and (not ends or commands[-1] is ends[0])
    silent = {id for id, state in states.items() if state in (MemberState.KILLED, MemberState.GONE)}
    if isinstance(event, MemberGone):
        silent.add(event.member)
    elif isinstance(event, MemberReported) and isinstance(event.message, MemberIdle) and states[event.member] not in (
            MemberState.KILLED, MemberState.DISMISSED, MemberState.GONE, MemberState.IDLE):
        reports[event.member] = event.message.state_report
    begun = [command for command in commands if isinstance(command, WorldBegun)]
    ordered = {command.member for command in commands
               if isinstance(command, SendOrder) and isinstance(command.order, WorldOrder)}
    for command in commands:
        if isinstance(command, (SendOrder, Kill)):
            assert command.member not in silent, "it does not hear"
            silent |= {command.member} if isinstance(command, Kill) else set()
        elif isinstance(command, StartMember):
            assert not authority._hosts.is_barred(command.host, now) and authority._hosts.has(command.host, command.slot)
    assert ordered == {id for world in begun if world.epoch > 1 for id in world.members}
    for world in begun:
        assert len(begun) == 1 and before is not WorldState.OVER
        if before is WorldState.FOUNDING:
            continue
        left = {id: report for id, report in reports.items() if report is not None and id not in silent}
        donors = recover(left).donors
        commits = {left[id].commits for id in donors}
        assert world.members[0] in donors or {left[world.members[0]].commits} == commits, "rank 0 has the state that counts"


def explore(beginning: Callable[[], Talk], depth: int, rare: int) -> int:
    """Go through all orders of so many events, of which at most so many are rare ones; return how many were handled."""
    talk, handled = beginning(), 0
    known = {(key(talk.authority, talk.now), rare)}
    level = [(talk.authority, talk.now, rare)]
    for length in range(1, depth + 1):
        following: list[tuple[Authority, float, int]] = []
        for begun, now, left in level:
            for event, is_rare in events(begun):
                if left < is_rare:
                    continue
                authority = copy_of(begun)
                at = authority.wake_at() if isinstance(event, TimePassed) else now
                before = begun.world.state
                reports = {member.id: member.state_report for member in begun.world.members}
                states = {member.id: member.state for member in begun.world.everybody.values()}
                try:
                    commands = authority.handle(event, at)
                    check(authority, event, before, reports, states, commands, at)
                except Exception as error:
                    raise AssertionError(f"{beginning.__name__}: {event} in {before}: {states}") from error
                handled += 1
                if length == depth or authority.is_over:
                    continue  # nothing follows
                name = (key(authority, at), left - is_rare)
                if name not in known:
                    known.add(name)
                    following.append((authority, at, left - is_rare))
        level = following
    return handled
