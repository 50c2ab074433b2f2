"""Notices: members that are told to leave go at a boundary, or are killed when their time is over.

docs/protocol.md#notices
"""

from __future__ import annotations

import math

import pytest

from hvdlite.membership.events import TOO_FEW, EndJob, WorldBegun
from hvdlite.membership.messages import Dismissed, PrepareStop, StopAt
from tests.membership.talk import Talk, founded


def at_boundary(talk: Talk, *members: int, boundary: int = 4) -> Talk:
    """Let members stop at the boundary that they are told."""
    talk.boundary(**{f"m{member}": boundary for member in members})
    assert talk.stop_at() == {boundary + 1}
    return talk.idle(*members, commits=3, at_rest=True)


@pytest.mark.parametrize("leaving", [0, 1, 2])
@pytest.mark.parametrize("seconds", [None, 2.0, math.inf])
def test_a_member_that_is_told_to_leave_goes_at_the_next_boundary(leaving: int, seconds: float | None) -> None:
    talk = founded(3)
    assert talk.noticed(leaving, seconds=seconds).told(PrepareStop).keys() == {0, 1, 2}
    limit, why = {None: (" within 30 s", "it got SIGTERM"), 2.0: (" within 2 s", "hvdrun --leave"),
                  math.inf: ("", "hvdrun --leave")}[seconds]
    assert talk.notes == [f"rank {leaving} on a: to leave{limit} ({why})"]
    at_boundary(talk, 0, 1, 2)
    order = talk.order()
    assert order.members == tuple(member for member in range(3) if member != leaving), "rank 0 can be another one"
    assert not order.restore and order.commits == 3, "nothing is done again"
    assert talk.dismissed() == [leaving] and talk.gone(leaving, 0).commands == []
    talk.met()
    assert f"left: rank {leaving} on a ({why})" in talk.notes[-1] and "goes on where training stopped" in talk.notes[-1]
    assert talk.wait(1000).killed() == [] and talk.authority.summary()[1:] == [f"rank {leaving} on a left: {why}"]


def test_a_notice_before_at_and_after_the_boundary_of_another_change() -> None:
    for step in range(4):
        talk = founded(4)
        talk.noticed(3)
        for number, members in enumerate([(0, 1), (2, 3), (0, 1, 2), (3,)]):
            if number == step:
                talk.noticed(1)
            if number < 2:
                talk.boundary(**{f"m{member}": 4 for member in members})
            else:
                talk.idle(*members, commits=3, at_rest=True)
        assert talk.order().members == (0, 2) and not talk.order().restore, step


def test_one_that_has_not_left_in_time_is_killed_and_nobody_has_failed() -> None:
    talk = founded(3)
    talk.noticed(1)
    talk.boundary(m0=4, m2=4)  # member 1 computes
    assert talk.wait(29.9).killed() == [] and talk.wait(0.1).killed() == [1]
    assert talk.gone(1).stopped() == [0, 2]
    order = talk.idle(0, 2, commits=2).order()
    assert order.members == (0, 2) and order.restore, "it counts as lost"
    talk.met()
    assert "left: rank 1 on a (it got SIGTERM; it had not left in time (killed by signal 9 (SIGKILL)))" in talk.notes[-1]
    assert not talk.authority._history.failures and not talk.authority._hosts._failures


def test_one_whose_time_is_over_while_others_come_to_the_boundary() -> None:
    talk = founded(3)
    talk.noticed(1)
    talk.boundary(m0=4, m1=4)
    assert talk.wait(30).killed() == [1]
    assert talk.boundary(m2=4).commands == [], "there is no boundary for it"
    assert talk.gone(1).stopped() == [0, 2]
    assert talk.idle(0, 2, commits=2).order().members == (0, 2)


def test_less_time_counts_and_more_does_not() -> None:
    talk = founded(2)
    talk.noticed(1, seconds=math.inf)
    assert talk.noticed(1).notes[-1] == "rank 1 on a: to leave within 30 s (it got SIGTERM)"
    assert talk.noticed(1, seconds=100.0).commands == [] and talk.noticed(1).commands == []
    assert talk.wait(30).killed() == [1]


def test_the_slot_rests_as_after_any_end_and_the_host_is_not_charged() -> None:
    talk = founded(2, cooldown=(10.0, 600.0))
    for member in range(1, 6):
        talk.noticed(member)
        at_boundary(talk, 0, member)
        assert talk.started() == [], "its slot is taken"
        talk.met()
        talk.gone(member, 0)
        began = talk.now
        while not talk.started():
            talk.wait(10)
        assert talk.now - began == 10 * 2**(member - 1) and not talk.authority._hosts.is_barred("a", talk.now)
        talk.ready(member + 1)
        at_boundary(talk, 0)
        talk.met()


def test_a_host_that_discovery_lists_again_is_new() -> None:
    talk = founded(2, slots={"a": 1, "b": 1})
    talk.hosts(a=1)
    talk.noticed(1, seconds=5.0)
    at_boundary(talk, 0, 1)
    talk.met()
    talk.gone(1, 0)
    assert [host for _, host, _ in talk.hosts(a=1, b=1).started()] == ["b"]


def test_a_joiner_that_is_told_to_leave_is_dismissed() -> None:
    talk = founded(1, slots={"a": 3})
    talk.ready(1)
    assert talk.noticed(1).dismissed() == [1]
    assert talk.noticed(2, seconds=9.0).killed() == [2], "it does not listen yet"


def test_all_are_told_to_leave_train_for_half_of_their_time_and_stop_for_a_checkpoint() -> None:
    talk = founded(2)
    talk.noticed(0, 1, seconds=20.0)
    assert talk.notes == ["rank 0 on a, rank 1 on a: to leave within 20 s (hvdrun --leave)"]
    assert talk.wait(9.9).told(PrepareStop) == {} and talk.wait(0.1).told(PrepareStop).keys() == {0, 1}
    talk.boundary(m0=4, m1=5)
    assert set(talk.told(StopAt).values()) == {StopAt(talk.change, 6, is_last=True)}
    assert not talk.idle(0, commits=3, at_rest=True).commands
    talk.idle(1, commits=3, at_rest=True)
    assert talk.told(Dismissed).keys() == {0, 1}
    assert talk.end() == EndJob(TOO_FEW, "all ranks were told to leave: hvdrun --leave", grace=3.0)


def test_all_are_told_one_after_the_other_and_go_on_together() -> None:
    talk = founded(2)
    talk.noticed(0, 1)
    talk.boundary(m0=4, m1=4)
    assert not any(order.is_last for order in talk.told(StopAt).values()), "it was for one of them"
    order = talk.idle(0, 1, commits=3, at_rest=True).order()
    assert order.members == (0, 1) and not order.restore, "nobody would be left"
    talk.met()
    assert talk.told(PrepareStop) == {} and talk.wait(15).told(PrepareStop).keys() == {0, 1}
    at_boundary(talk, 0, 1)
    assert talk.end().code == TOO_FEW


def test_all_are_told_and_one_is_lost_at_the_last_boundary() -> None:
    """The checkpoint is not written; the others try again."""
    talk = founded(3)
    talk.noticed(0, 1, 2, seconds=20.0)
    talk.wait(10)
    talk.boundary(m0=4, m1=4, m2=4)
    talk.gone(1)
    assert talk.idle(0, 2, commits=1).order().members == (0, 2)
    assert talk.met().told(PrepareStop).keys() == {0, 2}
    at_boundary(talk, 0, 2)
    assert talk.end().code == TOO_FEW


def test_all_are_told_and_do_not_stop_in_time() -> None:
    talk = founded(2)
    talk.noticed(0, 1, seconds=20.0)
    talk.wait(10)
    talk.boundary(m0=4)
    assert talk.wait(10).killed() == [0, 1]
    talk.gone(0)
    assert (talk.gone(1).end().code, talk.end().reason) == (TOO_FEW, "all ranks were told to leave: hvdrun --leave")


def test_all_are_told_and_others_take_over() -> None:
    talk = founded(1, slots={"a": 1})
    talk.noticed(0)
    assert talk.hosts(a=1, b=1).started() == [(1, "b", 0)] and talk.ready(1).told(PrepareStop).keys() == {0}
    at_boundary(talk, 0)
    assert WorldBegun(2, (0, 1)) in talk.commands, "it stays until the other one has the state"
    assert talk.met().told(PrepareStop).keys() == {0, 1}
    at_boundary(talk, 0, 1)
    assert WorldBegun(3, (1,)) in talk.commands and talk.dismissed() == [0]


def test_a_notice_is_void_when_training_has_finished() -> None:
    talk = founded(2)
    talk.noticed(0, 1)
    talk.finished(0, 1)
    assert talk.wait(1000).killed() == []
    talk.gone(0, 0)
    assert talk.gone(1, 0).end().code == 0


def test_the_reset_limit_keeps_a_member_until_its_time_is_over() -> None:
    talk = founded(2, reset_limit=0)
    assert talk.noticed(1).notes[-1] == "the limit of 0 resets has been reached; left out: the removal of rank 1 on a"
    assert talk.wait(30).killed() == [1]


def test_the_last_boundary_needs_no_other_world() -> None:
    talk = founded(2, reset_limit=0)
    talk.noticed(0, 1, seconds=20.0)
    assert talk.wait(10).told(PrepareStop).keys() == {0, 1}
    assert at_boundary(talk, 0, 1).end().code == TOO_FEW
