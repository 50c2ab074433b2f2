"""Learned buckets without memory: gradient sets that change, lack members and go stale, in any interleaving."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies

from hvdlite.core.config import Config
from hvdlite.core.types import Collective
from hvdlite.negotiation.controller import EvictLayout, SplitBucket
from hvdlite.negotiation.gradient_sets import GradientSetTable
from hvdlite.negotiation.layouts import BucketSizes, cut, plan_buckets
from hvdlite.negotiation.messages import (
    ErrorKind,
    Layout,
    Request,
    Response,
    Retired,
    RoundDone,
)
from hvdlite.negotiation.readiness import Aggregator
from hvdlite.runtime.assemble import bucket_sizes
from tests.negotiation.reducers import LABEL, Reducer, Round, check, run, steady
from tests.negotiation.simulation import Simulation
from tests.negotiation.stories import led, stories


@given(stories(joins=False))
@settings(deadline=None, max_examples=400)
# docs/protocol.md#rounds
def test_every_member_of_every_round_is_answered_once_and_alike(story: tuple[Simulation, list[Reducer], list[int]]) -> None:
    simulation, reducers, schedule = story
    run(simulation, reducers, schedule)
    check(simulation, reducers)


# docs/protocol.md#learning
def test_a_set_is_learned_from_its_first_complete_round() -> None:
    simulation, reducers = steady(3, {"a": 8, "b": 50, "c": 8, "d": 8}, 5)
    (layout,) = [instruction for instruction in simulation.plans[0] if isinstance(instruction, Layout)]
    assert layout.first_round == 3
    assert all(reducer.by_bucket == {3, 4, 5} for reducer in reducers)
    for bucket in layout.buckets:
        assert all(offset % 64 == 0 for offset in bucket.offsets)
        ends = [offset + member.shape[0] for offset, member in zip(bucket.offsets, bucket.members, strict=True)]
        assert all(end <= begin for end, begin in zip(ends, (*bucket.offsets[1:], bucket.elements), strict=True))


# docs/protocol.md#mailboxes
def test_a_bucket_that_ranks_block_in_goes_through_a_mailbox_until_a_rank_lacks_a_member() -> None:
    simulation = Simulation(3, mailboxes=True)
    members = {"a": 4, "b": 4, "c": 4}
    brought = [[Round(members, frozenset(["c"]) if number == 20 and rank == 1 else frozenset()) for number in range(40)]
               for rank in range(3)]
    reducers = [Reducer(simulation, rank, brought[rank], random.Random(7)) for rank in range(3)]
    for reducer in reducers:
        reducer.impatience = 0.01
    run(simulation, reducers, [])
    check(simulation, reducers)
    assert all(len(reducer.exchanged) >= 10 and 21 not in reducer.exchanged for reducer in reducers)


def test_a_layout_that_was_in_use_in_a_mailbox_does_not_count_as_one_that_went_stale() -> None:
    table = GradientSetTable(Aggregator((0, 1), 2), BucketSizes(16, 64), 64)
    state = table._set(RoundDone(LABEL, 1))
    state.evictions, state.backoff_rounds = 5, 16
    table.note_rounds(LABEL, 63)
    assert state.backoff_rounds == 16
    table.note_rounds(LABEL, 1)
    assert (state.evictions, state.backoff_rounds) == (0, 1)


def test_a_set_that_keeps_changing_is_learned_ever_more_rarely() -> None:
    simulation = Simulation(2)
    rounds = [Round({"a": 10 + number // 4}) for number in range(80)]
    reducers = [Reducer(simulation, rank, rounds, random.Random(rank)) for rank in range(2)]
    run(simulation, reducers, [])
    learned = [instruction for instruction in simulation.plans[0] if isinstance(instruction, Layout)]
    assert 2 <= len(learned) <= 8


@pytest.mark.parametrize("hosts", [[], [(0, 1)]])
def test_a_member_that_was_sparse_once_does_not_evict_the_others(hosts: list[tuple[int, ...]]) -> None:
    """It goes by itself from then on, also when it is dense, or missing on some rank or on all."""
    simulation = Simulation(2, hosts=hosts)
    members = {"a": 10, "b": 20, "rows": 30}
    kinds = [Round(members, sparse=frozenset(["rows"])), Round(members), Round(members, missing=frozenset(["rows"]))]
    story = [(0, 0), (0, 0), (0, 2), (2, 0), (1, 1), (1, 2), (2, 2)]
    reducers = [Reducer(simulation, rank, [kinds[story[number % len(story)][rank]] for number in range(100)],
                        random.Random(rank)) for rank in range(2)]
    run(simulation, reducers, [])
    check(simulation, reducers)
    assert all(len(reducer.by_bucket) == 98 for reducer in reducers)


def test_a_member_that_becomes_sparse_costs_one_relearning() -> None:
    simulation = Simulation(2)
    members = {"a": 10, "b": 20, "rows": 30}
    story = [Round(members)] * 50 + [Round(members, sparse=frozenset(["rows"]))] * 50
    reducers = [Reducer(simulation, rank, story, random.Random(rank)) for rank in range(2)]
    run(simulation, reducers, [])
    check(simulation, reducers)
    assert all(len(reducer.by_bucket) >= 96 for reducer in reducers), reducers[0].by_bucket


def test_nothing_is_learned_from_a_round_that_partly_went_by_bucket() -> None:
    simulation, reducers = steady(2, dict.fromkeys("abcd", 16), 3, sizes=BucketSizes(16, 16))
    for reducer in reducers:
        reducer.epochs, reducer.rng = [[Round(dict.fromkeys("abcd", 16))] * 4], random.Random(0)  # the same order
        while len(reducer.to_give or "abcd") > 2:
            reducer.act()
    simulation.settle(reducers)
    assert all(len(reducer.waiting) == 2 for reducer in reducers), "half of the round is reduced"
    simulation.coordinator.tune({"bucket_size": 32}, 0.0)
    run(simulation, reducers, [])
    assert all(reducer.by_bucket == {3, 4, 7} for reducer in reducers)  # learned from round 5
    assert [len(told.buckets) for told in simulation.plans[0] if isinstance(told, Layout)] == [4, 3]


def test_a_layout_that_was_in_use_for_long_does_not_count_when_it_ends() -> None:
    simulation = Simulation(2)
    story = [Round({"a": 10 + number // 100}) for number in range(1000)]
    reducers = [Reducer(simulation, rank, story, random.Random(rank)) for rank in range(2)]
    run(simulation, reducers, [])
    assert all(len(reducer.by_bucket) >= 970 for reducer in reducers)


# docs/protocol.md#layouts
def test_too_many_layouts_evict_the_least_recently_used() -> None:
    simulation = Simulation(1, layouts=2)
    controller = simulation.controllers[0]
    layouts: dict[str, Layout] = {}
    for number in range(1, 4):
        for label in ("x", "y", "z"):
            controller.enqueue(Request(label, Collective.ALLREDUCE, "uint8", (4,), label=label, round_id=number))
            controller.round_done(RoundDone(label, number))
            simulation.settle()
            for instruction in simulation.plans[0]:
                if isinstance(instruction, Layout):
                    layouts[instruction.label] = instruction
                elif isinstance(instruction, EvictLayout):
                    layouts.pop(instruction.layout.label, None)
            simulation.plans[0].clear()
            assert len(layouts) <= 2
    assert len(layouts) == 2


def test_layouts_differing_between_ranks_fall_back_to_row_major() -> None:
    for strides, wanted in ((((1, 4), (1, 4)), (1, 4)), (((1, 4), ()), ())):
        simulation = Simulation(2)
        for rank in range(2):
            simulation.controllers[rank].enqueue(Request("x", Collective.ALLREDUCE, "uint8", (4, 2), label=LABEL, round_id=1,
                                                        strides=strides[rank]))
            simulation.controllers[rank].round_done(RoundDone(LABEL, 1))
        simulation.settle()
        (layout,) = [instruction for instruction in simulation.plans[1] if isinstance(instruction, Layout)]
        assert layout.buckets[0].members[0].strides == wanted


def test_learning_can_be_turned_off() -> None:
    simulation, _ = steady(2, {"a": 8}, 4, sizes=BucketSizes(16, 0))
    assert not any(isinstance(instruction, (Layout, SplitBucket)) for instruction in simulation.plans[0])


@pytest.mark.parametrize(("sizes", "ends"), [
    ([], []),
    ([1, 1], [2]),
    ([10, 10], [1, 2]),
    ([2, 2, 30, 30, 100, 30, 2, 2], [2, 4, 5, 6, 8]),
    ([50, 1], [1, 2]),
    ([4, 50], [1, 2]),
])
def test_buckets_are_small_at_both_ends(sizes: list[int], ends: list[int]) -> None:
    assert cut(sizes, BucketSizes(edge=4, middle=60)) == ends


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_set_on_the_host_may_be_one_bucket_of_any_size(device: str) -> None:
    members = [{0: Request(f"g{index}", Collective.ALLREDUCE, dtype, (100,), label=LABEL, device=device)}
               for dtype in ("float32", "float16") for index in range(4)]
    buckets = plan_buckets(members, (0,), BucketSizes(400, 400, has_one_on_host=True), 1)
    assert [len(bucket.members) for bucket in buckets] == ([4, 4] if device == "cpu" else [1, 1, 1, 1, 2, 2])


@pytest.mark.parametrize(("changed", "ranks", "limit", "is_one"), [
    ({}, 4, 1, True), ({}, 5, 1, True), ({}, 3, 1, False), ({}, 4, 0, False), ({"bucket_edge": 100}, 4, 1, False),
    ({"bucket_size": 100}, 4, 1, False), ({"autotune": True}, 4, 1, False)])
def test_a_set_is_one_bucket_where_ranks_leave_no_core_free(changed: dict[str, int], ranks: int, limit: int, is_one: bool,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert bucket_sizes(Config(**changed), ranks, limit).has_one_on_host is is_one  # type: ignore[arg-type]


@given(stories(joins=False), strategies.integers(0, 1 << 30))
@settings(deadline=None, max_examples=150)
def test_a_set_that_ranks_drop_at_different_times_is_forgotten(story: tuple[Simulation, list[Reducer], list[int]],
                                                               seed: int) -> None:
    """Every rank drops it as soon as its own rounds are over, while others may still be in their last one."""
    simulation, reducers, _ = story
    size, rng = simulation.size, random.Random(seed)
    dropped: set[int] = set()
    for _ in range(20_000):
        if len(dropped) == size:
            break
        rank = rng.randrange(size)
        if rank not in dropped:
            reducers[rank].act()
            if reducers[rank].over and rng.random() < 0.5:
                dropped.add(rank)
                simulation.controllers[rank].retire(Retired(LABEL))
        if rng.random() < 0.7:
            simulation.say(rank)
        simulation.hear(rank)
        simulation.decide()
        for instruction in simulation.apply(rank):
            reducers[rank].follow(instruction)
    assert len(dropped) == size, "somebody waits for ever"
    for rank in [*range(size)] * 6:  # a mailbox ends in two decisions
        simulation.say(rank)
        simulation.decide()
        for each in range(size):
            simulation.hear(each)
            for instruction in simulation.apply(each):
                reducers[each].follow(instruction)
    simulation.settle()
    assert simulation.failures == [None] * size
    assert not simulation.coordinator.negotiator.gradient_sets.labels and not simulation.coordinator.is_anything_pending
    for plan in simulation.plans:
        learned = [instruction.layout_id for instruction in plan if isinstance(instruction, Layout)]
        assert [instruction.layout.layout_id for instruction in plan if isinstance(instruction, EvictLayout)] == learned


@pytest.mark.parametrize("hosts", [[], [(0, 1)]])
def test_a_layout_ends_with_the_first_rank_that_drops_its_set(hosts: list[tuple[int, ...]]) -> None:
    simulation, _ = steady(2, {"a": 8, "b": 8}, 4, hosts=hosts)
    simulation.controllers[1].retire(Retired(LABEL))
    simulation.settle()
    assert [isinstance(plan[-1], EvictLayout) for plan in simulation.plans] == [True, True]
    assert simulation.coordinator.negotiator.gradient_sets.labels == {LABEL}, "rank 0 may still report something of it"
    simulation.controllers[0].retire(Retired(LABEL))
    simulation.settle()
    assert not simulation.coordinator.negotiator.gradient_sets.labels


def test_what_waits_in_a_set_that_all_ranks_have_dropped_is_answered() -> None:
    """A rank drops it in the middle of a round in which the other did nothing."""
    simulation = Simulation(2)
    simulation.controllers[1].enqueue(Request("a", Collective.ALLREDUCE, "uint8", (4,), label=LABEL, round_id=1))
    for controller in simulation.controllers:
        controller.retire(Retired(LABEL))
    simulation.settle()
    assert [response.error for response in simulation.plans[1] if isinstance(response, Response)] == [ErrorKind.MISMATCH]
    assert not simulation.coordinator.is_anything_pending and not simulation.coordinator.negotiator.gradient_sets.labels


def test_a_set_of_a_process_set_that_is_gone_may_be_dropped() -> None:
    simulation = Simulation(2, hosts=[(0, 1)])
    for controller in simulation.controllers:
        controller.enqueue(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=(0, 1)))
        controller.enqueue(Request("remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(1,)))
    simulation.settle()
    for controller in simulation.controllers:
        controller.retire(Retired(LABEL, 1))
    simulation.settle()
    assert simulation.failures == [None, None] and not simulation.coordinator.negotiator.gradient_sets.labels


@given(strategies.integers(2, 4), strategies.integers(0, 1 << 30), strategies.sampled_from([0, 1, 2]), strategies.booleans())
@settings(deadline=None, max_examples=150)
def test_a_set_may_be_dropped_in_the_middle_of_a_round(size: int, seed: int, per_host: int, first_too: bool) -> None:
    """What a rank said before may come through its leader after all ranks have dropped it."""
    rng = random.Random(seed)
    simulation = Simulation(size, hosts=led(size, per_host, first_too))
    reducers = [Reducer(simulation, rank, [Round({"a": 10, "b": 20, "c": 30})] * 8, rng) for rank in range(size)]
    ends = [rng.randrange(60 * size) for _ in range(size)]
    for turn in range(80 * size):
        rank = rng.randrange(size)
        if turn < ends[rank]:
            reducers[rank].act()
        elif ends[rank] >= 0:
            ends[rank] = -1
            simulation.controllers[rank].retire(Retired(LABEL))
        if rng.random() < 0.7:
            simulation.say(rank)
        simulation.hear(rank)
        simulation.decide()
        for instruction in simulation.apply(rank):
            reducers[rank].follow(instruction)
    for rank, end in enumerate(ends):
        if end >= 0:
            simulation.controllers[rank].retire(Retired(LABEL))
    simulation.settle()
    assert simulation.failures == [None] * size
    for plan in simulation.plans:
        learned = [instruction.layout_id for instruction in plan if isinstance(instruction, Layout)]
        assert [instruction.layout.layout_id for instruction in plan if isinstance(instruction, EvictLayout)] == learned
    assert not any(controller.unanswered() for controller in simulation.controllers), "somebody waits for ever"
    assert not simulation.coordinator.is_anything_pending and not simulation.coordinator.negotiator.gradient_sets.labels
