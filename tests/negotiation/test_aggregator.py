"""The rules about what waits for whom, which rank 0 and a host's leader share."""

from __future__ import annotations

import pytest

from hvdlite.core.types import Collective
from hvdlite.negotiation.layouts import LayoutTable, first_round
from hvdlite.negotiation.messages import (
    Bucket,
    BucketReady,
    Decision,
    ErrorKind,
    Layout,
    Request,
    Response,
    Retired,
    RoundDone,
    Wait,
)
from hvdlite.negotiation.readiness import Aggregator

X = Request("x", Collective.ALLREDUCE, "float32", (8,))
JOIN = Request("join", Collective.JOIN, "uint8", (0,))
DONE = RoundDone("net", 1)


def layout(layout_id: int, label: str = "net") -> Layout:
    member = Request("a", Collective.ALLREDUCE, "float32", (8,), label=label)
    response = Response(names=("a",), collective=Collective.ALLREDUCE, dtype="float32", contributors=(0, 1, 2, 3))
    bucket = Bucket(bucket_id=10 * layout_id, members=(member,), offsets=(0,), elements=8, response=response)
    return Layout(layout_id=layout_id, label=label, first_round=2, buckets=(bucket,))


def answer(request: Request, error: ErrorKind = ErrorKind.NONE, **rest: tuple[int, ...]) -> Response:
    return Response(names=(request.name,), collective=request.collective, dtype=request.dtype, error=error, **rest)


def joined(aggregator: Aggregator, rank: int) -> list[RoundDone]:
    aggregator.requests.add((rank,), JOIN.key, JOIN)
    _, ended = aggregator.join(rank)
    aggregator.check_invariants()
    return ended


def test_a_host_waits_for_its_own_ranks_of_a_process_set_only() -> None:
    host = Aggregator((2, 3), 4)
    host.observe(Decision(epoch=0, sequence=1, responses=(
        answer(Request("add", Collective.ADD_PROCESS_SET, "uint8", (0,)), members=(0, 2)),)))
    inside = Request("x", Collective.ALLREDUCE, "float32", (8,), process_set_id=1)
    assert not host.requests.add((2,), inside.key, inside).missing
    assert host.requests.add((2,), X.key, X).missing == 1
    assert not host.finish_round((2,), DONE) and host.finish_round((3,), DONE)


def test_a_round_ends_once_and_a_repetition_changes_nothing() -> None:
    job = Aggregator((0, 1, 2), 3)
    assert not job.finish_round((0, 1), DONE) and not job.finish_round((1,), DONE)
    assert job.ranks_done_with(0, "net", 1) == {0, 1}
    assert job.finish_round((2,), DONE) and not job.finish_round((2,), DONE) and not job.rounds
    assert job.ranks_done_with(0, "net", 1) == {0, 1, 2} and not job.ranks_done_with(0, "net", 2)


def test_a_round_that_is_over_ends_those_before_it() -> None:
    job = Aggregator((0, 1), 2)
    assert not job.finish_round((0,), DONE), "the other rank does not tell when"
    assert not job.finish_round((0,), RoundDone("net", 2)) and job.finish_round((1,), RoundDone("net", 2))
    assert not job.rounds and not job.finish_round((1,), DONE)
    job.check_invariants()


def test_only_a_join_waits_for_ranks_that_have_joined() -> None:
    job = Aggregator((0, 1, 2), 3)
    job.requests.add((0, 1), X.key, X)
    assert not job.finish_round((0, 1), DONE)
    assert joined(job, 2) == [DONE] and list(job.requests) == [JOIN.key]
    assert job.requests.add((0,), X.key, X).missing == 1
    assert not job.finish_round((0,), RoundDone("net", 2)) and job.finish_round((1,), RoundDone("net", 2))
    assert job.missing_for(2, Wait(0, "join")) == {0, 1}


def test_after_a_join_that_failed_everything_waits_for_all_ranks_again() -> None:
    job = Aggregator((0, 1, 2), 3)
    joined(job, 2)
    job.requests.add((0,), X.key, X)
    assert not job.finish_round((0,), DONE)
    job.requests.pop(JOIN.key)
    job.end_join(succeeded=False)
    job.check_invariants()
    assert job.missing_for(0, Wait(0, "x")) == job.missing_for(0, Wait(0, "net", 1)) == {1, 2}
    assert not job.finish_round((1,), DONE) and job.finish_round((2,), DONE)


def test_after_all_have_joined_rounds_are_numbered_anew() -> None:
    job = Aggregator((0, 1), 2)
    assert not job.finish_round((0,), DONE)
    joined(job, 0)
    joined(job, 1)
    job.end_join(succeeded=True)
    assert not job.rounds and not job.finish_round((0, 1), RoundDone("net", 2))
    assert job.finish_round((0, 1), RoundDone("net", first_round(1)))


def test_a_set_that_all_have_dropped_is_forgotten() -> None:
    job = Aggregator((0, 1), 2)
    assert job.finish_round((0, 1), DONE) and not job.finish_round((0,), RoundDone("net", 2))
    assert not job.retire((0,), Retired("net")) and not job.retire((0,), Retired("net"))
    assert job.retire((1,), Retired("net"))
    assert not (job.rounds or job.last_rounds or job.retired)


@pytest.mark.parametrize("end", [{"suspended": (1,)}, {"evicted": (1,)}])
def test_buckets_are_gathered_until_their_layout_ends_or_is_suspended(end: dict[str, tuple[int, ...]]) -> None:
    host = Aggregator((2, 3), 4)
    host.observe(Decision(epoch=0, sequence=1, learned=(layout(1),)))
    ready = BucketReady(bucket_id=10, round_id=2)
    host.buckets.add((2,), 10, ready)
    host.check_invariants()
    (withdrawn,) = host.observe(Decision(epoch=0, sequence=2, **end))
    assert withdrawn.parts == [((2,), ready)] and not host.buckets and not host.layouts.usable(10, 2)
    host.check_invariants()


def test_a_process_set_that_ends_takes_along_what_is_open_in_it() -> None:
    job = Aggregator((0, 1), 2)
    job.process_sets.add((0, 1))
    inside = Request("x", Collective.ALLREDUCE, "float32", (8,), process_set_id=1)
    job.requests.add((0,), inside.key, inside)
    job.requests.add((0,), X.key, X)
    assert not job.finish_round((0,), RoundDone("net", 1, 1)) and not job.retire((0,), Retired("net", 1))
    job.remove_set(1)
    assert list(job.requests) == [X.key] and not job.rounds and not job.retired
    assert not job.finish_round((0, 1), RoundDone("net", 1, 1)) and job.missing_for(0, Wait(1, "x")) is None
    job.check_invariants()


def test_an_evicted_layout_is_known_until_all_have_applied_its_end() -> None:
    table = LayoutTable()
    table.learn(layout(1))
    table.learn(layout(2))  # of the same set: one decision names the new layout first, and ends the old one then
    table.evict(1, 7)
    table.check_invariants()
    assert table.named("net") == layout(2) and not table.usable(10, 2) and table.usable(20, 2)
    table.forget(6)
    assert table.find(10) == (layout(1).buckets[0], layout(1))
    table.forget(7)
    assert table.find(10) is None and not table.evicted
    table.check_invariants()


def test_suspended_layouts_are_used_again_with_higher_rounds() -> None:
    table = LayoutTable()
    table.learn(layout(1))
    assert table.usable(10, 1)
    table.suspend(1)
    assert table.is_suspended(layout(1)) and not table.usable(10, 1)
    table.resume()
    table.check_invariants()
    assert table.usable(10, first_round(1)) and not table.usable(10, 5)
