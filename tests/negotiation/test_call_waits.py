"""Stalls of ordered groups, from what the ranks that wait tell."""

from __future__ import annotations

from hvdlite.negotiation.call_waits import CallWaits
from hvdlite.negotiation.messages import CallWait, GroupCalls


def waits(*names: str, missing: tuple[int, ...] = (2,), ranks: tuple[int, ...] = (0, 1, 2), group: str = "id",
          seconds: float = 4.0) -> list[GroupCalls]:
    return [GroupCalls(group, 7, tuple(CallWait(name, 7, ranks, missing, seconds) for name in names))]


def test_a_stall_is_what_the_ranks_that_wait_agree_on() -> None:
    table = CallWaits()
    assert not table and table.pending(0.0) == []
    table.update(0, waits("x", missing=(1, 2)), 10.0)
    table.update(1, waits("x", missing=(2,), seconds=5.0), 10.5)
    (stall,) = table.pending(20.0)
    assert str(stall) == "'x' has waited 14 s: enqueued by ranks [0, 1], not yet by ranks [2]"
    table.update(1, waits("x", missing=(0,)), 11.0)
    assert table.pending(20.0) == [], "each waits for what it did not know of the other"


def test_each_stall_is_new_once() -> None:
    table = CallWaits()
    table.update(0, waits("x"), 10.0)
    assert table.new_stalls(10.0, after=60.0) == []
    assert [stall.name for stall in table.new_stalls(70.0, after=60.0)] == ["x"]
    table.update(0, waits("x", "y", seconds=64.0), 70.0)
    assert [stall.name for stall in table.new_stalls(71.0, after=60.0)] == ["y"]
    table.update(0, [GroupCalls("id", 8)], 72.0)
    assert not table
    table.update(0, waits("x"), 80.0)
    assert [stall.name for stall in table.new_stalls(170.0, after=60.0)] == ["x"], "it is another wait"


def test_calls_of_different_groups_may_have_the_same_name() -> None:
    table = CallWaits()
    table.update(0, waits("x", ranks=(0, 2)), 1.0)
    table.update(1, waits("x", ranks=(1, 3), missing=(3,), group="other"), 1.0)
    assert [(stall.enqueued, stall.missing) for stall in table.pending(9.0)] == [((0,), (2,)), ((1,), (3,))]
