"""A world of an elastic job begins with the layouts of the one before: from the first round on, if they fit on all ranks."""

from __future__ import annotations

import random

from hypothesis import given, settings, strategies

from hvdlite.negotiation.layouts import BucketSizes
from hvdlite.negotiation.messages import Layout
from tests.negotiation.reducers import LABEL, Reducer, Round, check, run, steady
from tests.negotiation.simulation import Simulation
from tests.negotiation.stories import stories

MEMBERS = {"a": 8, "b": 50, "c": 8, "rows": 8}


def learned(size: int, members: dict[str, int], sparse: frozenset[str] = frozenset()) -> Layout:
    """Return the last layout that so many ranks learn from equal rounds."""
    simulation = Simulation(size)
    rounds = [Round(members, sparse=sparse)] * 4
    run(simulation, [Reducer(simulation, rank, rounds, random.Random(rank)) for rank in range(size)], [])
    return [instruction for instruction in simulation.plans[0] if isinstance(instruction, Layout)][-1]


def carried(simulation: Simulation, reducers: list[Reducer], layout: Layout) -> None:
    """Let a world begin with a layout: all ranks have it before their first round."""
    simulation.coordinator.carry_over({LABEL: layout})
    simulation.settle(reducers)


@given(stories(joins=False), strategies.integers(1, 4),
       strategies.sampled_from([{}, {"t0": 41}, {"new": 3}, {"t0": 41, "new": 3}]))
@settings(deadline=None, max_examples=100)
# docs/protocol.md#carried-layouts
def test_every_member_is_answered_once_and_alike(story: tuple[Simulation, list[Reducer], list[int]], size_before: int,
                                                 change: dict[str, int]) -> None:
    simulation, reducers, schedule = story
    carried(simulation, reducers, learned(size_before, {**reducers[0].epochs[0][0].members, **change}))
    run(simulation, reducers, schedule)
    check(simulation, reducers)


# docs/protocol.md#carried-layouts
def test_buckets_are_used_from_the_first_round_on_by_more_or_fewer_ranks() -> None:
    for before, after in [(2, 3), (3, 2), (2, 2)]:
        layout = learned(before, MEMBERS, frozenset({"rows"}))
        assert layout.unbucketed == ("rows",)
        simulation = Simulation(after)
        reducers = [Reducer(simulation, rank, [Round(MEMBERS, sparse=frozenset({"rows"}))] * 3, random.Random(rank))
                    for rank in range(after)]
        carried(simulation, reducers, layout)
        run(simulation, reducers, [])
        check(simulation, reducers)
        assert all(reducer.by_bucket == {1, 2, 3} for reducer in reducers)
        (new,) = [instruction for instruction in simulation.plans[0] if isinstance(instruction, Layout)]
        assert [[member.name for member in bucket.members] for bucket in new.buckets] == [
            [member.name for member in bucket.members] for bucket in layout.buckets]
        assert all(bucket.response.contributors == tuple(range(after)) for bucket in new.buckets)


def test_a_rank_with_another_set_lets_the_layout_be_learned_again() -> None:
    simulation = Simulation(2)
    changed = {**MEMBERS, "a": 9}
    reducers = [Reducer(simulation, rank, [Round(changed)] * 5, random.Random(rank)) for rank in range(2)]
    carried(simulation, reducers, learned(2, MEMBERS))
    run(simulation, reducers, [])
    check(simulation, reducers)
    assert {4, 5} <= reducers[0].by_bucket


def test_tuned_sizes_do_not_end_what_is_carried_over() -> None:
    simulation, _ = steady(2, MEMBERS, 0)
    simulation.coordinator.tune({"bucket_size": 128}, 0.0)
    simulation.coordinator.carry_over({LABEL: learned(2, MEMBERS)})
    decision = simulation.coordinator.decide()
    assert decision is not None and decision.sequence == 1
    assert decision.tuned == (("bucket_size", 128),) and len(decision.learned) == 1 and not decision.evicted
    assert simulation.coordinator.tuned == {"bucket_size": 128}
    off = Simulation(2, sizes=BucketSizes(16, 0))
    off.coordinator.carry_over({LABEL: learned(2, MEMBERS)})
    assert off.coordinator.decide() is None, "learning is turned off"
