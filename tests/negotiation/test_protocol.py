"""The negotiation as a whole, without ranks: any order on any rank, and everything is answered exactly once."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.core.errors import ProtocolError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.messages import BucketReady, Decision, ErrorKind, FailureNotice, Report, Request
from hvdlite.negotiation.negotiator import Policy
from hvdlite.negotiation.process_sets import pair_set_id
from tests.negotiation.simulation import Simulation


def SETS(size: int) -> list[tuple[int, ...]]:
    """Return the process sets of these tests: all ranks, and two that overlap when there are three ranks or more."""
    everybody = tuple(range(size))
    return [everybody, everybody[:-1] or everybody, everybody[1:] or everybody]


def members(size: int, number: int) -> tuple[int, ...]:
    """Return the ranks of one of `SETS`, or of a pair."""
    return SETS(size)[number] if number >= 0 else divmod(-1 - number, size)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[list[Request]], list[int], int]:
    """Draw ranks, each one's requests in its own order (some disagreeing, some absent), and an interleaving."""
    size = draw(st.integers(1, 4))
    count = draw(st.integers(1, 8))
    kinds = [Collective.ALLREDUCE, Collective.BROADCAST, Collective.BARRIER, Collective.ALLTOALL, Collective.REDUCESCATTER]
    base = [Request(f"t{index // 2}" if (number := draw(st.integers(0, 2))) else f"g{index}", draw(st.sampled_from(kinds)),
                    draw(st.sampled_from(["float32", "int64"])), (draw(st.integers(0, 5)),), root_rank=SETS(size)[number][0],
                    process_set_id=number, splits=(1,) * len(SETS(size)[number]))
            for index in range(count)]
    for index in range(draw(st.integers(0, 2)) if size > 1 else 0):
        sender, receiver = draw(st.permutations(range(size)))[:2]
        base.append(Request(f"s{index}", Collective.SEND, "int64", (draw(st.integers(0, 5)),), root_rank=sender,
                            process_set_id=pair_set_id(sender, receiver, size)))
    base = list({request.key: request for request in base}.values())
    orders = []
    for rank in range(size):
        mine = [request for request in draw(st.permutations(base)) if rank in members(size, request.process_set_id)]
        for index, request in enumerate(mine):
            change = draw(st.sampled_from(["same"] * 6 + ["shape", "op", "dtype", "absent"]))
            if change == "shape":
                mine[index] = msgspec.structs.replace(request, shape=(99,))
            elif change == "op":
                mine[index] = msgspec.structs.replace(request, op=ReduceOp.MAX)
            elif change == "dtype":
                mine[index] = msgspec.structs.replace(request, dtype="uint8")
            elif change == "absent" and request.collective is Collective.ALLREDUCE:
                mine[index] = msgspec.structs.replace(request, absent=True)
        orders.append(mine)
    return size, orders, draw(st.lists(st.integers(0, size * 5 - 1), max_size=80)), draw(st.sampled_from([0, 16, 1 << 20]))


@given(worlds())
@settings(deadline=None, max_examples=300)
def test_any_interleaving_gives_equal_plans_and_one_answer_each(
        world: tuple[int, list[list[Request]], list[int], int]) -> None:
    size, orders, schedule, threshold = world
    simulation = Simulation(size, threshold)
    for number, ranks in enumerate(SETS(size)[1:], 1):
        for controller in simulation.controllers:
            controller.enqueue(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,), members=ranks))
        simulation.settle()
        assert all(plan.pop().rows == (number,) for plan in simulation.plans)
    pending = [deque(order) for order in orders]
    for choice in schedule:
        rank, action = choice % size, choice // size
        if action == 0 and pending[rank]:
            simulation.controllers[rank].enqueue(pending[rank].popleft())
        elif action == 1:
            simulation.say(rank)
        elif action == 2:
            simulation.hear(rank)
        elif action == 3:
            simulation.decide()
        elif action == 4:
            simulation.apply(rank)
    for rank in range(size):
        while pending[rank]:
            simulation.controllers[rank].enqueue(pending[rank].popleft())
    simulation.settle()

    by_key = [{request.key: request for request in order} for order in orders]
    everything = list({response: None for plan in simulation.plans for response in plan})
    for rank in range(size):
        for other in range(rank):
            mine, theirs = simulation.plans[rank], simulation.plans[other]
            assert [each for each in mine if each in theirs] == [each for each in theirs if each in mine], "different orders"
        assert not simulation.controllers[rank].unanswered(), "something waits for ever"
        answered = [(response.process_set_id, name, 0) for response in simulation.plans[rank] for name in response.names]
        assert sorted(answered) == sorted(by_key[rank]), "not every tensor was answered exactly once"
    for response in everything:
        among = members(size, response.process_set_id)
        for key in [(response.process_set_id, name, 0) for name in response.names]:
            versions = {msgspec.structs.replace(by_key[rank][key], absent=False) for rank in among}
            if any(request.collective is Collective.ALLTOALL for request in versions):
                versions = {msgspec.structs.replace(version, op=ReduceOp.SUM, shape=()) for version in versions}
            if any(request.collective in (Collective.BROADCAST, Collective.SEND) for request in versions):
                versions = {msgspec.structs.replace(version, op=ReduceOp.SUM) for version in versions}
            if any(request.collective is Collective.BARRIER for request in versions):
                versions = {msgspec.structs.replace(version, op=ReduceOp.SUM, shape=()) for version in versions}
            agreed = len(versions) == 1
            assert (response.error is ErrorKind.NONE) == agreed, (response, versions)
            if agreed:
                present = tuple(rank for rank in among if not by_key[rank][key].absent)
                assert response.contributors == present


@given(st.integers(2, 4), st.data())
@settings(deadline=None, max_examples=100)
# docs/protocol.md#leaving
def test_a_rank_that_leaves_at_any_time_leaves_nobody_waiting(size: int, data: st.DataObject) -> None:
    simulation = Simulation(size)
    leaver = data.draw(st.integers(0, size - 1))
    before = data.draw(st.integers(0, 3))
    for rank in range(size):
        for index in range(before if rank == leaver else 4):
            simulation.controllers[rank].enqueue(Request(f"t{index}", Collective.ALLREDUCE, "float32", (1,)))
            if data.draw(st.booleans()):
                simulation.say(rank)
                simulation.hear(rank)
                simulation.decide()
    simulation.controllers[leaver].leave()
    simulation.settle()
    for rank in range(size):
        assert not simulation.controllers[rank].unanswered()
        if rank != leaver:
            errors = {name: response.error for response in simulation.plans[rank] for name in response.names}
            assert all(errors[f"t{index}"] is ErrorKind.LEFT for index in range(before, 4))


# docs/protocol.md#agreement
def test_a_refused_name_is_free_again() -> None:
    simulation = Simulation(2)
    for shapes, error in (((1,), (2,)), ErrorKind.MISMATCH), (((3,), (3,)), ErrorKind.NONE):
        for rank in range(2):
            simulation.controllers[rank].enqueue(Request("x", Collective.ALLREDUCE, "float32", shapes[rank]))
        simulation.settle()
        assert [plan[-1].error for plan in simulation.plans] == [error, error]


# docs/protocol.md#first-failure
def test_the_first_failure_is_told_once_and_names_its_origin() -> None:
    simulation = Simulation(3)
    simulation.controllers[1].fail(FailureNotice(1, "ValueError", "boom"))
    simulation.settle()
    simulation.coordinator.lose(2, "killed")
    simulation.settle()
    assert [failure and failure.origin for failure in simulation.failures] == [1, 1, 1]
    assert simulation.coordinator.decide() is None


def test_nothing_is_said_when_nothing_happens() -> None:
    simulation = Simulation(2)
    assert simulation.controllers[0].report() is None and simulation.coordinator.decide() is None


# docs/protocol.md#decisions
def test_a_missing_or_repeated_decision_is_an_error() -> None:
    controller = Controller(0)
    controller.apply(Decision(epoch=0, sequence=1))
    with pytest.raises(ProtocolError):
        controller.apply(Decision(epoch=0, sequence=1))
    with pytest.raises(ProtocolError):
        controller.apply(Decision(epoch=0, sequence=3))


def test_another_epoch_is_dropped() -> None:
    coordinator = Coordinator(1, Policy(fusion_threshold=0), epoch=2)
    coordinator.receive(0, Report(epoch=1, applied=0, items=(Request("x", Collective.BARRIER, "uint8", (0,)),)), 0.0)
    assert coordinator.decide() is None
    controller = Controller(0, epoch=2)
    assert controller.apply(Decision(epoch=1, sequence=7)) == [] and controller.applied == 0


def test_a_bucket_that_was_never_learned_is_the_senders_error() -> None:
    coordinator = Coordinator(2, Policy())
    coordinator.receive(1, Report(epoch=0, applied=0, items=(BucketReady(bucket_id=1, round_id=1),)), 0.0)
    decision = coordinator.decide()
    assert decision is not None and decision.failure is not None and decision.failure.origin == 1


def test_a_tensor_reported_twice_is_the_senders_error() -> None:
    coordinator = Coordinator(2, Policy())
    for _ in range(2):
        coordinator.receive(1, Report(epoch=0, applied=0, items=(Request("x", Collective.BARRIER, "uint8", (0,)),)), 0.0)
    decision = coordinator.decide()
    assert decision is not None and decision.failure is not None and decision.failure.origin == 1


@pytest.mark.parametrize("collective", [Collective.ALLREDUCE, Collective.ALLGATHER, Collective.BROADCAST])
def test_small_tensors_come_back_with_the_decision_in_rank_order(collective: Collective) -> None:
    simulation = Simulation(3)
    for rank in (2, 0, 1):
        simulation.controllers[rank].enqueue(Request("x", collective, "uint8", (1,), root_rank=1, payload=b"%d" % rank))
        simulation.say(rank)
        simulation.hear(rank)
    simulation.settle()
    wanted = {Collective.ALLREDUCE: b"0+1+2", Collective.ALLGATHER: b"012", Collective.BROADCAST: b"1"}[collective]
    assert [plan[0].result for plan in simulation.plans] == [wanted] * 3


# docs/protocol.md#eager-lane
def test_a_tensor_that_one_rank_does_not_offer_takes_the_ordinary_way() -> None:
    simulation = Simulation(2)
    simulation.controllers[0].enqueue(Request("x", Collective.ALLGATHER, "uint8", (1,), payload=b"0"))
    simulation.controllers[1].enqueue(Request("x", Collective.ALLGATHER, "uint8", (99,)))
    simulation.settle()
    assert [(plan[0].result, plan[0].rows) for plan in simulation.plans] == [(None, (1, 99))] * 2


def test_a_stall_is_reported_once_naming_who_is_missing() -> None:
    coordinator = Coordinator(3, Policy(fusion_threshold=0))
    coordinator.receive(1, Report(epoch=0, applied=0, items=(Request("x", Collective.ALLREDUCE, "float32", (1,)),)), 10.0)
    assert not coordinator.new_stalls(69.0, 60.0)
    (stall,) = coordinator.new_stalls(71.0, 60.0)
    assert (stall.enqueued, stall.missing) == ((1,), (0, 2)) and "'x'" in str(stall)
    assert not coordinator.new_stalls(500.0, 60.0) and coordinator.is_anything_pending
