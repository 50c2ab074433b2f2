"""Stalls of groups, from what the ranks that wait tell."""

from __future__ import annotations

import pytest

from hvdlite.negotiation.messages import CallWait, GroupCalls
from hvdlite.negotiation.stalls import CallWaits, Stall, circle_of_messages


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


def message(name: str, rank: int, *peers: int) -> list[GroupCalls]:
    """Return what a rank tells that waits for a send or receive."""
    return [GroupCalls("id", 7, (CallWait(name, 0, (rank, *peers), peers, 4.0),))]


def test_a_send_or_receive_waits_for_its_counterpart() -> None:
    table = CallWaits()
    table.update(0, message("message from rank 2 to rank 0", 0, 2), 10.0)
    (stall,) = table.pending(20.0)
    assert str(stall) == "'message from rank 2 to rank 0' has waited 14 s for rank 2" and stall.enqueued == (0,)
    assert stall.fault(2) == "has not taken part in"
    table.update(2, message("message from rank 2 to rank 0", 2, 0), 10.0)
    assert not table.pending(20.0), "it is on its way"
    table.update(2, [], 10.0)
    table.update(0, message("receive on rank 0 from any rank", 0, 1, 2), 10.0)
    (stall,) = table.pending(20.0)
    assert str(stall) == "'receive on rank 0 from any rank' has waited 14 s for ranks 1, 2"


@pytest.mark.parametrize(("waits", "circle"), [
    ({0: (1,), 1: (0,)}, {0, 1}), ({0: (1,), 1: (2,), 2: (0,), 3: (0,), 4: (3,)}, {0, 1, 2}), ({0: (1,), 1: (2,)}, set()),
    ({0: (1, 2), 1: (0,)}, set()), ({}, set())],
    ids=["two", "three, and two behind them", "a chain", "one waits for any", "none"])
def test_ranks_that_wait_for_each_other_in_messages(waits: dict[int, tuple[int, ...]], circle: set[int]) -> None:
    table = CallWaits()
    for rank, peers in waits.items():
        table.update(rank, message(f"receive on rank {rank}", rank, *peers), 1.0)
    assert circle_of_messages(table.pending(9.0)) == circle


def test_collectives_are_in_no_circle_of_messages() -> None:
    """Nobody knows here whether a thread waits for them."""
    assert circle_of_messages([Stall("x", 9.0, (0,), (1,)), Stall("y", 9.0, (1,), (0,))]) == frozenset()
