"""Members that fail: what it costs their slot and host, and when it ends the job."""

from __future__ import annotations

from typing import Any

from hvdlite.membership.events import MemberReported
from hvdlite.membership.members import WorldState
from hvdlite.membership.messages import MeetingFailed, MemberFinished, MemberHello, MemberIdle, PrepareStop, StateReport
from tests.membership.talk import Talk, founded


def lose(talk: Talk, member: int, commits: int, code: int = 1, cause: str = "") -> Talk:
    """Let a member of the world fail, and the others stop."""
    talk.gone(member, code, cause)
    return talk.idle(*(other for other in talk.world if other != member), commits=commits)


def test_the_number_of_a_process_tells_apart_who_had_one_rank() -> None:
    talk = founded(4)
    for member in (1, 2, 3):
        talk.gone(member)
        talk.idle(*(other for other in talk.world if other > member or not other), commits=member).met()
    killed = "killed by signal 9 (SIGKILL)"
    assert [note for note in talk.notes if note.endswith(killed)] == [
        f"rank 1 on a: {killed}", f"rank 1 (process 2) on a: {killed}", f"rank 1 (process 3) on a: {killed}"]


def test_rule_37_a_boundary_further_on_is_progress() -> None:
    """Three kills without a commit between them end no job that gets further from one to the next."""
    talk = founded(6)
    for member, boundaries in ((5, 21), (4, 41), (3, 61)):
        talk.gone(member, -9)
        talk.idle(*range(member), boundaries=boundaries).met()
    assert talk.world == (0, 1, 2)
    for member in (2, 1):
        talk.gone(member, 1)
        talk.idle(*range(member), boundaries=61)
    assert talk.end().reason.startswith("members have failed 3 times in a row after commit 0, and training got no further")


def test_rule_37_signals_from_outside_count_once_a_boundary() -> None:
    talk = founded(8)
    for member, code in ((7, -9), (6, -15), (5, -9), (4, 1)):
        talk.gone(member, code)
        talk.idle(*range(member), boundaries=20).met()
    assert talk.world == (0, 1, 2, 3)
    talk.gone(3, -11)  # a crash of its own
    assert talk.idle(0, 1, 2, boundaries=20).end().reason.startswith("members have failed 3 times in a row")


def test_rule_36_a_failure_costs_the_slot_and_not_the_host() -> None:
    talk = founded(2, max_np=2, slots={"a": 3})
    talk.gone(0)
    assert talk.started() == [(2, "a", 2)], "the slot of 0 is retired"


def test_rule_36_three_failures_of_a_host_bar_it() -> None:
    talk = founded(5, slots={"a": 9, "b": 1}, max_np=5)
    for member in (0, 1, 2):
        assert "no more processes are started on a" not in talk.notes
        lose(talk, member, commits=member)
    assert talk.notes[-1] == "no more processes are started on a" and talk.world == (3, 4)
    assert "a" not in [host for _, host, _ in talk.met().hosts(a=9, b=2).started()]


def test_rule_36_a_cooldown_brings_the_slot_back() -> None:
    talk = founded(2, cooldown=(10.0, 60.0))
    lose(talk, 0, 1)
    talk.met()
    assert talk.wait(9.9).started() == [] and talk.wait(0.1).started() == [(2, "a", 0)]


def test_rule_36_whole_host_ends_all_members_of_a_host_at_the_first_failure() -> None:
    talk = founded(4, whole_host=True, slots={"a": 2, "b": 2})
    talk.gone(0, 1, "ValueError: 1")
    assert talk.killed() == [] and talk.stopped() == [1, 2, 3]
    assert talk.idle(1, 2, 3).order().members == (2, 3)
    assert talk.dismissed() == [1]
    assert len(talk.authority.summary()) == 3, "the member that was ended with its host has not failed"


def test_a_member_of_a_barred_host_that_alone_has_the_last_commit_hands_it_over() -> None:
    talk = founded(4, whole_host=True, slots={"a": 2, "b": 2})
    talk.gone(0)
    talk.idle(1, commits=11)
    assert talk.idle(2, 3, commits=10).order().members == (1, 2, 3)
    talk.met()
    assert set(talk.told(PrepareStop)) == {1, 2, 3}, "its host is barred: it leaves at the next boundary"
    talk.boundary(m1=0, m2=0, m3=0)
    assert talk.idle(1, 2, 3, commits=11, at_rest=True).order().members == (2, 3)
    assert talk.dismissed() == [1]


def test_when_all_hosts_are_barred_one_member_keeps_the_state_and_waits_for_another_host() -> None:
    for fixed in (True, False):
        talk = founded(4, min_np=2, whole_host=True, slots={"a": 2, "b": 2}, hosts_are_fixed=fixed)
        talk.gone(0)
        talk.gone(2)
        talk.idle(1, 3, commits=11)
        if fixed:
            assert talk.end().reason == "2 ranks are needed; there were 0; no other processes can be started"
    killed = "killed by signal 9 (SIGKILL)"
    assert talk.notes[-1] == ("1 of at least 2 ranks are left: they wait for others, at most 600 s; left: rank 0 on a "
                              f"({killed}), rank 2 on b ({killed}), rank 3 on b (another process has failed on b)")
    assert talk.hosts(a=2, b=2, c=1).started() == [(4, "c", 0)]
    assert talk.ready(4).order().members == (1, 4)
    assert talk.dismissed() == [3]


def test_a_joiner_that_fails_before_it_is_ready_costs_its_slot_only() -> None:
    talk = founded(1, slots={"a": 2})
    assert talk.gone(1, 1, "ImportError: x").stopped() == [] and talk.started() == []
    assert talk.notes == ["new process 1 on a: ImportError: x (exit code 1)"]


def test_a_lost_host_is_one_failure_and_does_not_count_against_training() -> None:
    talk = founded(5, slots={"a": 2, "b": 3})
    assert talk.lost("b").stopped() == [0, 1]
    assert talk.notes[0] == "host b was lost: the cable was cut" and "no more" not in talk.notes[-1]
    assert talk.idle(0, 1).order().members == (0, 1)
    assert talk.gone(3).commands == [], "it is gone already"
    assert talk.met().started() == [], "its slots are not used before discovery has lost it"
    talk.hosts(a=2)
    assert [host for _, host, _ in talk.hosts(a=2, b=3).started()] == ["b"] * 3


def test_a_member_that_dies_with_its_removed_host_has_not_failed() -> None:
    talk = founded(2, slots={"a": 1, "b": 1})
    talk.hosts(a=1)
    talk.gone(1)
    talk.idle(0)
    assert talk.notes == [] and talk.authority.summary()[1:] == [
        "rank 1 on b left: its host was removed; killed by signal 9 (SIGKILL)"]


def test_rule_37_three_failures_in_a_row_without_a_commit_end_the_job_with_the_first() -> None:
    talk = founded(4)
    lose(talk, 0, 5, 7, "ValueError: first")
    lose(talk, 1, 5, 8, "ValueError: second")
    end = lose(talk, 2, 5, 9, "ValueError: third").end()
    assert end.code == 7 and end.member == 0, "the launcher names it"
    assert end.reason == (
        "members have failed 3 times in a row after commit 5, and training got no further (--failures-without-progress)")


def test_rule_37_errors_that_end_no_process_end_the_job_when_they_come_back() -> None:
    talk = founded(3)
    for commits in (4, 5, 5):
        talk.idle(0, 1, 2, commits=commits, reason="MismatchError: ranks disagree").met()
    end = talk.idle(0, 1, 2, commits=5, reason="MismatchError: ranks disagree").end()
    assert end.code == 1 and end.reason == (
        "3 worlds in a row have ended with an error after commit 5: rank 0 on a: MismatchError: ranks disagree")


def test_rule_37_an_error_that_a_loss_explains_is_no_failure_of_its_own() -> None:
    talk = founded(6)
    for member in (5, 4):
        talk.idle(*range(member), commits=1, reason="PeerLostError: rank 5 has gone").gone(member, -9)
        talk.met()
    assert talk.idle(0, 1, 2, 3, commits=2).order().members == (0, 1, 2, 3)


def test_rule_37_a_commit_in_between_is_progress() -> None:
    talk = founded(8)
    for member in range(7):
        lose(talk, member, member // 2)
    assert talk.order().members == (7,)


def test_rule_37_the_same_exception_in_two_members_after_the_same_commit_ends_the_job() -> None:
    talk = founded(4)
    lose(talk, 0, 5, 1, "KeyError: 'x'")
    end = lose(talk, 1, 5, 1, "KeyError: 'x'").end()
    assert "in the same way after commit 5" in end.reason and end.ends_healthy, "ranks 2 and 3 have not failed"


def test_rule_37_the_same_exception_elsewhere_does_not() -> None:
    talk = founded(4)
    lose(talk, 0, 5, 1, "KeyError: 'x'")
    lose(talk, 1, 6, 1, "KeyError: 'x'")
    assert talk.order().members == (2, 3)


def test_rule_37_members_that_were_killed_because_they_hung_have_not_the_same_exception() -> None:
    talk = founded(4)
    talk.gone(0)
    talk.idle(1, commits=5)
    assert talk.wait(65).killed() == [2, 3]
    talk.gone(2)
    assert talk.gone(3).order().members == (1,)


def slot_that_always_fails(**limits: Any) -> Talk:
    """Return a job after three failures of slot 2, each time it was used again, without a commit between them."""
    talk = founded(3, cooldown=(10.0, 600.0), hosts_are_fixed=True, **limits)
    member = 2
    for delay in (10, 20, 40):
        lose(talk, member, 7, 1, "RuntimeError: the memory has an error")
        if talk.authority.is_over:
            break
        talk.met()
        ((member, _, slot),) = talk.wait(delay).started()
        assert slot == 2
        talk.ready(member)
        if talk.authority.world.state is WorldState.PREPARING:
            talk.boundary(m0=50, m1=50)
            talk.idle(0, 1, commits=7, at_rest=True)
        talk.met()
    return talk


def test_rule_37_a_slot_that_always_fails_does_not_end_the_job() -> None:
    assert len(slot_that_always_fails().world) == 3


def test_rule_37_a_slot_that_always_fails_ends_the_job_if_others_cannot_go_on_without_it() -> None:
    end = slot_that_always_fails(min_np=3).end()
    assert "members have failed 3 times in a row after commit 7" in end.reason


def test_rule_37_a_failure_elsewhere_counts_beside_a_slot_that_always_fails() -> None:
    talk = slot_that_always_fails()
    assert not lose(talk, 0, 7).authority.is_over
    assert lose(talk.met(), 1, 7).end().reason.startswith("members have failed 3 times in a row after commit 7")


def test_failures_of_members_that_wait_say_nothing_about_training() -> None:
    talk = founded(5, min_np=4)
    lose(talk, 0, 5)
    for member in (1, 2, 3):
        talk.gone(member)
    assert not talk.authority.is_over


def test_rule_38_a_member_that_ends_with_0_too_early_has_left() -> None:
    talk = founded(3)
    assert talk.gone(1, 0).stopped() == [0, 2]
    talk.idle(0, 2)
    assert talk.order().reason == "left: rank 1 on a (it ended with code 0 before training had finished)"


def test_rule_38_all_have_left_is_no_success() -> None:
    talk = founded(2)
    talk.gone(0, 0)
    assert talk.gone(1, 0).end().code == 1


def test_rule_42_the_code_is_0_when_training_finished_whoever_was_lost() -> None:
    talk = founded(2)
    lose(talk, 0, 1)
    talk.met().finished(1)
    assert talk.gone(1, 0).end().code == 0


def test_nobody_with_a_state_is_left() -> None:
    talk = founded(2, slots={"a": 3})
    talk.ready(2)
    talk.gone(0, 3, "ValueError: x")
    end = talk.gone(1, 1).end()
    assert (end.code, end.member, end.reason) == (3, 0, "no rank that has the state is left")
    talk = founded(2, slots={"a": 1, "b": 1})
    talk.lost("b")
    assert talk.gone(0, 0).end().reason == (
        "no rank that has the state is left; the first failure: rank 1 on b: the cable was cut (lost with its host)")


def test_a_script_without_elastic_run_ends_as_an_ordinary_job() -> None:
    talk = founded(2, met=False, slots={"a": 4}).met()
    assert talk.gone(1, 0).commands == [] and talk.wait(1000).commands == []
    assert talk.gone(0, 0).end().code == 0


def test_a_failure_before_elastic_run_ends_as_an_ordinary_job() -> None:
    talk = founded(3, met=False).met()
    assert talk.gone(1, 5, "ImportError: x").stopped() == [0, 2]
    talk.gone(0, 1, "WorldLostError: rank 1 was lost")
    end = talk.gone(2, 1, "WorldLostError: rank 1 was lost").end()
    assert end.code == 5 and end.member == 1


def test_founders_in_elastic_run_go_on_without_those_that_were_not_there_yet() -> None:
    talk = founded(4, met=False, slots={"a": 4}).met()
    talk.ready(0, 1)
    talk.gone(2, 1, "ValueError: x")
    talk.idle(0, 1)
    order = talk.gone(3, 1, "WorldLostError: rank 2 was lost").order()
    assert order.members == (0, 1) and order.commits == 0
    assert talk.started() == [(4, "a", 3)], "the slot of a consequence is free, that of the failure is retired"


def test_a_member_outside_elastic_run_that_does_not_stop_is_killed_without_blame() -> None:
    talk = founded(3, met=False).met()
    talk.ready(0)
    talk.gone(1, 1, "ValueError: x")
    talk.idle(0)
    assert talk.wait(10).killed() == [2]
    assert talk.gone(2).order().members == (0,) and len(talk.notes) == 1


def test_a_rank_that_leaves_before_elastic_run_is_not_waited_for() -> None:
    talk = founded(2, met=False).met()
    talk.gone(1, 0)
    assert talk.ready(0).stopped() == [0] and talk.idle(0).order().members == (0,)
    talk.met()
    left = "left: rank 1 on a (it ended with code 0, and had not called elastic.run)"
    assert f"world 2, 1 rank, goes on from the beginning; {left}; it took" in talk.notes[-1]


def test_messages_of_other_epochs_and_of_strangers_are_dropped() -> None:
    """docs/protocol.md#members"""
    talk = founded(2, slots={"a": 3})
    talk.idle(0)
    talk.idle(1)
    assert talk.epoch == 2
    talk.met()
    assert talk.ready(99).commands == []
    for message in (MemberIdle(1, StateReport()), MeetingFailed(1, "late"), MemberFinished(1), MemberHello(0, 1)):
        assert talk.handle(MemberReported(0, message)).commands == []
    assert talk.epoch == 2 and talk.ready(2).told(PrepareStop).keys() == {0, 1}


def test_rule_37_errors_that_kill_nobody_end_the_job_when_there_is_no_new_commit() -> None:
    talk = founded(2)
    for commits in (1, 1, 2, 2):
        talk.idle(0, 1, commits=commits)
        assert talk.order().members == (0, 1), "it may have been a link, or there is progress"
        talk.met()
    end = talk.idle(0, 1, commits=2).end()
    assert end.code == 1 and "3 worlds in a row have ended with an error after commit 2: rank 0 on a: " in end.reason


def test_the_reset_limit() -> None:
    talk = founded(3, reset_limit=1, slots={"a": 3})
    talk.gone(0)
    talk.idle(1, 2)
    assert talk.epoch == 2 and talk.met().hosts(a=3, b=3).started() == [], "it does not grow any more"
    assert talk.notes[-1] == "the limit of 1 resets has been reached; left out: 3 free slots"
    assert talk.hosts(b=3, a=3).commands == [], "the user knows"
    talk.hosts(a=2)
    assert talk.notes[-1] == "the limit of 1 resets has been reached; left out: the removal of rank 1 (process 2) on a"
    assert talk.hosts(a=3).commands == []
    talk.gone(1, 4, "ValueError: no")
    end = talk.idle(2, commits=1).end()
    assert (end.code, end.member, end.reason) == (4, 1, "the limit of 1 resets has been reached")


def test_the_next_change_after_the_reset_limit_ends_the_job_under_horovods_rule() -> None:
    for slots in ({"a": 3, "b": 3}, {"a": 2}):
        talk = founded(3, reset_limit=1, slots={"a": 3}, ends_at_reset_limit=True)
        talk.gone(0)
        assert not talk.idle(1, 2).met().authority.is_over
        end = talk.hosts(**slots).end()
        assert end.code == 1 and end.reason.startswith(
            "the limit of 1 resets has been reached, and the hosts have changed; left out: ")


def test_fewer_free_slots_and_the_end_of_a_cooldown_end_no_job_under_horovods_rule() -> None:
    talk = founded(3, reset_limit=0, slots={"a": 3, "b": 5}, ends_at_reset_limit=True)
    assert not talk.hosts(a=3, b=4).authority.is_over and talk.notes[-1].endswith("left out: 4 free slots")
    assert talk.hosts(a=3, b=6).end().reason.endswith("left out: 6 free slots")
    talk = founded(3, reset_limit=1, ends_at_reset_limit=True, cooldown=(10.0, 600.0))
    talk.gone(0)
    talk.idle(1, 2).met()
    assert not talk.wait(20).authority.is_over and talk.notes[-1].endswith("left out: 1 free slot")
    assert talk.hosts(a=4).end().code == 1


def test_what_the_last_change_leaves_out_does_not_end_the_job() -> None:
    talk = founded(1, reset_limit=1, slots={"a": 3}, ends_at_reset_limit=True)
    talk.ready(1)
    talk.boundary(m0=1)
    assert talk.idle(0, at_rest=True).killed() == [2], "it still imports"
    talk.met()
    assert talk.notes[-1] == "the limit of 1 resets has been reached; left out: 1 free slot"
    assert talk.gone(2).commands == [] and not talk.authority.is_over
