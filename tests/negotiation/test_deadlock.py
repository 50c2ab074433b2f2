"""Ranks that wait for each other in a circle: who is stuck, who is deferred, what is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies

from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Blocked, CallWait, GroupCalls, Request, RoundDone, Wait
from hvdlite.negotiation.stalls import stuck_ranks
from tests.negotiation.simulation import Simulation


def tensor(name: str, label: str = "", round_id: int = 0) -> Request:
    return Request(name, Collective.ALLREDUCE, "float32", (4,), op=ReduceOp.SUM, label=label, round_id=round_id)


def waits_for(name: str, round_id: int = 0, *, deferrable: bool = False, all_threads: bool = True) -> Blocked:
    return Blocked((Wait(0, name, round_id, deferrable),), all_threads)


def finish_round(sim: Simulation, rank: int, label: str, round_id: int = 1) -> None:
    sim.controllers[rank].enqueue(tensor(f"{label}.a", label, round_id))
    sim.controllers[rank].round_done(RoundDone(label, round_id))


def call(sim: Simulation, rank: int, name: str) -> None:
    sim.controllers[rank].enqueue(tensor(name))


def block(sim: Simulation, rank: int, blocked: Blocked) -> None:
    sim.controllers[rank].block(blocked)


def world(hosts: Sequence[Sequence[int]] = (), size: int = 2) -> tuple[Simulation, list[tuple[int, ...]]]:
    """Return a simulation, and the deferrals that its decisions order."""
    sim = Simulation(size, hosts=hosts)
    deferred: list[tuple[int, ...]] = []
    decide = sim.coordinator.decide

    def spy() -> object:
        decision = decide()
        if decision is not None and decision.deferred:
            deferred.append(decision.deferred)
        return decision
    sim.coordinator.decide = spy  # type: ignore[method-assign,assignment]
    return sim, deferred


HOSTS = pytest.mark.parametrize("hosts", [(), ([0], [1]), ([0, 1],)], ids=["flat", "two hosts", "one leader"])


@HOSTS
def test_ranks_that_wait_for_each_others_sets_are_deferred(hosts: Sequence[Sequence[int]]) -> None:
    sim, deferred = world(hosts)
    for rank, label in enumerate("AB"):
        finish_round(sim, rank, label)
        block(sim, rank, waits_for(label, 1, deferrable=True))
    sim.settle()
    assert sorted(rank for ranks in deferred for rank in ranks) == [0, 1]
    for rank, label in enumerate("BA"):  # they go on, and each finishes the other's
        finish_round(sim, rank, label)
    sim.settle()
    assert not any(controller.unanswered() for controller in sim.controllers) and not sim.coordinator.blocked.deadlock()[0]


@HOSTS
def test_a_collective_before_the_step_defers_the_rank_in_backward_only(hosts: Sequence[Sequence[int]]) -> None:
    sim, deferred = world(hosts)
    finish_round(sim, 0, "A")
    block(sim, 0, waits_for("A", 1, deferrable=True))
    sim.settle()
    assert not deferred  # rank 1 may still be computing
    call(sim, 1, "loss")
    block(sim, 1, waits_for("loss"))
    sim.settle()
    assert deferred == [(0,)]
    call(sim, 0, "loss")
    finish_round(sim, 1, "A")
    sim.settle()
    assert not any(controller.unanswered() for controller in sim.controllers)


# docs/protocol.md#circular-waits
def test_a_circle_of_waits_that_cannot_be_deferred_is_told_with_both_sides() -> None:
    sim, deferred = world()
    finish_round(sim, 0, "A")
    block(sim, 0, waits_for("A", 1))
    call(sim, 1, "loss")
    block(sim, 1, waits_for("loss"))
    sim.settle()
    stuck, text = sim.coordinator.blocked.deadlock()
    assert stuck == {0, 1} and not deferred
    assert "rank 0 waits for the gradients of 'A' (round 1), which rank 1 has not enqueued" in text
    assert "rank 1 waits for 'loss', which rank 0 has not enqueued" in text
    assert "synchronize()" in text


def test_a_circle_of_keras_tells_what_a_user_of_keras_calls() -> None:
    sim, _ = world()
    call(sim, 0, "keras.digest")
    block(sim, 0, waits_for("keras.digest"))
    finish_round(sim, 1, "A")
    block(sim, 1, waits_for("A", 1))
    sim.settle()
    text = sim.coordinator.blocked.deadlock()[1]
    assert "predict" in text and "callbacks" in text and "synchronize()" not in text


def test_nobody_is_stuck_behind_a_rank_that_has_another_thread() -> None:
    sim, _ = world()
    for rank, name in enumerate("xy"):
        call(sim, rank, name)
        block(sim, rank, waits_for(name, all_threads=rank == 0))
    sim.settle()
    assert not sim.coordinator.blocked.deadlock()[0]


def test_an_answered_wait_and_an_interrupted_one_are_void() -> None:
    sim, _ = world()
    call(sim, 0, "x")
    block(sim, 0, waits_for("x"))
    sim.settle()
    call(sim, 1, "x")
    sim.settle()
    call(sim, 0, "x")  # again, without waiting for it this time
    call(sim, 1, "y")
    block(sim, 1, waits_for("y"))
    sim.settle()
    assert not sim.coordinator.blocked.deadlock()[0]
    block(sim, 0, waits_for("x"))
    sim.settle()
    assert sim.coordinator.blocked.deadlock()[0] == {0, 1}
    block(sim, 0, Blocked(()))
    sim.settle()
    assert not sim.coordinator.blocked.deadlock()[0] and sim.coordinator.blocked


def test_a_rank_that_has_joined_is_not_waited_for() -> None:
    sim, deferred = world()
    sim.controllers[1].enqueue(Request("join", Collective.JOIN, "uint8", (0,)))
    block(sim, 1, waits_for("join"))
    finish_round(sim, 0, "A")
    block(sim, 0, waits_for("A", 1, deferrable=True))
    sim.settle()
    assert not deferred and not sim.coordinator.blocked.deadlock()[0]


def at(group: str, begun: int, *missing: int) -> GroupCalls:
    """Return how far a rank is in a group; with `missing` it waits for these ranks to make the call that it has begun."""
    waits = (CallWait(f"{group}, call {begun}: barrier()", begun, (0, 1, 2), missing, 4.0),) if missing else ()
    return GroupCalls(group, begun, waits)


def wait_in(*groups: GroupCalls, all_threads: bool = True) -> Blocked:
    return Blocked((), all_threads, groups)


@HOSTS
def test_ranks_that_wait_in_a_circle_of_groups_are_told_with_all_sides(hosts: Sequence[Sequence[int]]) -> None:
    sim, _ = world(hosts)
    block(sim, 0, wait_in(at("a", 3, 1), at("b", 4)))
    sim.settle()
    assert not sim.coordinator.blocked.deadlock()[0], "rank 1 may still come"
    block(sim, 1, wait_in(at("a", 2), at("b", 5, 0)))
    sim.settle()
    stuck, said = sim.coordinator.blocked.deadlock()
    assert stuck == {0, 1}
    assert ("rank 0 waits for 'a, call 3: barrier()', which rank 1 has not enqueued\n"
            "  rank 1 waits for 'b, call 5: barrier()', which rank 0 has not enqueued") in said
    assert "synchronize()" not in said, "there are no gradients"
    block(sim, 0, wait_in(at("a", 3), at("b", 4)))
    sim.settle()
    assert not sim.coordinator.blocked.deadlock(certain=False)[0], "rank 0 goes on"


def test_a_circle_of_a_group_and_a_negotiated_collective() -> None:
    sim, _ = world()
    block(sim, 0, wait_in(at("a", 3, 1)))
    call(sim, 1, "loss")
    block(sim, 1, Blocked((Wait(0, "loss"),), True, (at("a", 2),)))
    sim.settle()
    assert sim.coordinator.blocked.deadlock()[0] == {0, 1}


@pytest.mark.parametrize("second", [
    wait_in(at("a", 3), at("b", 5, 0)), wait_in(at("a", 2), at("b", 5, 0), all_threads=False), wait_in(at("b", 5, 0))],
    ids=["it has made the call", "it has another thread", "it has left the group"])
def test_no_circle_where_a_rank_need_not_be_waited_for(second: Blocked) -> None:
    """Rank 0 does not know yet that rank 1 has made the call; rank 1 does."""
    sim, _ = world()
    block(sim, 0, wait_in(at("a", 3, 1), at("b", 4)))
    block(sim, 1, second)
    sim.settle()
    assert not sim.coordinator.blocked.deadlock()[0] and not sim.coordinator.blocked.deadlock(certain=False)[0]


def test_no_circle_where_another_thread_may_make_the_call_of_a_group() -> None:
    """Although the rank itself waits for a negotiated collective, and such a circle would be an error in the end."""
    sim, _ = world()
    call(sim, 0, "loss")
    block(sim, 0, Blocked((Wait(0, "loss"),), False, (at("a", 2),)))
    block(sim, 1, wait_in(at("a", 3, 0)))
    sim.settle()
    assert not sim.coordinator.blocked.deadlock(certain=False)[0]


@given(strategies.dictionaries(strategies.integers(0, 5), strategies.lists(
    strategies.frozensets(strategies.integers(0, 5), max_size=4), min_size=1, max_size=3)))
def test_stuck_are_those_that_no_order_of_answers_frees(needs: dict[int, list[frozenset[int]]]) -> None:
    stuck = stuck_ranks(needs)
    assert stuck <= needs.keys()
    assert all(any(rank in stuck for rank in wait) for each in stuck for wait in needs[each])
    able = set(range(6)) - needs.keys()
    while more := {rank for rank, waits in needs.items() if rank not in able and any(wait <= able for wait in waits)}:
        able |= more
    assert stuck == set(range(6)) - able
