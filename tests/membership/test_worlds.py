"""Worlds: how they begin, end and change (docs/protocol.md#worlds). The rules' numbers are those of the specification."""

from __future__ import annotations

from hvdlite.membership.authority import Authority
from hvdlite.membership.events import TOO_FEW, HostsSeen, Limits, MemberReported, SendOrder, StartMember, WorldBegun
from hvdlite.membership.messages import AllFinished, CoordinatorAt, Dismissed, Listening, PrepareStop, SaveState
from tests.membership.talk import Talk, founded


def test_founders_start_when_there_are_enough_slots() -> None:
    talk = Talk(Limits(3), a=2)
    assert talk.started() == [] and talk.epoch == 0
    talk.hosts(a=2, b=2)
    assert talk.started() == [(0, "a", 0), (1, "a", 1), (2, "b", 0)]
    assert WorldBegun(1, (0, 1, 2)) in talk.commands and talk.epoch == 1 and talk.authority.world.everybody[2].host == "b"


def test_founders_on_all_slots_that_are_there() -> None:
    talk = Talk(Limits(2, max_np=4, starts_with_all=True), a=1)
    assert talk.started() == [], "it waits for two"
    assert [member for member, _, _ in talk.hosts(a=1, b=2).started()] == [0, 1, 2] and talk.world == (0, 1, 2)
    assert Talk(Limits(2, max_np=4, starts_with_all=True), a=9).world == (0, 1, 2, 3)
    assert Talk(Limits(2, starts_with_all=True), a=9).world == tuple(range(9))


def test_too_few_slots_end_the_job_after_the_timeout() -> None:
    talk = Talk(Limits(3), a=2).wait(599)
    assert talk.commands == []
    talk.wait(1)
    assert (talk.end().code, talk.end().reason) == (TOO_FEW, "3 slots are needed; there were 2 after 600 s")
    assert Talk(Limits(3, hosts_are_fixed=True), a=2).end().reason == "3 slots are needed; there were 2"


def test_rules_1_and_3_a_world_is_ordered_when_all_of_the_last_one_are_idle_or_gone() -> None:
    talk = founded(4)
    assert talk.gone(1).stopped() == [0, 2, 3]
    assert not talk.idle(0, commits=5).idle(3, commits=5).commands
    order = talk.idle(2, commits=5).order()
    assert (order.epoch, order.members, order.commits, order.restore) == (2, (0, 2, 3), 5, True)
    assert talk.authority.members.index(3) == 2 and 1 not in talk.authority.members


def test_a_member_that_sees_the_loss_first_ends_the_world_for_all() -> None:
    talk = founded(3)
    assert talk.idle(2).stopped() == [0, 1]
    talk.idle(0)
    assert talk.idle(1).order().members == (0, 1, 2)


def test_rule_3_a_member_that_does_not_stop_is_killed_and_seen_dead_before_the_next_world() -> None:
    talk = founded(3)
    talk.gone(0)
    talk.idle(1)
    assert talk.wait(64.9).killed() == [] and talk.wait(0.1).killed() == [2]
    assert talk.idle(2).commands == [], "it woke up after it had been given up"
    assert talk.gone(2).order().members == (1,)
    assert "rank 2 on a: it did not stop within 60 s (killed by signal 9 (SIGKILL))" in talk.notes


def test_rule_4_a_death_in_the_middle_of_a_meeting_replaces_the_world() -> None:
    talk = founded(4)
    talk.gone(0)
    talk.idle(1, 2, 3)
    assert talk.epoch == 2 and talk.gone(3).stopped() == [1, 2]
    assert talk.idle(1, 2).order().members == (1, 2) and talk.epoch == 3


def test_rule_5_the_donor_is_first_and_the_survivors_keep_their_order() -> None:
    talk = founded(4)
    talk.gone(0)
    talk.idle(1, commits=4).idle(2, commits=5)
    order = talk.idle(3, commits=5).order()
    assert order.members == (2, 1, 3) and order.commits == 5


def test_rule_5_joiners_follow() -> None:
    talk = founded(2, slots={"a": 3})
    assert talk.ready(2).told(PrepareStop).keys() == {0, 1}
    talk.gone(0)
    assert talk.idle(1).order().members == (1, 2)


def test_rule_6_below_the_minimum_members_wait_idle_until_the_timeout() -> None:
    talk = founded(3, min_np=2)
    talk.gone(0)
    talk.gone(1)
    talk.idle(2, commits=3)
    killed = "(killed by signal 9 (SIGKILL))"
    assert talk.commands[:-1] == [SendOrder(2, SaveState(restore=True, commits=3, boundaries=0))], "it may be all there is"
    assert talk.notes[-1] == (
        "1 of at least 2 ranks are left: they wait for others, at most 600 s; "
        f"left: rank 0 on a {killed}, rank 1 on a {killed}")
    talk.wait(600)
    assert (talk.end().code, talk.end().reason) == (TOO_FEW, "2 ranks are needed; there were 1 after 600 s")


def test_rule_6_members_that_leave_are_not_counted() -> None:
    talk = founded(3, min_np=2, slots={"a": 1, "b": 2})
    talk.gone(2)
    talk.idle(0, 1, commits=3)
    talk.met().hosts(a=1)
    talk.boundary(m0=1, m1=1)
    talk.idle(0, 1, commits=4, at_rest=True)
    assert talk.notes[-1].endswith("at most 600 s; left: rank 1 on b (its host was removed)"), talk.notes
    assert talk.wait(600).end().reason == "2 ranks are needed; there were 1 after 600 s"


def test_rule_6_a_new_host_ends_the_waiting() -> None:
    talk = founded(2, min_np=2)
    talk.gone(0)
    talk.idle(1, commits=3)
    assert talk.hosts(a=2, b=1).started() == [(2, "b", 0)]
    order = talk.ready(2).order()
    assert order.members == (1, 2) and order.commits == 3 and talk.wait(1000).commands == []


def test_rule_6_nobody_waits_for_hosts_that_cannot_come() -> None:
    talk = founded(2, min_np=2, hosts_are_fixed=True)
    talk.gone(0)
    assert talk.idle(1).end().reason == "2 ranks are needed; there were 1; no other processes can be started"


def test_rule_6_the_world_grows_up_to_the_maximum() -> None:
    talk = founded(2, max_np=3, slots={"a": 9})
    assert talk.authority.members == (0, 1)
    assert talk.ready(2).told(PrepareStop).keys() == {0, 1}
    assert talk.boundary(m0=7, m1=8).stop_at() == {9}
    order = talk.idle(0, 1, commits=4, at_rest=True).order()
    assert order.members == (0, 1, 2) and not order.restore
    assert talk.met().started() == []


def test_rule_7_provisional_ranks() -> None:
    talk = Talk(Limits(2), a=4)
    talk.met().ready(0)
    starts = [command for command in talk.commands if isinstance(command, StartMember)]
    assert [(start.rank, start.size, start.is_joiner) for start in starts] == [(2, 3, True), (3, 4, True)]
    assert talk.ready(2, 3).told(PrepareStop) == {}, "a founder is not in elastic.run yet"
    assert talk.ready(1).told(PrepareStop).keys() == {0, 1}


def test_rule_16_where_rank_0_listens() -> None:
    talk = founded(2, slots={"a": 1, "b": 1})
    talk.idle(0, 1)
    assert talk.order().ranks_by_machine == ((0,), (1,)) and talk.order().host_names == ("a", "b")
    talk.handle(MemberReported(1, Listening(2, ("10.0.0.2",), 7)))
    assert talk.commands == [], "it is not rank 0"
    talk.handle(MemberReported(0, Listening(2, ("10.0.0.1", "fe80::1"), 7)))
    assert talk.told(CoordinatorAt) == {1: CoordinatorAt(2, "10.0.0.1", 7)}


def test_names_of_one_machine_are_apart_for_discovery_and_together_for_planes() -> None:
    talk = founded(3, slots={"localhost": 1, "c": 1, "127.0.0.1": 1}, machines={"127.0.0.1": "localhost"})
    order = talk.idle(0, 1, 2).order()
    assert order.ranks_by_machine == ((0, 2), (1,)) and order.host_names == ("localhost", "c", "127.0.0.1")
    talk.met()
    assert talk.hosts(localhost=1, c=1).told(PrepareStop).keys() == {0, 1, 2}, "one of the two names has vanished"


def test_rule_28_all_stop_at_the_same_boundary() -> None:
    """docs/protocol.md#boundaries"""
    talk = founded(3, slots={"a": 2, "b": 1})
    assert talk.hosts(a=2).told(PrepareStop).keys() == {0, 1, 2}
    assert not talk.boundary(m0=4, m1=5).commands
    assert talk.boundary(m2=4).stop_at() == {6}
    assert not talk.idle(0, 2, commits=6, at_rest=True).commands
    order = talk.idle(1, commits=6, at_rest=True).order()
    assert talk.dismissed() == [2] and order.members == (0, 1) and not order.restore
    assert talk.gone(2, 0).commands == [] and talk.notes == []


def test_rule_28_a_death_in_between_replaces_the_change() -> None:
    talk = founded(3, slots={"a": 2, "b": 1})
    talk.hosts(a=2)
    talk.boundary(m0=4)
    assert talk.gone(2).stopped() == [0, 1]
    assert not talk.boundary(m1=5).commands
    assert talk.idle(0, 1).order().restore


def test_a_member_that_fails_before_the_boundary_stops_all() -> None:
    talk = founded(2, slots={"a": 3})
    talk.ready(2)
    talk.boundary(m0=1, m1=1)
    talk.idle(0, at_rest=True, commits=2)
    assert talk.idle(1, commits=1).order().restore and talk.world == (0, 1, 2)


def test_a_change_during_which_training_finishes() -> None:
    talk = founded(2, slots={"a": 3})
    talk.ready(2)
    talk.boundary(m0=9, m1=9)
    talk.finished(0)
    assert talk.finished(1).told(AllFinished).keys() == {0, 1} and talk.dismissed() == [2]


def test_a_member_that_finished_meets_the_others_again() -> None:
    talk = founded(2, slots={"a": 3})
    talk.ready(2)
    talk.boundary(m0=9, m1=9)
    talk.finished(0)
    assert talk.idle(1, at_rest=True).stopped() == [0]
    assert talk.idle(0).order().members == (0, 1, 2)


def test_nothing_is_changed_when_a_member_has_finished() -> None:
    talk = founded(2)
    talk.finished(0)
    assert talk.hosts(a=2, b=2).commands == []


def test_the_end_is_when_all_have_finished_and_are_gone() -> None:
    talk = founded(2)
    talk.finished(0)
    assert talk.finished(1).told(AllFinished).keys() == {0, 1}
    assert talk.gone(0, 0).commands == []
    assert talk.gone(1, 0).end().code == 0 and talk.authority.is_over and talk.authority.wake_at() is None
    assert talk.hosts(a=5).commands == []


def test_elastic_run_is_called_again_and_ranks_are_lost_in_it() -> None:
    talk = founded(3, min_np=2)
    talk.finished(0, 1, 2)
    talk.ready(0, 1)
    assert talk.hosts(a=5).commands == [], "others would begin with the first run"
    talk.ready(2)
    assert talk.notes == ["slots that stay free: 2; ranks can join in the script's first hvd.elastic.run only"]
    assert talk.started() == [] and talk.hosts(a=6).commands == [], "the user knows"
    talk.gone(1, -9)
    assert talk.stopped() == [0, 2]
    order = talk.idle(0, 2, commits=1).order()
    assert order.members == (0, 2) and order.restore
    talk.met()
    assert talk.finished(0, 2).told(AllFinished).keys() == {0, 2}
    talk.gone(0, 0)
    assert talk.gone(2, 0).end().code == 0


def test_a_rank_that_is_lost_before_elastic_run_is_called_again() -> None:
    talk = founded(4, min_np=1)
    talk.finished(0, 1, 2, 3)
    assert talk.ready(0).idle(0).gone(3, -9).stopped() == [], "the others may be busy with something that needs no rank"
    assert talk.gone(2, 0).stopped() == []
    assert talk.ready(1).stopped() == [1]
    order = talk.idle(1).order()
    assert order.members == (0, 1)
    assert order.reason == ("left: rank 2 on a (it did not call elastic.run again), "
                            "rank 3 on a (killed by signal 9 (SIGKILL))")
    talk.met().finished(0, 1)
    talk.gone(0, 0)
    assert talk.gone(1, 0).end().code == 0, "training went on without the rank that failed"


def test_too_few_ranks_for_another_elastic_run() -> None:
    talk = founded(2, min_np=2)
    talk.finished(0, 1)
    talk.hosts(a=4)
    talk.ready(0, 1).gone(1, -9)
    end = talk.idle(0).end()
    assert (end.code, end.reason) == (TOO_FEW, "2 ranks are needed; there were 1; no other processes can be started")


def test_another_elastic_run_counts_its_commits_from_0() -> None:
    talk = founded(6, min_np=1)
    talk.gone(5)
    talk.idle(0, 1, 2, 3, 4, commits=90)
    talk.met().finished(0, 1, 2, 3, 4)
    talk.ready(0, 1, 2, 3, 4)
    for commits, victim in enumerate((4, 3, 2, 1)):
        talk.gone(victim)
        assert talk.idle(*range(victim), commits=commits).order().commits == commits
        talk.met()


def test_a_failure_after_the_end_of_training_is_the_jobs_code() -> None:
    talk = founded(2)
    talk.finished(0, 1)
    talk.gone(1, 3, "OSError: no space is left")
    end = talk.gone(0, 0).end()
    assert end.code == 3 and end.reason == "rank 1 on a: OSError: no space is left (exit code 3)"


def test_a_rank_that_is_killed_after_the_end_of_training_is_named_and_the_job_succeeds() -> None:
    talk = founded(3)
    talk.finished(0, 1, 2)
    talk.gone(1)
    assert talk.notes[-1] == "rank 1 on a: killed by signal 9 (SIGKILL); training had finished"
    talk.gone(2, 0)
    assert talk.gone(0, 0).end().code == 0
    talk = founded(2)
    talk.finished(0, 1)
    talk.gone(0)
    assert talk.gone(1, 0).end().code == 137, "rank 0 saves the result"


def test_hosts_that_vanish_while_nobody_can_take_over_are_used_on() -> None:
    talk = founded(2)
    assert talk.hosts().commands == []
    talk.hosts(b=1)
    assert talk.started() == [(2, "b", 0)] and talk.ready(2).told(PrepareStop).keys() == {0, 1}
    talk.boundary(m0=1, m1=1)
    order = talk.idle(0, 1, commits=2, at_rest=True).order()
    assert talk.dismissed() == [1] and order.members == (0, 2), "one of them still has the state"
    assert talk.met().told(PrepareStop).keys() == {0, 2}
    talk.boundary(m0=1, m2=1)
    assert talk.idle(0, 2, commits=3, at_rest=True).order().members == (2,) and talk.dismissed() == [0]


def test_a_single_rank_cannot_pass_its_state_on() -> None:
    talk = founded(1, max_np=1)
    assert talk.hosts(b=1).commands == []
    assert talk.hosts(a=1, b=1).commands == []


def test_joiners_on_a_host_that_vanishes_are_ended() -> None:
    talk = founded(2, slots={"a": 2, "b": 2})
    talk.ready(0)
    talk.hosts(a=2)
    assert talk.killed() == [2, 3]


def test_joiners_that_have_become_too_many_are_dismissed() -> None:
    talk = founded(2, max_np=2, slots={"a": 1, "b": 1})
    talk.hosts(a=1, c=1)
    assert talk.started() == [(2, "c", 0)]
    talk.hosts(a=1, b=1, c=1)
    assert talk.killed() == [2]


def test_after_its_end_nothing_has_an_effect() -> None:
    authority = Authority(Limits(1, hosts_are_fixed=True), 0.0)
    assert len(authority.handle(HostsSeen({}), 0.0)) == 1 and authority.handle(HostsSeen({"a": 1}), 1.0) == []


def test_rule_17_another_coordinator_is_tried_first() -> None:
    talk = founded(4, slots={"a": 2, "b": 2})
    talk.idle(0, 1, 2, 3)
    assert talk.cannot_meet(3).stopped() == [0, 1, 2, 3]
    assert talk.idle(0, 1, 2, 3).order().members == (2, 0, 1, 3), "a may be able to connect to b"


def test_rule_17_then_the_side_with_fewer_members_is_left_out() -> None:
    talk = founded(5, slots={"a": 3, "b": 2})
    talk.idle(0, 1, 2, 3, 4)
    talk.cannot_meet(3)
    talk.idle(0, 1, 2, 3, 4)
    assert talk.world[0] == 3
    talk.cannot_meet(3, 1, 2)
    order = talk.idle(0, 1, 2, 3, 4).order()
    assert order.members == (0, 1, 2) and talk.told(Dismissed).keys() == {3, 4}
    assert "b cannot be reached from a: no more processes are started there" in talk.notes
    talk.gone(3, 0)
    assert talk.gone(4, 0).started() == []


def test_rule_17_a_host_between_two_that_cannot_reach_each_other_coordinates() -> None:
    talk = founded(3, slots={"a": 1, "b": 1, "c": 1})
    talk.idle(0, 1, 2)
    talk.cannot_meet(1)
    talk.idle(0, 1, 2)
    assert talk.world == (1, 0, 2)
    talk.cannot_meet(0)
    assert talk.idle(0, 1, 2).order().members == (2, 1, 0)


def test_a_death_explains_why_a_meeting_failed() -> None:
    talk = founded(3, slots={"a": 1, "b": 1, "c": 1})
    for commits in range(2):
        talk.idle(*talk.world, commits=commits)
    talk.cannot_meet(1)
    talk.gone(2)
    assert talk.idle(0, 1).order().members == (0, 1)


def test_members_that_cannot_meet_at_all_end_the_job() -> None:
    talk = founded(1)
    talk.idle(0)
    for _ in range(2):
        talk.cannot_meet(0)
        talk.idle(0)
    assert talk.end().code == 1 and talk.end().reason == "the ranks cannot meet: no route"


def test_a_line_for_each_change_and_a_summary() -> None:
    talk = founded(2, slots={"a": 2, "b": 1}, machines={})
    talk.gone(0, 1, "ValueError: 3")
    talk.ready(2)
    talk.now += 0.25
    talk.idle(1, commits=7)
    assert talk.order().reason == "left: rank 0 on a (ValueError: 3 (exit code 1)); joined: rank 1 (process 2) on b"
    talk.met()
    assert talk.notes[-1] == ("world 2, 2 ranks, goes on after commit 7; left: rank 0 on a (ValueError: 3 (exit code 1)); "
                              "joined: rank 1 (process 2) on b; it took 0.25 s")
    assert talk.authority.summary() == ["2 worlds; the last one had 2 ranks",
                                        "failed: rank 0 on a: ValueError: 3 (exit code 1) (world 1)"]
