"""Ranks that join, leave, or remove a process set, at any time; rounds that are finished twice."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdlite.core.types import Collective
from hvdlite.negotiation.layouts import first_round
from hvdlite.negotiation.messages import BucketReady, ErrorKind, Layout, Request, Response, RoundDone
from tests.negotiation.reducers import LABEL, Reducer, Round, check, run, steady
from tests.negotiation.simulation import Simulation
from tests.negotiation.stories import led, stories


@given(stories(joins=True))
@settings(deadline=None, max_examples=300)
def test_ranks_with_fewer_rounds_join_and_the_others_go_on(story: tuple[Simulation, list[Reducer], list[int]]) -> None:
    simulation, reducers, schedule = story
    run(simulation, reducers, schedule)
    check(simulation, reducers)
    joins = [[told.rows for told in plan if isinstance(told, Response) and told.collective is Collective.JOIN]
             for plan in simulation.plans]
    assert all(told == joins[0] for told in joins), "ranks disagree about who joined last"


@given(st.integers(2, 4), st.integers(0, 3), st.integers(0, 200), st.integers(0, 1 << 30), st.sampled_from([0, 2]),
       st.booleans())
@example(3, 1, 23, 14303, 0, False)  # the join fails between two members of a round
@settings(deadline=None, max_examples=150)
def test_a_rank_that_leaves_at_any_time_ends_all_waiting(size: int, leaver: int, steps: int, seed: int, per_host: int,
                                                         first_too: bool) -> None:
    leaver %= size
    rng = random.Random(seed)
    simulation = Simulation(size, hosts=led(size, per_host, first_too))
    rounds = [Round({"a": 10, "b": 20, "c": 30})] * 6
    reducers = [Reducer(simulation, rank, list(rounds), rng) for rank in range(size)]
    joins_before = rng.choice([0, 0, 1, 10, 40])  # turns that it has joined when it leaves, wherever in a round it is
    for turn in range(2000):
        rank = rng.randrange(size)
        if joins_before and turn == steps:
            simulation.controllers[leaver].enqueue(Request("join", Collective.JOIN, "uint8", (0,)))
        if turn == steps + joins_before:
            simulation.controllers[leaver].leave()
        if not (rank == leaver and turn >= steps):
            reducers[rank].act()
        simulation.say(rank)
        simulation.hear(rank)
        simulation.decide()
        for instruction in simulation.apply(rank):
            if rank != leaver or turn < steps:
                reducers[rank].follow(instruction)
    assert simulation.failures == [None] * size
    assert all(reducer.over for rank, reducer in enumerate(reducers) if rank != leaver), "somebody waits for ever"


@pytest.mark.parametrize("hosts", [[], [(0, 1)], [(0, 1, 2)]])
def test_ranks_take_part_again_when_their_join_fails(hosts: list[tuple[int, ...]]) -> None:
    simulation = Simulation(3, hosts=hosts)
    for controller in simulation.controllers:
        controller.enqueue(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=(0, 1)))
    simulation.settle()
    x = Request("x", Collective.ALLREDUCE, "uint8", (4,), process_set_id=1)
    simulation.controllers[1].enqueue(x)
    simulation.settle()
    simulation.controllers[0].enqueue(Request("join", Collective.JOIN, "uint8", (0,)))
    simulation.settle()
    assert simulation.plans[1].pop().contributors == (1,)  # type: ignore[union-attr]
    simulation.controllers[1].enqueue(msgspec.structs.replace(x, name="y"))
    simulation.controllers[2].leave()
    simulation.settle()
    assert [told.error for told in simulation.plans[0][-1:]] == [ErrorKind.LEFT]  # type: ignore[union-attr]
    for rank in (1, 0):
        simulation.controllers[rank].enqueue(x)
        simulation.settle()
    assert [plan[-1].contributors for plan in simulation.plans[:2]] == [(0, 1)] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize("hosts", [[], [(0, 1, 2)], [(1, 2)]])
def test_a_member_that_one_rank_has_is_refused_while_another_has_joined(hosts: list[tuple[int, ...]]) -> None:
    simulation = Simulation(3, hosts=hosts)
    simulation.controllers[1].enqueue(Request("join", Collective.JOIN, "uint8", (0,)))
    for rank, name in ((0, "a"), (2, "b")):
        simulation.controllers[rank].enqueue(Request(name, Collective.ALLREDUCE, "uint8", (4,), label=LABEL, round_id=1))
        simulation.controllers[rank].round_done(RoundDone(LABEL, 1))
    simulation.settle()
    for rank in (0, 2):
        (told,) = simulation.plans[rank]
        assert isinstance(told, Response) and told.error is ErrorKind.MISMATCH
        assert "rank 1" not in told.error_text


@pytest.mark.parametrize("heard", [False, True])
@pytest.mark.parametrize("hosts", [[], [(0, 1)], [(0,), (1,)]])
# docs/protocol.md#join
def test_a_bucket_of_a_round_from_before_a_join_is_refused(hosts: list[tuple[int, ...]], heard: bool) -> None:
    """A rank joins in the middle of a round, and reports the rest of it before or after it hears that all have joined."""
    simulation, reducers = steady(2, {"a": 10}, 2, hosts=hosts)
    (layout,) = [told for told in simulation.plans[1] if isinstance(told, Layout)]
    (bucket,) = layout.buckets
    for reducer in reducers:
        reducer.joins, reducer.epochs = True, [[], [Round({"a": 10})] * 2]
        reducer.act()
        simulation.say(reducer.rank)
        while simulation.hear(reducer.rank):
            pass
    simulation.decide()
    if heard:
        simulation.settle(reducers)
    simulation.controllers[1].enqueue_bucket(bucket,
                                            BucketReady(bucket_id=bucket.bucket_id, round_id=3, unused=(), ends_round=True))
    simulation.settle(reducers)
    (refusal,) = [told for told in simulation.plans[1] if isinstance(told, Response) and told.error is not ErrorKind.NONE]
    assert refusal.names == ("a",) and "join()" in refusal.error_text
    run(simulation, reducers, [])
    check(simulation, reducers)
    assert all(reducer.by_bucket == {first_round(1), first_round(1) + 1} for reducer in reducers)


@pytest.mark.parametrize("hosts", [[], [(0, 1)], [(0, 1, 2)]])
def test_the_last_rank_is_one_that_has_missed_nothing(hosts: list[tuple[int, ...]]) -> None:
    """Where no rank has missed anything, it is the one of the join before."""
    simulation = Simulation(3, hosts=hosts)

    def join(*ranks: int, works_alone: int | None = None) -> int:
        for rank in ranks:
            if rank == works_alone:
                simulation.controllers[rank].enqueue(Request("x", Collective.ALLREDUCE, "uint8", (4,)))
                simulation.settle()
            simulation.controllers[rank].enqueue(Request("join", Collective.JOIN, "uint8", (0,)))
            simulation.settle()
        told = [plan[-1].rows for plan in simulation.plans]  # type: ignore[union-attr]
        assert told[0] == told[1] == told[2]
        return int(told[0][0])
    assert join(0, 1, 2) == 2
    assert join(2, 1, 0) == 2
    assert join(2, 1, 0, works_alone=0) == 0
    assert join(0, 1, 2) == 0
    for controller in simulation.controllers:
        controller.enqueue(Request("y", Collective.ALLREDUCE, "uint8", (4,)))
    simulation.settle()
    assert join(1, 0, 2) == 0


@pytest.mark.parametrize("hosts", [[], [(0, 1)], [(1, 2)]])
def test_a_layout_is_used_again_after_each_join(hosts: list[tuple[int, ...]]) -> None:
    simulation = Simulation(3, hosts=hosts)
    now = Round({"a": 10, "b": 20, "c": 30})
    counts = [20, 21, 23]
    reducers = [Reducer(simulation, rank, [now] * counts[rank], random.Random(rank), later=[[now] * counts[rank]] * 9)
                for rank in range(3)]
    run(simulation, reducers, [])
    check(simulation, reducers)
    assert sum(isinstance(told, Layout) for told in simulation.plans[0]) == 1
    for reducer in reducers:
        common = [number for number in reducer.played if number < first_round(number >> 32) + 20]
        assert len(common) == 200 and len(reducer.by_bucket.intersection(common)) == 198


@given(st.integers(2, 4), st.integers(0, 200), st.integers(0, 1 << 30), st.sampled_from([0, 1, 2]), st.booleans())
@settings(deadline=None, max_examples=150)
def test_a_process_set_that_is_removed_at_any_time_ends_all_waiting_in_it(size: int, steps: int, seed: int, per_host: int,
                                                                         first_too: bool) -> None:
    """Ranks play rounds on a set and ask for its removal, each at a time of its own, often in the middle of a round."""
    rng = random.Random(seed)
    simulation = Simulation(size, hosts=led(size, per_host, first_too))
    ranks = tuple(range(size - 1)) if rng.random() < 0.5 and size > 2 else tuple(range(size))
    for controller in simulation.controllers:
        controller.enqueue(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=ranks))
    simulation.settle()
    (number,) = {plan.pop().rows[0] for plan in simulation.plans}  # type: ignore[union-attr]
    rounds = [Round({"a": 10, "b": 20, "c": 30})] * 8
    reducers = [Reducer(simulation, rank, rounds, rng, process_set=number) for rank in ranks]
    removing = [steps + rng.randrange(30) for _ in range(size)]
    for turn in range(3000):
        rank = rng.randrange(size)
        if turn >= removing[rank]:
            removing[rank] = 1 << 30
            simulation.controllers[rank].enqueue(
                Request("remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(number,)))
        elif rank in ranks and rng.random() < 0.7 and (removing[rank] < 1 << 30 or not reducers[rank].over):
            reducers[rank].act()
        if rng.random() < 0.7:  # else more than one thing goes into a report
            simulation.say(rank)
        simulation.hear(rank)
        simulation.decide()
        for instruction in simulation.apply(rank):
            removal = isinstance(instruction, Response) and instruction.collective is Collective.REMOVE_PROCESS_SET
            if rank in ranks and not removal:
                reducers[rank].follow(instruction)
    assert simulation.failures == [None] * size
    assert all(reducer.over for reducer in reducers), "somebody waits for ever"
    assert not any(controller.unanswered() for controller in simulation.controllers)


@pytest.mark.parametrize("hosts", [[], [(0, 1)], [(0,), (1,)]])
# docs/protocol.md#report-order
def test_a_closing_and_the_removal_of_its_process_set_in_one_report(hosts: list[tuple[int, ...]]) -> None:
    simulation = Simulation(2, hosts=hosts)
    for controller in simulation.controllers:
        controller.enqueue(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=(1,)))
    simulation.settle()
    for rank, controller in enumerate(simulation.controllers):
        if rank == 1:
            controller.enqueue(Request("x", Collective.ALLREDUCE, "uint8", (4,), label=LABEL, round_id=1, process_set_id=1))
            controller.round_done(RoundDone(LABEL, 1, 1))
        controller.enqueue(Request("remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(1,)))
        if rank == 1:
            controller.round_done(RoundDone(LABEL, 2, 1))  # by a thread that did not know
    simulation.settle()
    assert simulation.failures == [None, None]
    assert [response.error for response in simulation.plans[1] if isinstance(response, Response)] == [ErrorKind.NONE] * 3


@pytest.mark.parametrize("hosts", [[], [(0, 1, 2)], [(1, 2)]])
def test_a_rank_that_finishes_a_round_twice_does_not_end_it(hosts: list[tuple[int, ...]]) -> None:
    simulation = Simulation(3, hosts=hosts)
    for rank, name in ((0, "b"), (1, "a"), (2, "a")):  # nobody else has "b": that is known when all have finished the round
        simulation.controllers[rank].enqueue(Request(name, Collective.ALLREDUCE, "uint8", (4,), label=LABEL, round_id=1))
    for rank in (0, 1, 1, 1):
        simulation.controllers[rank].round_done(RoundDone(LABEL, 1))
    simulation.settle()
    assert not any(simulation.plans), "the round is over before rank 2 has finished it"
    simulation.coordinator.order(status_requests=[1, 2])
    simulation.settle()
    assert simulation.coordinator.negotiator.reports.ranks_done_with(0, LABEL, 1) == {0, 1}
    simulation.controllers[2].round_done(RoundDone(LABEL, 1))
    simulation.settle()
    assert simulation.coordinator.negotiator.reports.ranks_done_with(0, LABEL, 1) == {0, 1, 2}
    assert [[response.error for response in plan] for plan in simulation.plans] == [[ErrorKind.MISMATCH]] * 3
