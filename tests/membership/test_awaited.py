"""Members for which others wait: whether they live is asked, and how long they are waited for."""

from __future__ import annotations

import math

from hvdlite.membership.events import MemberReported, TimePassed
from hvdlite.membership.messages import Alive, AskAlive
from tests.membership.talk import founded


def test_a_member_that_computes_is_waited_for_and_a_stopped_one_is_killed() -> None:
    talk = founded(3, stall_shutdown=100, elastic_timeout=20)
    talk.gone(0)
    assert talk.wait(5).asked() == talk.looked_at() == [1, 2]
    assert talk.notes[-2:] == [f"rank {rank} on a has not stopped; the others wait for it, at most 60 s if it does not "
                               "answer, else 100 s" for rank in (1, 2)]
    talk.seen_stopped(2).alive(1)
    assert talk.wait(5).killed() == [2] and talk.asked() == [1]
    assert "its process was stopped while others waited for it" in talk.gone(2).notes[-1]
    for _ in range(17):
        assert talk.alive(1).wait(5).killed() == []
    assert talk.alive(1).wait(5).killed() == [1], "not for ever"
    assert len([note for note in talk.notes if "has not stopped" in note]) == 2


def test_a_member_that_does_not_answer_is_lost_after_the_heartbeat_time_as_in_any_job() -> None:
    """It may be slow: a C call holds the GIL, or the machine is overloaded."""
    talk = founded(3)
    talk.gone(0)
    assert talk.wait(64.9).killed() == [] and talk.wait(0.1).killed() == [1, 2], "60 s after the question"
    assert "it did not stop within 60 s" in talk.gone(1).notes[-1]


def test_nobody_is_killed_unasked_when_the_heartbeat_time_is_short() -> None:
    talk = founded(2, heartbeat=3.0)
    assert talk.gone(0).wait(5).asked() == [1] and talk.killed() == []
    assert talk.alive(1).wait(5).asked() == [1] and talk.killed() == []
    assert talk.wait(3).killed() == [1]


def test_a_member_that_was_stopped_and_goes_on_is_waited_for() -> None:
    talk = founded(2)
    talk.gone(0).wait(5).seen_stopped(1).wait(4)
    assert talk.alive(1).seen_stopped(1).wait(9).killed() == [], "what was seen is older than its answer"
    assert talk.alive(1).idle(1).order().members == (1,)


def test_a_member_that_ends_in_any_case_is_not_waited_for() -> None:
    talk = founded(2, met=False).met()
    talk.ready(0)
    assert talk.idle(0).wait(10).killed() == [1]


def test_no_heartbeat_time_waits_without_a_limit() -> None:
    talk = founded(2, heartbeat=math.inf, stall_shutdown=math.inf)
    assert talk.gone(0).wait(10_000).killed() == []
    assert talk.idle(1).order().members == (1,)


def test_a_member_that_hangs_in_the_end_of_its_world_is_killed_though_it_answers() -> None:
    talk = founded(2)
    talk.gone(0).wait(5)
    for _ in range(47):
        talk.alive(1, in_user_code=False).wait(1.25)
    assert talk.killed() == [] and talk.wait(1.25).killed() == [1], "the heartbeat time after the first question"


def test_an_authority_that_stood_still_asks_before_it_kills() -> None:
    talk = founded(3, stall_shutdown=100, elastic_timeout=20)
    talk.gone(0)
    talk.now += 62
    assert talk.handle(TimePassed()).asked() == [1, 2] and talk.killed() == [], "nobody has asked them yet"
    talk.alive(1).seen_stopped(2).wait(4.9)
    assert talk.killed() == [] and talk.wait(0.1).killed() == [2], "it has been asked, and has not answered"


def test_a_member_that_others_blame_is_killed_unless_it_stops() -> None:
    talk = founded(4)
    assert talk.idle(0, blamed=(1, 2, 9), reason="StallError: rank 1 is in sleep()").stopped() == [1, 2, 3]
    talk.idle(2)
    assert talk.alive(1).wait(0.9).killed() == [] and talk.wait(0.1).killed() == [1], "that it computes is no excuse"
    assert talk.gone(1).notes[-1].startswith("rank 1 on a: it held up the others: StallError: rank 1 is in sleep() (killed")
    assert talk.idle(3).order().members == (0, 2, 3)


def test_of_two_members_that_blame_each_other_both_go_on() -> None:
    """The link between them was cut."""
    talk = founded(3)
    talk.idle(0, blamed=(1,)).idle(1, blamed=(0, 2))
    assert talk.wait(20).killed() == []
    assert talk.idle(2).order().members == (0, 1, 2)


def test_what_others_say_of_a_member_that_was_asked_before_counts() -> None:
    talk = founded(3)
    talk.gone(0).wait(5).alive(1, 2)
    assert talk.idle(2, blamed=(1,)).wait(1).killed() == [1]


def test_a_member_whose_background_thread_ends_late_is_asked_again() -> None:
    talk = founded(2)
    talk.gone(0).wait(5)
    assert talk.alive(1, in_user_code=False).wait(2).asked() == [1]
    talk.alive(1, in_user_code=True)
    assert talk.wait(6).killed() == [] and talk.idle(1).order().members == (1,)


def test_a_member_that_computes_and_stops_goes_on() -> None:
    talk = founded(2)
    talk.gone(0).wait(5)
    talk.alive(1).wait(5)
    talk.alive(1)
    assert talk.idle(1, commits=3).order().members == (1,)
    assert talk.met().wait(1000).commands == []


def test_a_stopped_process_for_which_others_wait_at_a_boundary_is_killed() -> None:
    """It is in no collective with them, so nobody else misses it; one that only takes long answers, and lives."""
    talk = founded(2, slots={"a": 3})
    talk.ready(2)
    assert talk.boundary(m0=7, m1=8).told(AskAlive) == {}
    assert talk.idle(0, at_rest=True).told(AskAlive) == {}
    assert talk.wait(10).told(AskAlive).keys() == {1}
    assert talk.notes == ["rank 1 on a has not reached the boundary at which all ranks stop; the others wait for it, at "
                          "most 60 s if it does not answer, else as long as it computes"]
    for _ in range(3):
        talk.handle(MemberReported(1, Alive(1, in_user_code=False)))
        assert talk.wait(20).told(AskAlive).keys() == {1} and talk.killed() == []
    assert talk.seen_stopped(1).wait(5).killed() == [1]
    assert talk.gone(1).order().members == (0, 2)


def test_a_stopped_process_for_which_others_wait_when_training_ends_is_killed() -> None:
    talk = founded(3)
    assert talk.finished(0).wait(10).told(AskAlive).keys() == {1, 2}
    talk.handle(MemberReported(1, Alive(1, in_user_code=False)))
    assert talk.seen_stopped(2).wait(5).killed() == [2]
    talk.gone(2)
    assert talk.idle(0, 1, commits=1).order().members == (0, 1)


def test_a_stopped_process_for_which_others_wait_to_run_again_is_killed() -> None:
    talk = founded(3)
    talk.finished(0, 1, 2)
    talk.gone(2)
    talk.ready(0)
    talk.idle(0, commits=1)
    assert talk.wait(10).asked() == [1]
    assert talk.notes[-1] == ("rank 1 on a has not called elastic.run again; the others wait for it, at most 60 s if it "
                              "does not answer, else as long as it computes")
    assert talk.alive(1).wait(19).commands == [] and talk.wait(1).asked() == [1], "it computes"
    assert talk.wait(60).killed() == [1]
    assert talk.gone(1).order().members == (0,)
    assert "rank 1 on a: it did not answer within 60 s (killed by signal 9 (SIGKILL)); training had finished" in talk.notes


def test_nobody_is_asked_between_two_runs_while_none_waits() -> None:
    talk = founded(3)
    talk.finished(0, 1, 2)
    talk.gone(2)
    talk.ready(0)
    assert talk.wait(1000).commands == []


def test_a_member_that_does_not_tell_its_boundary_is_killed() -> None:
    talk = founded(3, slots={"a": 2, "b": 1})
    talk.hosts(a=2)
    talk.boundary(m0=4, m2=4)
    assert talk.wait(5).looked_at() == [1] and talk.wait(59.9).killed() == []
    assert talk.wait(0.1).killed() == [1]
    assert talk.gone(1).stopped() == [0, 2]
    assert talk.idle(0, 2).order().members == (0,)


def test_a_dismissed_member_that_does_not_exit_is_killed() -> None:
    talk = founded(2, slots={"a": 1, "b": 1})
    talk.hosts(a=1)
    talk.boundary(m0=1, m1=1)
    talk.idle(0, 1, at_rest=True)
    assert talk.met().wait(5).looked_at() == [1] and talk.asked() == []
    assert talk.seen_stopped(1).wait(5).killed() == [1] and talk.gone(1).commands == []
