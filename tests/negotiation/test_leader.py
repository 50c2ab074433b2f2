"""What a host's leader passes on; that negotiation works through leaders is tested beside the rest of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hvdlite.core.types import Collective
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.layouts import unused_members
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import (
    Blocked,
    Bucket,
    BucketReady,
    Decision,
    ErrorKind,
    HostReport,
    Layout,
    MergedRequests,
    RankReport,
    Report,
    Request,
    Response,
    RoundDone,
)
from hvdlite.negotiation.negotiator import Policy

RESPONSE = Response(names=("a",), collective=Collective.ALLREDUCE, dtype="float32", contributors=(0, 1, 2, 3))
MEMBER = Request("a", Collective.ALLREDUCE, "float32", (8,), label="net")


def a_leader() -> Leader:
    """Return the leader of ranks 2 and 3 of 4, who know one bucket."""
    leader = Leader((2, 3), 4)
    bucket = Bucket(bucket_id=7, members=(MEMBER,), offsets=(0,), elements=8, response=RESPONSE)
    layout = Layout(layout_id=1, label="net", first_round=2, buckets=(bucket,))
    leader.observe(Decision(epoch=0, sequence=1, learned=(layout,)))
    return leader


def ready(round_id: int) -> Report:
    return Report(epoch=0, applied=1, items=(BucketReady(bucket_id=7, round_id=round_id),))


# docs/protocol.md#leaders
def test_what_all_say_goes_up_once() -> None:
    leader = a_leader()
    leader.receive(2, ready(2))
    assert leader.take_report() is None
    leader.receive(3, ready(2))
    assert leader.take_report() == HostReport(epoch=0, applied=1, items=(BucketReady(bucket_id=7, round_id=2),))


def test_what_only_some_ranks_of_the_host_lack_is_told_apart() -> None:
    leader = a_leader()
    for rank, unused in ((2, (0, 3)), (3, (0, 1))):
        leader.receive(rank, Report(epoch=0, applied=1, items=(BucketReady(bucket_id=7, round_id=2, unused=unused),)))
    merged = BucketReady(bucket_id=7, round_id=2, unused=(0,), unused_somewhere=(1, 3))
    assert leader.take_report() == HostReport(epoch=0, applied=1, items=(merged,))
    other_host = BucketReady(bucket_id=7, round_id=2, unused=(0, 3))
    assert unused_members([merged, other_host]) == ((0,), (1, 3))
    assert unused_members([BucketReady(bucket_id=7, round_id=2)] * 2) == ((), ())


@pytest.mark.parametrize("asked", [2, 3])
def test_when_one_is_asked_for_an_account_the_coordinator_learns_who_is_missing(asked: int) -> None:
    leader = a_leader()
    leader.receive(2, ready(2))
    leader.observe(Decision(epoch=0, sequence=2, status_requests=(0,)))
    assert leader.take_report() is None
    leader.observe(Decision(epoch=0, sequence=3, status_requests=(asked,)))
    leader.check_invariants()
    report = leader.take_report()
    assert report is not None and report.items == (RankReport(2, ready(2)),)
    leader.receive(3, ready(2))
    report = leader.take_report()
    assert report is not None and report.items == (RankReport(3, ready(2)),), "what goes up rank by rank does so to its end"
    for rank in (2, 3):
        leader.receive(rank, ready(3))
    leader.check_invariants()
    assert leader.take_report() == HostReport(epoch=0, applied=1, items=(BucketReady(bucket_id=7, round_id=3),))


def test_the_end_of_a_rank_goes_up_behind_what_it_said() -> None:
    leader = a_leader()
    leaving = Report(epoch=0, applied=1, leaving=True)
    leader.receive(3, leaving)
    leader.lose(3, "its process ended")
    report = leader.take_report()
    assert report is not None and report.items == (RankReport(3, leaving),) and report.lost == ((3, "its process ended"),)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=HostReport) == report
    assert leader.take_report() is None


def test_what_a_rank_says_after_a_closing_goes_up_after_it() -> None:
    leader = a_leader()
    done, later = RoundDone("net", 1), Request("remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(1,))
    leader.receive(2, Report(epoch=0, applied=1, items=(MEMBER, done, later)))
    assert leader.take_report() == HostReport(
        epoch=0, applied=0, items=(RankReport(2, Report(epoch=0, applied=1, items=(later,))),))
    leader.receive(3, Report(epoch=0, applied=1, items=(MEMBER, done, later)))
    assert leader.take_report() == HostReport(epoch=0, applied=1, items=(MergedRequests((2, 3), (MEMBER,)), done,
                                                           RankReport(3, Report(epoch=0, applied=1, items=(later,)))))


def test_one_rank_that_finishes_a_round_twice_does_not_finish_it_for_another() -> None:
    leader = a_leader()
    done = Report(epoch=0, applied=1, items=(RoundDone("net", 1),))
    leader.receive(2, done)
    leader.receive(2, done)
    assert leader.take_report() is None
    leader.receive(3, done)
    assert leader.take_report() == HostReport(epoch=0, applied=1, items=done.items)
    leader.receive(3, done)
    leader.receive(2, done)
    leader.check_invariants()
    assert leader.take_report() is None


def test_a_rank_that_is_asked_for_an_account_is_known_to_have_closed_its_round() -> None:
    leader = a_leader()
    done = Report(epoch=0, applied=1, items=(RoundDone("net", 1),))
    leader.receive(2, done)
    leader.observe(Decision(epoch=0, sequence=2, status_requests=(2,)))
    assert leader.take_report() == HostReport(epoch=0, applied=0, items=(RankReport(2, done),))
    leader.receive(3, done)
    assert leader.take_report() == HostReport(epoch=0, applied=1, items=done.items)


def report_of(*items: Request | RoundDone, **rest: Any) -> Report:
    return Report(epoch=0, applied=1, items=items, **rest)


def told(leader: Leader) -> tuple[object, ...]:
    leader.check_invariants()
    report = leader.take_report()
    return () if report is None else report.items


X = Request("x", Collective.ALLREDUCE, "float32", (8,))


def test_equal_requests_of_a_host_go_up_as_one_behind_the_last() -> None:
    leader = a_leader()
    leader.receive(3, report_of(X))
    assert told(leader) == ()
    other = msgspec.structs.replace(X, name="y")
    leader.receive(2, report_of(other, X))
    assert told(leader) == (MergedRequests((2, 3), (X,)),)
    leader.receive(3, report_of(other))
    assert told(leader) == (MergedRequests((2, 3), (other,)),)


@pytest.mark.parametrize("change", [{"absent": True}, {"shape": (9,)}, {"strides": (1,)}, {"splits": (1, 7)},
                                    {"in_step": True}])
def test_requests_that_differ_go_up_with_their_ranks(change: dict[str, Any]) -> None:
    leader = Leader((1, 2, 3), 4)
    leader.receive(1, report_of(X))
    leader.receive(2, report_of(msgspec.structs.replace(X, **change)))
    leader.receive(3, report_of(X))
    assert told(leader) == (MergedRequests((1, 3), (X,)), MergedRequests((2,), (msgspec.structs.replace(X, **change),)))


def test_a_request_with_its_tensor_waits_for_nobody_and_lets_nobody_wait() -> None:
    leader = a_leader()
    eager = msgspec.structs.replace(X, payload=b"tensor")
    leader.receive(2, report_of(X))
    leader.receive(3, report_of(eager))
    assert told(leader) == (MergedRequests((2,), (X,)), RankReport(3, report_of(eager)))
    leader.observe(Decision(epoch=0, sequence=2,
                          responses=(Response(names=("x",), collective=Collective.ALLREDUCE, dtype="float32"),)))
    leader.receive(3, report_of(X))
    assert told(leader) == (), "the tensor was answered: its name begins anew"


@pytest.mark.parametrize("asked", [2, 3])
def test_when_one_is_asked_for_an_account_requests_go_up_with_their_ranks(asked: int) -> None:
    leader = a_leader()
    leader.receive(2, report_of(X))
    leader.observe(Decision(epoch=0, sequence=2, status_requests=(asked,)))
    assert told(leader) == (MergedRequests((2,), (X,)),)
    leader.receive(3, report_of(X))
    assert told(leader) == (MergedRequests((3,), (X,)),)


@pytest.mark.parametrize("last", [report_of(leaving=True), report_of(blocked=Blocked(())),
                                  report_of(Request("join", Collective.JOIN, "uint8", (0,)))])
def test_before_a_rank_joins_or_leaves_or_is_blocked_everything_goes_up(last: Report) -> None:
    leader = a_leader()
    leader.receive(2, report_of(X))
    leader.receive(3, last)
    assert told(leader) == (MergedRequests((2,), (X,)), RankReport(3, last))


def test_nobody_waits_for_a_rank_that_has_joined() -> None:
    leader = a_leader()
    leader.receive(3, report_of(Request("join", Collective.JOIN, "uint8", (0,))))
    leader.take_report()
    leader.receive(2, report_of(X))
    assert told(leader) == (RankReport(2, report_of(X)),)


def test_a_member_that_only_one_rank_has_goes_up_before_the_round_is_over() -> None:
    leader = a_leader()
    member, done = msgspec.structs.replace(MEMBER, name="b", round_id=1), RoundDone("net", 1)
    leader.receive(2, report_of(member, done))
    assert told(leader) == ()
    leader.receive(3, report_of(done))
    assert told(leader) == (MergedRequests((2,), (member,)), done)


def test_a_request_that_ends_a_layout_goes_up_at_once() -> None:
    leader = a_leader()
    member = msgspec.structs.replace(MEMBER, round_id=2)
    leader.receive(2, report_of(member))
    assert told(leader) == (RankReport(2, report_of(member)),)


def test_requests_in_a_process_set_that_ends_go_up() -> None:
    leader = a_leader()
    added = Response(names=("add",), collective=Collective.ADD_PROCESS_SET, dtype="uint8", members=(2, 3))
    removed = Response(names=("remove",), collective=Collective.REMOVE_PROCESS_SET, dtype="uint8", rows=(1,))
    leader.observe(Decision(epoch=0, sequence=2, responses=(added,)))
    inside = msgspec.structs.replace(X, process_set_id=1)
    remove = Request("remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(1,))
    leader.receive(2, report_of(inside, remove))
    assert told(leader) == (MergedRequests((2,), (inside,)), RankReport(2, report_of(remove)))
    leader.observe(Decision(epoch=0, sequence=3, responses=(removed,)))
    leader.receive(3, report_of(inside))
    assert told(leader) == (RankReport(3, report_of(inside)),)


def test_a_request_that_was_refused_before_the_host_had_made_it_does_not_stay() -> None:
    leader = a_leader()
    leader.receive(2, report_of(X))
    refused = Response(names=("x",), collective=Collective.ALLREDUCE, dtype="float32", error=ErrorKind.LEFT)
    leader.observe(Decision(epoch=0, sequence=2, left=(0,), responses=(refused,)))
    assert told(leader) == (MergedRequests((2,), (X,)),)
    leader.receive(3, report_of(X))
    assert told(leader) == (RankReport(3, report_of(X)),)


@pytest.mark.parametrize(("ranks", "waits"), [((0, 1), False), ((2, 3), True)])
def test_where_the_order_of_requests_counts_the_first_rank_of_the_set_waits_for_nobody(ranks: tuple[int, ...],
                                                                                       waits: bool) -> None:
    leader = Leader(ranks, 4, in_order=True)
    leader.receive(ranks[0], report_of(MEMBER))
    assert told(leader) == (() if waits else (RankReport(ranks[0], report_of(MEMBER)),))


def test_the_coordinator_takes_what_a_host_says_alike_and_names_every_rank() -> None:
    coordinator = Coordinator(4, Policy())
    for rank in (0, 1):
        coordinator.receive(rank, Report(epoch=0, applied=0, items=(X,)), 0.0)
    coordinator.receive_host((2, 3), HostReport(epoch=0, applied=0, items=(MergedRequests((2,), (X,)),)), 1.0)
    (stall,) = coordinator.new_stalls(10.0, 5.0)
    assert stall.enqueued == (0, 1, 2) and stall.missing == (3,)
    coordinator.receive_host((2, 3), HostReport(epoch=0, applied=0, items=(
        MergedRequests((3,), (msgspec.structs.replace(X, dtype="int32"),)),)), 2.0)
    decision = coordinator.decide()
    assert decision is not None
    assert "ranks 0, 1, 2: float32; rank 3: int32" in decision.responses[0].error_text
    for rank in (0, 1):
        coordinator.receive(rank, Report(epoch=0, applied=0, items=(X,)), 3.0)
    coordinator.receive_host((2, 3), HostReport(epoch=0, applied=0, items=(
        MergedRequests((2, 3), (msgspec.structs.replace(X, absent=True),)),)), 3.0)
    decision = coordinator.decide()
    assert decision is not None and decision.responses[0].contributors == (0, 1)


def test_messages_of_another_world_are_dropped_on_every_path() -> None:
    """See docs/protocol.md#epochs."""
    leader, coordinator = Leader((2, 3), 4, epoch=2), Coordinator(4, Policy(), epoch=2)
    old = Report(epoch=1, applied=0, items=(X,))
    for rank in (2, 3):
        leader.receive(rank, old)
    assert leader.take_report() is None
    leader.observe(Decision(epoch=1, sequence=1, left=(0,)))
    for rank in range(4):
        coordinator.receive(rank, old, 0.0)
    coordinator.receive_host((0, 1, 2, 3), HostReport(epoch=1, applied=0, items=(MergedRequests((0, 1, 2, 3), (X,)),)), 0.0)
    assert coordinator.decide() is None
    leader.receive(2, Report(epoch=2, applied=0, items=(X,)))
    assert leader.take_report() is None  # nobody has left: it waits for rank 3
    leader.receive(3, Report(epoch=2, applied=0, items=(X,)))
    report = leader.take_report()
    assert report is not None and report.epoch == 2
