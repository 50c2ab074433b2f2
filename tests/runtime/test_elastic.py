"""Elastic jobs: members that lose others, and take others in, without being started again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.elastic_jobs import ElasticJob
from tests.runtime.programs.elastic import (
    change,
    compute,
    join_early,
    train,
    train_twice,
    until_the_launcher_ends,
    with_a_corrupt_replica,
    with_process_sets,
)
from tests.worlds import HANGS_SECONDS


def agree(results: dict[int, Any]) -> None:
    """Check that all members that finished have the same weights."""
    assert len({result["digest"] for result in results.values()}) == 1, results


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_go_on_from_the_last_commit_in_the_same_processes(tmp_path: Path, victim: int) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "trace.2.json").mkdir()
    with ElasticJob(train, str(gate), slots={"a": 3}, min_np=2, hosts_are_fixed=True,
                    environment={"HVDLITE_TIMELINE": str(tmp_path / "trace.json")}) as job:
        for member in range(3):
            job.until_printed(member, "step 20 of 1\n")
        if victim == 2:
            job.refuse_files("a")  # as on a full disk
        job.kill(victim)
        order = job.until_world(2)
        survivors = [member for member in range(3) if member != victim]
        assert sorted(order.members) == survivors and order.restore  # the one with more commits is rank 0
        for member in survivors:
            job.until_printed(member, "of 2\n")
        gate.touch()
        results = job.finish()
        assert "world 2 has no timeline" in job.output(order.members[0]), f"{job}"
        assert {member: result["pid"] for member, result in results.items()} == {
            member: job.processes[member].pid for member in survivors}
    agree(results)
    for rank, member in enumerate(order.members):
        assert results[member]["worlds"] == [(member, 3), (rank, 2)]
        assert results[member]["environment"] == (rank, 2)


def test_a_job_grows_onto_a_second_host_where_rank_0_dies(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ElasticJob(train, str(gate), slots={"a": 2}, min_np=1) as job:
        for member in range(2):
            job.until_printed(member, "step 10 of 1\n")
        job.kill(0)
        assert job.until_world(2).members == (1,)
        job.see({"a": 2, "b": 2})  # the slot of member 0 is not used again
        order = job.until_members(1, 2, 3)  # both at once, or one after the other
        assert not order.restore and order.members[0] == 1
        for member in order.members:
            job.until_printed(member, "world of 3 as")
        job.kill(1)
        assert job.until_members(2, 3).restore
        for member in (2, 3):
            job.until_printed(member, "world of 2 as")
        gate.touch()
        results = job.finish()
    agree(results)
    assert sorted(results) == [2, 3] and len({result["steps"] for result in results.values()}) == 1


def test_a_rank_that_waits_in_join_is_taken_along_when_the_job_grows(tmp_path: Path) -> None:
    """See docs/protocol.md#boundaries, #donors."""
    gate = tmp_path / "gate"
    with ElasticJob(join_early, str(gate), slots={"a": 2}, min_np=1) as job:
        job.until_printed(0, "joins")
        job.until_printed(1, "step 20 in 2")
        job.see({"a": 3})
        order = job.until_members(0, 1, 2)
        assert not order.restore and order.members == (1, 0, 2), "who was in join() has missed steps"
        job.until_printed(2, "in 3")
        gate.touch()
        results = job.finish()
    (first, second), last = results[1]
    assert first == (0, 2) and second[0] > 20 and second[1] == 3, results
    assert results[0] == ([(0, 2), second], last) and results[2] == ([second], last), results


@pytest.mark.parametrize("counts_bodies", [False, True])
def test_fifty_worlds_hold_no_more_than_two(counts_bodies: bool) -> None:
    """See docs/protocol.md#the-end-of-a-world, #followers, #bodies."""
    with ElasticJob(change, 50, counts_bodies, slots={"a": 2}) as job:
        results = job.finish()
        assert max(job.orders) == 51 and all(order.restore != counts_bodies for order in job.orders.values())
    for result in results.values():
        assert result["late"] == result["early"]
        assert result["sequence"] == 4 and "one after the other" in result["nested"]


def test_a_rank_is_lost_in_the_second_training_of_a_script(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ElasticJob(train_twice, str(gate), slots={"a": 3}, min_np=2, hosts_are_fixed=True) as job:
        for member in range(3):
            job.until_printed(member, "second in 3")
        job.kill(0)
        for member in (1, 2):
            job.until_printed(member, "second in 2")
        gate.touch()
        results = job.finish()
        assert max(job.orders) == 2 and job.orders[2].restore
    assert sorted(results[member][-1] for member in (1, 2)) == [(0, 2), (1, 2)]
    assert results[1][:2] == [(1, 3), (1, 3)]


def test_a_rank_that_computes_while_another_one_dies_is_waited_for_and_a_stopped_one_is_not(tmp_path: Path) -> None:
    """See docs/protocol.md#worlds."""
    gate = tmp_path / "gate"
    with ElasticJob(compute, str(gate), slots={"a": 4}, min_np=1, quiesce_timeout=6) as job:
        for member in range(4):
            job.until_printed(member, "world of 4")
        job.kill(1, signal.SIGSTOP)
        job.kill(0)
        job.until(lambda: job.asked >= 4)  # member 1 once, and member 3 after more than 6 s, too
        gate.touch()
        results = job.finish()
        assert sorted(results) == [2, 3] and results[3] == job.processes[3].pid
        assert any("rank 3 on a has not stopped; the others wait for it" in note for note in job.notes), f"{job}"
        assert any("rank 1 on a: its process was stopped while others waited" in note for note in job.notes), f"{job}"


@pytest.mark.parametrize(("victim", "environment", "why"), [
    (2, {"HVDLITE_STALL_CHECK_TIME_SECONDS": "1", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "2"}, "StallError: rank 2 never"),
    (2, {"HVDLITE_SILENCE_CHECK_SECONDS": "0.3", "HVDLITE_HEARTBEAT_TIMEOUT": "2"}, "PeerLostError: rank 2 was lost"),
    (0, {"HVDLITE_SILENCE_CHECK_SECONDS": "0.3", "HVDLITE_HEARTBEAT_TIMEOUT": "2"}, "PeerLostError: rank 0 was lost")])
def test_a_rank_that_holds_up_the_others_is_ended_with_the_world(
        tmp_path: Path, victim: int, environment: dict[str, str], why: str) -> None:
    gate = tmp_path / "gate"
    with ElasticJob(compute, str(gate), slots={"a": 3}, min_np=1, environment=environment) as job:
        for member in range(3):
            job.until_printed(member, "world of 3")
        if "HVDLITE_HEARTBEAT_TIMEOUT" in environment:
            job.kill(victim, signal.SIGSTOP)
        job.until(lambda: any(f"rank {victim} on a: it held up the others: {why}" in note for note in job.notes))
        gate.touch()
        assert set(job.finish()) == {0, 1, 2} - {victim}


def test_replicas_that_differ_after_a_change_end_the_job() -> None:
    """See docs/protocol.md#equal-replicas."""
    with ElasticJob(with_a_corrupt_replica, slots={"a": 3}, min_np=1) as job:
        for member in range(3):
            job.until_printed(member, "world of 3")
        job.kill(0)
        job.until(lambda: job.code is not None)
        assert job.code == 1, f"{job}"
        assert set(job.orders) == {2}, f"it is not tried again; {job}"
        text = job.output(1) + job.output(2)  # the first one to raise it prints it
        assert "ReplicaMismatchError: replicas differ in 'state.weights': rank 0: digest" in text, f"{job}"


def test_process_sets_follow_their_members(tmp_path: Path) -> None:
    """See docs/protocol.md#elastic-process-sets."""
    gate = tmp_path / "gate"
    with ElasticJob(with_process_sets, str(gate), slots={"a": 3}, min_np=2) as job:
        for member in range(3):
            job.until_printed(member, "world of 3")
        job.see({"a": 2})
        assert job.until_world(2).members == (0, 1)
        for member in (0, 1):
            job.until_printed(member, "world of 2")
        assert job.processes[2].wait(HANGS_SECONDS) == 0
        job.see({"a": 3})
        assert job.until_world(3).members == (0, 1, 3)
        job.until_printed(3, "world of 3")
        gate.touch()
        results = job.finish()
    after = [([0, 1], [1], [2.0, 1.0], 1)] * 2
    assert results[1] == [([0, 1], [1, 2], [2.0, 2.0], 1), *after]
    assert results[3] == [([0, 1], [1], [None, None], 1)]


def test_the_end_of_the_launcher_ends_the_job() -> None:
    with ElasticJob(until_the_launcher_ends, slots={"a": 2}) as job:
        for member in range(2):
            job.until_printed(member, "trains")
        job.lose_launcher()
        for member in range(2):
            job.until_printed(member, "ended: the launcher of this elastic job, which orders its worlds, cannot be reached")
