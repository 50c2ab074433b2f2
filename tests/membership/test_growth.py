"""Growth: joiners come in one change, and none where others cannot reach it."""

from __future__ import annotations

import pytest

from hvdlite.membership.messages import PrepareStop
from tests.membership.talk import founded


def test_rule_7_joiners_of_one_discovery_come_in_one_change() -> None:
    talk = founded(1)
    assert talk.hosts(a=1, b=3).started() == [(1, "b", 0), (2, "b", 1), (3, "b", 2)]
    talk.wait(4)
    assert talk.ready(2).told(PrepareStop) == {} and talk.ready(3).told(PrepareStop) == {}
    assert talk.ready(1).told(PrepareStop).keys() == {0}
    talk.boundary(m0=7)
    assert talk.idle(0, at_rest=True).order().members == (0, 1, 2, 3), "in discovery's order"


@pytest.mark.parametrize(("first", "others"), [(4.0, 4.0), (0.2, 1.0), (300.0, 30.0)])
def test_rule_7_joiners_wait_for_others_as_long_again_as_the_first_needed(first: float, others: float) -> None:
    """Within a second and half a minute."""
    talk = founded(1, slots={"a": 3})
    talk.wait(first)
    assert talk.ready(2).told(PrepareStop) == {} and talk.wait(others - 0.1).told(PrepareStop) == {}
    assert talk.wait(0.1).told(PrepareStop).keys() == {0}
    talk.boundary(m0=7)
    assert talk.idle(0, at_rest=True).order().members == (0, 2), "1 still imports"
    talk.met()
    assert talk.ready(1).told(PrepareStop).keys() == {0, 2}


def test_rule_7_joiners_do_not_wait_for_one_that_is_gone() -> None:
    talk = founded(1, slots={"a": 3})
    assert talk.ready(2).told(PrepareStop) == {} and talk.gone(1).told(PrepareStop).keys() == {0}


def test_rule_17_a_host_that_others_cannot_reach_is_not_tried_again_before_discovery_has_lost_it() -> None:
    talk = founded(3, cooldown=(10.0, 600.0), slots={"a": 2, "b": 1})
    for _ in range(3):
        talk.idle(0, 1, 2)
        talk.cannot_meet(2, *([] if talk.world[0] == 0 else [1, 2]))
    talk.idle(0, 1, 2)
    assert talk.world == (0, 1) and talk.notes[-1] == "b cannot be reached from a: no more processes are started there"
    talk.gone(2, 0)
    talk.met()
    assert talk.wait(2000).started() == []
    talk.hosts(a=2)
    assert [host for _, host, _ in talk.hosts(a=2, b=1).started()] == ["b"]


def test_rule_17_nor_is_a_slot_of_the_same_host() -> None:
    talk = founded(2, cooldown=(10.0, 600.0))
    talk.idle(0, 1)
    for _ in range(2):
        talk.cannot_meet(talk.world[1])
        talk.idle(0, 1)
    assert len(talk.world) == 1
    left = ({0, 1} - set(talk.world)).pop()
    talk.gone(left, 0)
    talk.met()
    assert talk.wait(2000).started() == []
