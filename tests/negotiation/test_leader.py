"""What a host's leader passes on; that negotiation works through leaders is tested beside the rest of it."""

from __future__ import annotations

import msgspec
import pytest

from hvdlite.core.types import Collective
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import (
    Bucket,
    BucketReady,
    Closing,
    Decision,
    HostReport,
    Layout,
    RankReport,
    Report,
    Request,
    Response,
)

RESPONSE = Response(("a",), Collective.ALLREDUCE, "float32", contributors=(0, 1, 2, 3))
MEMBER = Request("a", Collective.ALLREDUCE, "float32", (8,), label="net")


def a_leader() -> Leader:
    """Return the leader of ranks 2 and 3 of 4, who know one bucket."""
    leader = Leader((2, 3), 4)
    leader.watch(Decision(0, 1, learned=(Layout(1, "net", 2, (Bucket(7, (MEMBER,), (0,), 8, RESPONSE),)),)))
    return leader


def ready(round: int) -> Report:
    return Report(0, 1, (BucketReady(7, round),))


def test_what_all_say_goes_up_once() -> None:
    leader = a_leader()
    leader.receive(2, ready(2))
    assert leader.report() is None
    leader.receive(3, ready(2))
    assert leader.report() == HostReport(1, (BucketReady(7, 2),))


@pytest.mark.parametrize("asked", [2, 3])
def test_when_one_is_asked_for_an_account_the_coordinator_learns_who_is_missing(asked: int) -> None:
    leader = a_leader()
    leader.receive(2, ready(2))
    leader.watch(Decision(0, 2, inquiries=(0,)))
    assert leader.report() is None
    leader.watch(Decision(0, 3, inquiries=(asked,)))
    leader.check_invariants()
    report = leader.report()
    assert report is not None and report.said == (RankReport(2, ready(2)),)
    leader.receive(3, ready(2))
    report = leader.report()
    assert report is not None and report.said == (RankReport(3, ready(2)),), "what goes up rank by rank does so to its end"
    for rank in (2, 3):
        leader.receive(rank, ready(3))
    leader.check_invariants()
    assert leader.report() == HostReport(1, (BucketReady(7, 3),))


def test_the_end_of_a_rank_goes_up_behind_what_it_said() -> None:
    leader = a_leader()
    leaving = Report(0, 1, leaving=True)
    leader.receive(3, leaving)
    leader.lose(3, "its process ended")
    report = leader.report()
    assert report is not None and report.said == (RankReport(3, leaving),) and report.lost == ((3, "its process ended"),)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=HostReport) == report
    assert leader.report() is None


def test_what_a_rank_says_after_a_closing_goes_up_after_it() -> None:
    leader = a_leader()
    closing, later = Closing("net", 1), Request("remove", Collective.REMOVE_PROCESS_SET, "uint8", (0,), members=(1,))
    leader.receive(2, Report(0, 1, (MEMBER, closing, later)))
    assert leader.report() == HostReport(0, (RankReport(2, Report(0, 1, (MEMBER, later))),))
    leader.receive(3, Report(0, 1, (MEMBER, closing, later)))
    assert leader.report() == HostReport(1, (RankReport(3, Report(0, 1, (MEMBER,))), closing,
                                             RankReport(3, Report(0, 1, (later,)))))


def test_one_rank_that_closes_a_round_twice_does_not_close_it_for_another() -> None:
    leader = a_leader()
    closing = Report(0, 1, (Closing("net", 1),))
    leader.receive(2, closing)
    leader.receive(2, closing)
    assert leader.report() is None
    leader.receive(3, closing)
    assert leader.report() == HostReport(1, closing.said)
    leader.receive(3, closing)
    leader.receive(2, closing)
    leader.check_invariants()
    assert leader.report() is None


def test_a_rank_that_is_asked_for_an_account_is_known_to_have_closed_its_round() -> None:
    leader = a_leader()
    closing = Report(0, 1, (Closing("net", 1),))
    leader.receive(2, closing)
    leader.watch(Decision(0, 2, inquiries=(2,)))
    assert leader.report() == HostReport(0, (RankReport(2, closing),))
    leader.receive(3, closing)
    assert leader.report() == HostReport(1, closing.said)
