"""The states of members, cell by cell: what each message, order and end makes of each state, and what is dropped."""

from __future__ import annotations

import pytest

from hvdlite.membership.events import Kill, Limits, MemberGone, MemberReported, Note, SendOrder
from hvdlite.membership.expectations import Expectation
from hvdlite.membership.members import SUCCESSORS, SURVIVING, TRANSITIONS, MemberState, WorldState
from hvdlite.membership.messages import (
    Alive,
    AllFinished,
    AskAlive,
    BoundaryReport,
    CoordinatorAt,
    Dismissed,
    Listening,
    MeetingFailed,
    MemberFinished,
    MemberHello,
    MemberIdle,
    MemberMessage,
    MemberNoticed,
    MemberOrder,
    MemberReady,
    Met,
    PrepareStop,
    SaveState,
    StateReport,
    StopAt,
    StopNow,
    WorldOrder,
)
from tests.membership.talk import Talk, founded

SAID = ("ready", "met", "told", "finished", "idle", "other", "noticed")
TABLE = """
state          ready     met       told      finished  idle  other  noticed
STARTING       READY     -         -         -         -     -      same
READY          -         -         -         -         -     -      same
FIRST_MEETING  TRAINING  OUTSIDE   -         FINISHED  IDLE  same   same
MEETING        TRAINING  TRAINING  -         FINISHED  IDLE  same   same
OUTSIDE        TRAINING  -         -         FINISHED  IDLE  same   same
TRAINING       -         -         same      FINISHED  IDLE  same   same
FINISHED       -         -         same      same      IDLE  same   same
IDLE           -         -         -         -         -     -      same
DISMISSED      -         -         -         -         -     -      -
KILLED         -         -         -         -         -     -      -
GONE           -         -         -         -         -     -      -
"""
"""What a member says, and what its state is then; -: the message is dropped. Other: it listens, lives, or cannot meet."""

COMMANDED = """
state         WorldOrder PrepareStop StopAt StopNow AskAlive CoordinatorAt AllFinished SaveState Dismissed Kill   MemberGone
STARTING      -          -           -      -       -        -             -           -         -         KILLED GONE
READY         MEETING    -           -      -       -        -             -           -         DISMISSED KILLED GONE
FIRST_MEETING -          -           -      same    same     same          -           -         -         KILLED GONE
MEETING       -          -           -      same    same     same          -           -         -         KILLED GONE
OUTSIDE       -          -           -      same    same     same          -           -         -         KILLED GONE
TRAINING      -          same        same   same    same     same          -           -         -         KILLED GONE
FINISHED      -          -           same   same    same     same          OUTSIDE     -         -         KILLED GONE
IDLE          MEETING    -           -      -       -        -             -           same      DISMISSED KILLED GONE
DISMISSED     -          -           -      -       -        -             -           -         -         KILLED GONE
KILLED        -          -           -      -       -        -             -           -         -         -      GONE
GONE          -          -           -      -       -        -             -           -         -         -      -
"""
"""What a member is told or becomes; -: it never is."""

WORLDS = """
FOUNDING   MEETING OVER
MEETING    RUNNING ENDING FINISHED OVER
RUNNING    PREPARING ENDING FINISHED OVER
PREPARING  STOPPING ENDING FINISHED
STOPPING   ENDING FINISHED
ENDING     MEETING WAITING OVER
WAITING    MEETING OVER
FINISHED   RUNNING OVER
OVER
"""


def cells(table: str) -> list[tuple[str, str, str]]:
    """Return the cells of a table, with the names of row and column."""
    (_, *columns), *rows = [line.split() for line in table.strip().splitlines()]
    assert [row[0] for row in rows] == [state.name for state in MemberState]
    return [(row[0], column, cell) for row in rows for column, cell in zip(columns, row[1:], strict=True)]


def after(state: str, cell: str) -> MemberState | None:
    return None if cell == "-" else MemberState[state if cell == "same" else cell]


def in_state(name: str) -> tuple[Talk, int]:
    """Return a job in which a member is in a state, and the member."""
    if name in ("STARTING", "READY"):
        talk = founded(2, slots={"a": 3})
        return (talk.ready(2) if name == "READY" else talk), 2
    if name in ("FIRST_MEETING", "OUTSIDE"):
        talk = founded(2, met=False)
        return (talk.met() if name == "OUTSIDE" else talk), 1
    talk = founded(3)
    if name == "MEETING":
        talk.idle(0, 1, 2)
    elif name == "FINISHED":
        talk.finished(1)
    elif name == "IDLE":
        talk.idle(1)
    elif name == "DISMISSED":
        talk.hosts(a=1)
        talk.boundary(m0=1, m1=1, m2=1)
        talk.idle(0, 1, 2, at_rest=True)
    elif name in ("KILLED", "GONE"):
        talk.finished(0).wait(70)
        if name == "GONE":
            talk.gone(1)
    return talk, 1


def messages_of(kind: str, talk: Talk) -> list[MemberMessage]:
    return {
        "ready": [MemberReady()], "met": [Met(talk.epoch)], "told": [BoundaryReport(talk.authority.world.change, 3)],
        "finished": [MemberFinished(talk.epoch)], "idle": [MemberIdle(talk.epoch, StateReport(), "a peer was lost")],
        "other": [Alive(talk.epoch, False), Listening(talk.epoch, ("10.0.0.1",), 7), MeetingFailed(talk.epoch, "no route")],
        "noticed": [MemberNoticed()],
    }[kind]


@pytest.mark.parametrize(("state", "said", "cell"), cells(TABLE))
def test_what_a_member_says(state: str, said: str, cell: str) -> None:
    """docs/protocol.md#members"""
    count = len(messages_of(said, in_state(state)[0]))
    for index in range(count):
        talk, id = in_state(state)
        world = talk.authority.world
        member = world.everybody[id]
        assert member.state is MemberState[state]
        before = (world.state, member.wait, dict(world.boundaries))
        message = messages_of(said, talk)[index]
        expected = after(state, cell)
        assert TRANSITIONS[type(message)].get(member.state) is expected
        assert world.takes(member, message, talk.now) == (expected is not None)
        member.state = MemberState[state]
        commands = talk.handle(MemberReported(id, message)).commands
        if expected is None:
            assert (member.state, commands) == (MemberState[state], []), "it is dropped"
            assert (world.state, member.wait, world.boundaries) == before
        elif said != "other" and not any(isinstance(each, (SendOrder, Kill)) and each.member == id for each in commands):
            assert member.state is expected
        if hasattr(message, "epoch") and expected is not None:
            talk, id = in_state(state)
            foreign = type(message)(**{**{name: getattr(message, name) for name in message.__struct_fields__}, "epoch": 99})
            assert talk.handle(MemberReported(id, foreign)).commands == []
            assert talk.authority.world.everybody[id].state is MemberState[state], "it is of another world"


@pytest.mark.parametrize(("state", "commanded", "cell"), cells(COMMANDED))
def test_what_a_member_is_told_or_becomes(state: str, commanded: str, cell: str) -> None:
    kinds = {kind.__name__: kind for kind in TRANSITIONS}
    assert TRANSITIONS[kinds[commanded]].get(MemberState[state]) is after(state, cell)


def test_the_tables_are_whole() -> None:
    """Each message and order has a row; what others say of a member changes nothing else."""
    said = {MemberReady, Met, BoundaryReport, MemberFinished, MemberIdle, Alive, Listening, MeetingFailed, MemberHello,
            MemberNoticed}
    told = {WorldOrder, PrepareStop, StopAt, StopNow, AskAlive, CoordinatorAt, AllFinished, SaveState, Dismissed}
    assert said == set(MemberMessage.__args__) and told == set(MemberOrder.__args__)
    assert set(TRANSITIONS) == said | told | {Kill, MemberGone} and TRANSITIONS[MemberHello] == {}
    rows = [line.split() for line in WORLDS.strip().splitlines()]
    assert {WorldState[name]: tuple(WorldState[each] for each in next) for name, *next in rows} == SUCCESSORS


@pytest.mark.parametrize("state", MemberState)
def test_members_in_run_survive_the_loss_of_others(state: MemberState) -> None:
    """docs/protocol.md#members"""
    survives = state.name in ("READY", "MEETING", "TRAINING", "FINISHED", "IDLE")
    assert (state in SURVIVING) == survives
    if state.name in ("FIRST_MEETING", "MEETING", "OUTSIDE", "TRAINING", "FINISHED"):
        talk, id = in_state(state.name)
        talk.gone(0)
        assert talk.authority.world.everybody[id].wait.what == "stop"
        before = talk.wait(5).alive(id).authority.world.everybody[id].wait
        assert (before.ask_at < before.kill_at) == survives, "only those that survive are waited for longer"
        for _ in range(3):
            talk.wait(4.9).alive(*([id] if talk.asked() else []))
        killed = talk.authority.world.everybody[id].state is MemberState.KILLED
        assert killed != survives
        if killed:
            talk.gone(id)
            assert not [each for each in talk.commands if isinstance(each, Note)], "it has no fault of its own"


def test_a_wait_of_each_kind() -> None:
    """docs/protocol.md#boundaries"""
    limits = Limits(2)
    for what, kept in (("", False), ("boundary", False), ("exit", False), ("life", True), ("stop", True)):
        wait = Expectation(what, kill_at=10.0, give_up_at=30.0)  # type: ignore[arg-type]
        assert (wait.prolonged(9.0, limits, computes=True, survives=True) != wait) == kept
        assert (wait.prolonged(9.0, limits, computes=True, survives=False) != wait) == (what == "life")
    stop = Expectation("stop", kill_at=25.0, give_up_at=30.0)
    assert stop.prolonged(24.0, limits, computes=True, survives=True).kill_at == 30.0, "not for ever"
    assert stop.prolonged(24.0, limits, computes=False, survives=True).kill_at == 25.0
