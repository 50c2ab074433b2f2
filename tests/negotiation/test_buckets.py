"""Learned buckets without memory: declared sets that change, lack members, go stale and lose ranks, in any interleaving."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.core.types import Collective
from hvdlite.negotiation.buckets import BucketSizes, cut
from hvdlite.negotiation.controller import Assist, Evicted, Expanded, Instruction, Suspended
from hvdlite.negotiation.messages import (
    BucketReady,
    BucketRelease,
    Closing,
    ErrorKind,
    Layout,
    Request,
    Response,
    Retired,
)
from tests.negotiation.simulation import Simulation

LABEL = "set"


@dataclasses.dataclass(frozen=True)
class Round:
    """What one rank brings to one round: its members' lengths, and those without a gradient."""

    members: Mapping[str, int]
    missing: frozenset[str] = frozenset()


class Reducer:
    """One rank's half of a declared set, as `training/gradient_reducer.py` plays it, on a bare controller."""

    def __init__(self, simulation: Simulation, rank: int, rounds: list[Round], rng: random.Random,
                 process_set: int = 0) -> None:
        self.simulation, self.rank, self.rng, self.process_set = simulation, rank, rng, process_set
        self.controller = simulation.controllers[rank]
        self.rounds = rounds
        self.number = 0
        self.number_base = 0  # jumps when all ranks have joined, which may have played different numbers of rounds
        self.played_before = 0
        self.to_give: list[str] | None = None  # None: between rounds
        self.layout: Layout | None = None
        self.suspended: Layout | None = None
        self.current: Layout | None = None  # what the round goes by
        self.filled: dict[int, list[str]] = {}
        self.broken: set[int] = set()
        self.alone = False
        self.waiting: set[str] = set()
        self.answers: list[dict[str, tuple[ErrorKind, tuple[int, ...]]]] = []
        self.by_bucket = 0

    @property
    def over(self) -> bool:
        return self.number == len(self.rounds) and self.to_give is None

    @property
    def wire(self) -> int:
        """The round's number as the other ranks count it."""
        return self.number_base + self.number - self.played_before if self.number_base else self.number

    def act(self) -> None:
        """Do one thing, if there is one to do."""
        if self.to_give is None and self.number < len(self.rounds):
            self._begin()
        elif self.to_give:
            self._give(self.to_give.pop())
        elif self.to_give == []:
            if self.alone or self.rng.random() < 0.1:  # an interrupted round may be closed again
                self._close(self.wire)
                self.alone = False
            if not self.waiting:
                self.to_give = None
        elif self.number and self.rng.random() < 0.1:
            self._close(self.wire)

    def follow(self, instruction: Instruction) -> None:
        match instruction:
            case Layout():
                self.layout = instruction
            case Suspended(layout):
                assert self.layout == layout
                self.suspended, self.layout = layout, None
            case Evicted(layout):
                if self.layout is layout or (self.layout and self.layout.layout == layout.layout):
                    self.layout = None
                self.suspended = None
            case Response(collective=Collective.JOIN):
                self.layout, self.suspended = self.layout or self.suspended, None
            case BucketRelease(bucket, nobody):
                definition = self.definitions[bucket]
                for index, member in enumerate(definition.members):
                    everybody = tuple(range(self.simulation.size))
                    self._answered(member.name, ErrorKind.NONE, () if index in nobody else everybody)
            case Response(names=names, error=error, contributors=contributors):
                for name in names:
                    self._answered(name, error, contributors)

    def _begin(self) -> None:
        self.number += 1
        self.now = self.rounds[self.number - 1]
        self.answers.append({})
        self.to_give = list(self.now.members)
        self.waiting = set(self.to_give)
        self.rng.shuffle(self.to_give)
        self.filled, self.broken, self.alone = {}, set(), False
        self.current = self.layout if self.layout and self.layout.first_round <= self.wire else None
        if self.current:
            self.definitions = {bucket.bucket: bucket for bucket in self.current.buckets}
            self.home = {member.name: bucket for bucket in self.current.buckets for member in bucket.members}
            if self.home.keys() != self.now.members.keys():
                self.controller.abandon(self.current.layout)
                self.current = None
        self.alone = self.current is None

    def _close(self, number: int) -> None:
        self.controller.close(Closing(LABEL, number, self.process_set))

    def _give(self, name: str) -> None:
        if self.current is None or self.home[name].bucket in self.broken:
            self._declare(name)
            return
        bucket = self.home[name]
        filled = self.filled.setdefault(bucket.bucket, [])
        member = next(member for member in bucket.members if member.name == name)
        if member.shape != (self.now.members[name],):
            self.broken.add(bucket.bucket)
            self.controller.abandon(self.current.layout)
            for other in (*filled, name):
                self._declare(other)
            return
        filled.append(name)
        if len(filled) == len(bucket.members):
            missing = tuple(index for index, other in enumerate(bucket.members) if other.name in self.now.missing)
            self.by_bucket += 1
            full = sum(len(self.filled.get(each.bucket, ())) == len(each.members) for each in self.current.buckets)
            closes = full == len(self.current.buckets)
            self.controller.submit_bucket(bucket, BucketReady(bucket.bucket, self.wire, missing, closes))

    def _declare(self, name: str) -> None:
        self.alone = True
        self.controller.submit(Request(name, Collective.ALLREDUCE, "uint8", (self.now.members[name],),
                                       absent=name in self.now.missing, label=LABEL, round=self.wire,
                                       process_set=self.process_set))

    def _answered(self, name: str, error: ErrorKind, contributors: tuple[int, ...]) -> None:
        self.waiting.remove(name)
        assert name not in self.answers[-1], "answered twice"
        self.answers[-1][name] = (error, contributors)


INQUIRE = 6


def run(simulation: Simulation, reducers: list[Reducer], schedule: list[int]) -> None:
    """Interleave as the schedule says, then in turn until everything is over."""
    size = simulation.size

    def do(rank: int, action: int) -> None:
        if action in (0, 1):
            reducers[rank].act()
        elif action == 2:
            simulation.say(rank)
        elif action == 3:
            simulation.hear(rank)
        elif action == 4:
            simulation.decide()
        elif action == INQUIRE:
            simulation.coordinator.inquire([rank])
        else:
            for instruction in simulation.apply(rank):
                reducers[rank].follow(instruction)

    for choice in schedule:
        do(choice % size, choice // size)
    for _ in range(5000):
        if all(reducer.over for reducer in reducers):
            return
        for rank in range(size):
            for action in range(INQUIRE):
                do(rank, action)
    raise AssertionError(f"something waits for ever: {[reducer.waiting for reducer in reducers]}")


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[list[Round]], list[int], int]:
    """Draw ranks and what each brings to each round: mostly the same, sometimes another shape, a missing or extra member."""
    size = draw(st.integers(1, 4))
    names = [f"t{index}" for index in range(draw(st.integers(1, 6)))]
    rounds: list[list[Round]] = [[] for _ in range(size)]
    shapes = {name: draw(st.integers(0, 40)) for name in names}
    for _ in range(draw(st.integers(3, 9))):
        event = draw(st.sampled_from(["calm"] * 6 + ["all change", "one changes", "extra on one", "one lacks"]))
        name, odd = draw(st.sampled_from(names)), draw(st.integers(0, size - 1))
        if event == "all change":
            shapes[name] += 1
        for rank in range(size):
            members = dict(shapes)
            if rank == odd and event == "one changes":
                members[name] += 1
            if rank == odd and event == "extra on one":
                members["extra"] = 3
            if rank == odd and event == "one lacks":
                del members[name]
            missing = draw(st.frozensets(st.sampled_from(names), max_size=2))
            rounds[rank].append(Round(members, missing & members.keys()))
    schedule = draw(st.lists(st.integers(0, size * (INQUIRE + 1) - 1), max_size=150))
    return size, rounds, schedule, draw(st.sampled_from([0, 16, 1000]))


def led(size: int, per_host: int, first_too: bool) -> list[range]:
    """Return the ranks of each host with a leader; that of rank 0, the coordinator, has none unless `first_too`."""
    if not per_host:
        return []
    hosts = [range(first, min(first + per_host, size)) for first in range(0, size, per_host)]
    return hosts if first_too else hosts[1:]


def expected(rounds: list[Round], name: str) -> tuple[ErrorKind, tuple[int, ...]]:
    """Return the answer that a member must get, by rank contributions (a learned bucket counts all, or nobody)."""
    if any(name not in each.members for each in rounds) or len({each.members[name] for each in rounds}) > 1:
        return ErrorKind.MISMATCH, ()
    return ErrorKind.NONE, tuple(rank for rank, each in enumerate(rounds) if name not in each.missing)


@given(stories(), st.sampled_from([0, 1, 2, 3]), st.booleans())
@settings(deadline=None, max_examples=400)
def test_every_member_of_every_round_is_answered_once_and_alike(
        story: tuple[int, list[list[Round]], list[int], int], per_host: int, first_too: bool) -> None:
    size, rounds, schedule, threshold = story
    simulation = Simulation(size, threshold, hosts=led(size, per_host, first_too))
    rng = random.Random(len(schedule))
    reducers = [Reducer(simulation, rank, rounds[rank], rng) for rank in range(size)]
    run(simulation, reducers, schedule)
    assert simulation.failures == [None] * size
    for number in range(len(rounds[0])):
        here = [rounds[rank][number] for rank in range(size)]
        for reducer in reducers:
            answers = reducer.answers[number]
            assert answers.keys() == reducer.rounds[number].members.keys()
            for name, (error, contributors) in answers.items():
                wanted, present = expected(here, name)
                assert error is wanted
                if error is ErrorKind.NONE:  # a bucket's place holds the identity where a member is missing
                    assert bool(contributors) == bool(present) and set(present) <= set(contributors)
                    assert contributors == reducers[0].answers[number][name][1]
    shared = set.intersection(*(set(each.members) for per_rank in rounds for each in per_rank))
    orders = [[name for instruction in plan for name in getattr(instruction, "names", [getattr(instruction, "bucket", 0)])
               if name in shared or isinstance(instruction, BucketRelease)] for plan in simulation.plans]
    assert all(order == orders[0] for order in orders), "ranks execute in different orders"


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(0, 1 << 30), st.sampled_from([0, 1, 2]),
       st.booleans(), st.sampled_from([0, 1000]))
@settings(deadline=None, max_examples=200)
def test_ranks_with_fewer_rounds_join_and_the_others_go_on(counts: list[int], seed: int, per_host: int, first_too: bool,
                                                           threshold: int) -> None:
    """Ranks play different numbers of rounds, with a member changing now and then, and join; then all play two more."""
    size = len(counts)
    rng = random.Random(seed)
    simulation = Simulation(size, threshold, hosts=led(size, per_host, first_too))
    story = [Round({"a": 10 + rng.randrange(10) // 9, "b": 20, "c": 30}) for _ in range(8)]
    reducers = [Reducer(simulation, rank, story[:counts[rank]], rng) for rank in range(size)]
    joining: set[int] = set()
    last: dict[int, int] = {}

    def turn(rank: int) -> None:
        reducers[rank].act()
        if reducers[rank].over and rank not in joining:
            joining.add(rank)
            simulation.controllers[rank].submit(Request("join", Collective.JOIN, "uint8", (0,)))
        simulation.say(rank)
        simulation.hear(rank)
        simulation.decide()
        for instruction in simulation.apply(rank):
            if isinstance(instruction, Response) and instruction.collective is Collective.JOIN:
                last[rank] = instruction.rows[0]
            if not isinstance(instruction, Assist):
                reducers[rank].follow(instruction)

    for _ in range(4000):
        turn(rng.randrange(size))
        if len(last) == size:
            break
    assert len(set(last.values())) == 1 and len(last) == size, "the join never ended"
    for rank, reducer in enumerate(reducers):
        for number, answers in enumerate(reducer.answers):
            active = {each for each in range(size) if counts[each] > number}
            for error, contributors in answers.values():
                assert error is ErrorKind.NONE and rank in contributors and active >= set(contributors)
    for reducer in reducers:
        reducer.rounds = [*reducer.rounds, *story[:2]]
        reducer.number_base, reducer.played_before = 1 << 32, reducer.number
    before = [len(reducer.answers) for reducer in reducers]
    run(simulation, reducers, [])
    assert all(len(reducer.answers) == count + 2 for reducer, count in zip(reducers, before, strict=True))
    assert simulation.failures == [None] * size


@given(st.integers(2, 4), st.integers(0, 3), st.integers(0, 200), st.integers(0, 1 << 30), st.sampled_from([0, 2]),
       st.booleans())
@settings(deadline=None, max_examples=150)
def test_a_rank_that_leaves_at_any_time_ends_all_waiting(size: int, leaver: int, steps: int, seed: int, per_host: int,
                                                         first_too: bool) -> None:
    leaver %= size
    rng = random.Random(seed)
    simulation = Simulation(size, hosts=led(size, per_host, first_too))
    rounds = [Round({"a": 10, "b": 20, "c": 30})] * 6
    reducers = [Reducer(simulation, rank, list(rounds), rng) for rank in range(size)]
    for turn in range(2000):
        rank = rng.randrange(size)
        if turn == steps:
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


@given(st.integers(2, 4), st.integers(0, 200), st.integers(0, 1 << 30), st.sampled_from([0, 1, 2]), st.booleans())
@settings(deadline=None, max_examples=150)
def test_a_process_set_that_is_removed_at_any_time_ends_all_waiting_in_it(size: int, steps: int, seed: int, per_host: int,
                                                                         first_too: bool) -> None:
    """Ranks play rounds on a set and ask for its removal, each at a time of its own, often in the middle of a round."""
    rng = random.Random(seed)
    simulation = Simulation(size, hosts=led(size, per_host, first_too))
    ranks = tuple(range(size - 1)) if rng.random() < 0.5 and size > 2 else tuple(range(size))
    for controller in simulation.controllers:
        controller.submit(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=ranks))
    simulation.settle()
    (number,) = {plan.pop().rows[0] for plan in simulation.plans}  # type: ignore[union-attr]
    reducers = [Reducer(simulation, rank, [Round({"a": 10, "b": 20, "c": 30})] * 8, rng, number) for rank in ranks]
    removing = [steps + rng.randrange(30) for _ in range(size)]
    for turn in range(3000):
        rank = rng.randrange(size)
        if turn >= removing[rank]:
            removing[rank] = 1 << 30
            simulation.controllers[rank].submit(
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
def test_a_closing_and_the_removal_of_its_process_set_in_one_report(hosts: list[tuple[int, ...]]) -> None:
    simulation = Simulation(2, hosts=hosts)
    for controller in simulation.controllers:
        controller.submit(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=(1,)))
    simulation.settle()
    for rank, controller in enumerate(simulation.controllers):
        if rank == 1:
            controller.submit(Request("x", Collective.ALLREDUCE, "uint8", (4,), label=LABEL, round=1, process_set=1))
            controller.close(Closing(LABEL, 1, 1))
        controller.submit(Request("remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(1,)))
        if rank == 1:
            controller.close(Closing(LABEL, 2, 1))  # by a thread that did not know
    simulation.settle()
    assert simulation.failures == [None, None]
    assert [response.error for response in simulation.plans[1] if isinstance(response, Response)] == [ErrorKind.NONE] * 3


@pytest.mark.parametrize("hosts", [[], [(0, 1, 2)], [(1, 2)]])
def test_a_rank_that_closes_a_round_twice_does_not_end_it(hosts: list[tuple[int, ...]]) -> None:
    simulation = Simulation(3, hosts=hosts)
    for rank, name in ((0, "b"), (1, "a"), (2, "a")):  # nobody else has "b": that is known when all have closed the round
        simulation.controllers[rank].submit(Request(name, Collective.ALLREDUCE, "uint8", (4,), label=LABEL, round=1))
    for rank in (0, 1, 1, 1):
        simulation.controllers[rank].close(Closing(LABEL, 1))
    simulation.settle()
    assert not any(simulation.plans), "the round is over before rank 2 has closed it"
    simulation.coordinator.inquire([1, 2])
    simulation.settle()
    assert simulation.coordinator.closed_by(LABEL, 1) == {0, 1}
    simulation.controllers[2].close(Closing(LABEL, 1))
    simulation.settle()
    assert simulation.coordinator.closed_by(LABEL, 1) == {0, 1, 2}
    assert [[response.error for response in plan] for plan in simulation.plans] == [[ErrorKind.MISMATCH]] * 3


def steady(size: int, members: dict[str, int], rounds: int, **options: object) -> tuple[Simulation, list[Reducer]]:
    simulation = Simulation(size, **options)  # type: ignore[arg-type]
    reducers = [Reducer(simulation, rank, [Round(members)] * rounds, random.Random(rank)) for rank in range(size)]
    run(simulation, reducers, [])
    return simulation, reducers


def test_a_set_is_learned_from_its_first_complete_round() -> None:
    simulation, reducers = steady(3, {"a": 8, "b": 50, "c": 8, "d": 8}, 5)
    (layout,) = [instruction for instruction in simulation.plans[0] if isinstance(instruction, Layout)]
    assert layout.first_round == 3
    assert all(reducer.by_bucket == 3 * len(layout.buckets) for reducer in reducers)  # rounds 3, 4 and 5
    for bucket in layout.buckets:
        assert all(offset % 64 == 0 for offset in bucket.offsets)
        ends = [offset + member.shape[0] for offset, member in zip(bucket.offsets, bucket.members, strict=True)]
        assert all(end <= begin for end, begin in zip(ends, (*bucket.offsets[1:], bucket.elements), strict=True))


def test_a_set_that_keeps_changing_is_learned_ever_more_rarely() -> None:
    simulation = Simulation(2)
    rounds = [Round({"a": 10 + number // 4}) for number in range(80)]
    reducers = [Reducer(simulation, rank, rounds, random.Random(rank)) for rank in range(2)]
    run(simulation, reducers, [])
    learned = [instruction for instruction in simulation.plans[0] if isinstance(instruction, Layout)]
    assert 2 <= len(learned) <= 8


def test_too_many_layouts_evict_the_least_recently_used() -> None:
    simulation = Simulation(1, layouts=2)
    controller = simulation.controllers[0]
    layouts: dict[str, Layout] = {}
    for number in range(1, 4):
        for label in ("x", "y", "z"):
            controller.submit(Request(label, Collective.ALLREDUCE, "uint8", (4,), label=label, round=number))
            controller.close(Closing(label, number))
            simulation.settle()
            for instruction in simulation.plans[0]:
                if isinstance(instruction, Layout):
                    layouts[instruction.label] = instruction
                elif isinstance(instruction, Evicted):
                    layouts.pop(instruction.layout.label, None)
            simulation.plans[0].clear()
            assert len(layouts) <= 2
    assert len(layouts) == 2


def test_layouts_differing_between_ranks_fall_back_to_row_major() -> None:
    for strides, wanted in ((((1, 4), (1, 4)), (1, 4)), (((1, 4), ()), ())):
        simulation = Simulation(2)
        for rank in range(2):
            simulation.controllers[rank].submit(Request("x", Collective.ALLREDUCE, "uint8", (4, 2), label=LABEL, round=1,
                                                        strides=strides[rank]))
            simulation.controllers[rank].close(Closing(LABEL, 1))
        simulation.settle()
        (layout,) = [instruction for instruction in simulation.plans[1] if isinstance(instruction, Layout)]
        assert layout.buckets[0].members[0].strides == wanted


def test_learning_can_be_turned_off() -> None:
    simulation, _ = steady(2, {"a": 8}, 4, sizes=BucketSizes(16, 0))
    assert not any(isinstance(instruction, (Layout, Expanded)) for instruction in simulation.plans[0])


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


@given(stories(), st.sampled_from([0, 1, 2]), st.booleans(), st.integers(0, 1 << 30))
@settings(deadline=None, max_examples=150)
def test_a_set_that_ranks_drop_at_different_times_is_forgotten(
        story: tuple[int, list[list[Round]], list[int], int], per_host: int, first_too: bool, seed: int) -> None:
    """Every rank drops it as soon as its own rounds are over, while others may still be in their last one."""
    size, rounds, _, threshold = story
    simulation = Simulation(size, threshold, hosts=led(size, per_host, first_too))
    rng = random.Random(seed)
    reducers = [Reducer(simulation, rank, rounds[rank], rng) for rank in range(size)]
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
    simulation.settle()
    assert simulation.failures == [None] * size
    assert not simulation.coordinator.declared_sets and not simulation.coordinator.anything_waits
    for plan in simulation.plans:
        learned = [instruction.layout for instruction in plan if isinstance(instruction, Layout)]
        assert [instruction.layout.layout for instruction in plan if isinstance(instruction, Evicted)] == learned


@pytest.mark.parametrize("hosts", [[], [(0, 1)]])
def test_a_layout_ends_with_the_first_rank_that_drops_its_set(hosts: list[tuple[int, ...]]) -> None:
    simulation, _ = steady(2, {"a": 8, "b": 8}, 4, hosts=hosts)
    simulation.controllers[1].retire(Retired(LABEL))
    simulation.settle()
    assert [isinstance(plan[-1], Evicted) for plan in simulation.plans] == [True, True]
    assert simulation.coordinator.declared_sets == {LABEL}, "rank 0 may still report something of it"
    simulation.controllers[0].retire(Retired(LABEL))
    simulation.settle()
    assert not simulation.coordinator.declared_sets


def test_what_waits_in_a_set_that_all_ranks_have_dropped_is_answered() -> None:
    """A rank drops it in the middle of a round in which the other did nothing."""
    simulation = Simulation(2)
    simulation.controllers[1].submit(Request("a", Collective.ALLREDUCE, "uint8", (4,), label=LABEL, round=1))
    for controller in simulation.controllers:
        controller.retire(Retired(LABEL))
    simulation.settle()
    assert [response.error for response in simulation.plans[1] if isinstance(response, Response)] == [ErrorKind.MISMATCH]
    assert not simulation.coordinator.anything_waits and not simulation.coordinator.declared_sets


def test_a_set_of_a_process_set_that_is_gone_may_be_dropped() -> None:
    simulation = Simulation(2, hosts=[(0, 1)])
    for controller in simulation.controllers:
        controller.submit(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=(0, 1)))
        controller.submit(Request("remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(1,)))
    simulation.settle()
    for controller in simulation.controllers:
        controller.retire(Retired(LABEL, 1))
    simulation.settle()
    assert simulation.failures == [None, None] and not simulation.coordinator.declared_sets


@given(st.integers(2, 4), st.integers(0, 1 << 30), st.sampled_from([0, 1, 2]), st.booleans())
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
        learned = [instruction.layout for instruction in plan if isinstance(instruction, Layout)]
        assert [instruction.layout.layout for instruction in plan if isinstance(instruction, Evicted)] == learned
    assert not any(controller.unanswered() for controller in simulation.controllers), "somebody waits for ever"
    assert not simulation.coordinator.anything_waits and not simulation.coordinator.declared_sets
