"""Members of real jobs get SIGTERM: they leave with code 0, and no step is done again. See docs/elastic.md."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.elastic.jobs import Job


@pytest.mark.parametrize("member", [0, 1])
def test_a_rank_that_gets_sigterm_leaves_and_no_step_is_done_again(member: int, tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(["-np", "2", "--min-np", "1"], tmp_path, 200))
    job.wait_for_all(2)
    job.wait_for_step(50)
    job.kill(member, signal.SIGTERM)
    told = job.succeed(lost={member}, lost_hosts=())
    assert set(told) == {1 - member}
    last = max(step for step, size in told[1 - member].history if size == 2)
    assert last == job.step_of(member), "it has taken part in each step of the world, and in no other"
    errors = job.errors()
    why = f"left: rank {member} on localhost (it got SIGTERM)"
    assert f"hvdrun: rank {member} on localhost: to leave within 30 s (it got SIGTERM)\n" in errors
    assert f"hvdrun: world 2, 1 rank, goes on where training stopped; {why}; it took " in errors, errors
    assert f"hvdrun: rank {member} on localhost left: it got SIGTERM\n" in errors, "its exit code is 0"


def test_all_ranks_get_sigterm(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(["-np", "2", "--min-np", "1", "--grace", "8"], tmp_path, 1_000_000))
    job.wait_for_all(2)
    for member in (0, 1):
        job.kill(member, signal.SIGTERM)
    assert not job.end() and job.process.returncode == 75
    assert job.errors().endswith("hvdrun: all ranks were told to leave: it got SIGTERM\n"), job.errors()
    assert job.step_of(0) == job.step_of(1), "they have stopped together"


def test_a_signal_that_ends_the_job_is_no_notice(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(["-np", "2", "--min-np", "1"], tmp_path, 1_000_000))
    job.wait_for_all(2)
    job.process.send_signal(signal.SIGTERM)
    assert not job.end() and job.process.returncode == 143
    errors = job.errors()
    assert errors.endswith("hvdrun: ended by SIGTERM; all ranks ended in time\n") and "to leave" not in errors, errors


def test_a_rank_outside_of_elastic_run_dies_of_sigterm(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(["-np", "2", "--min-np", "1"], tmp_path, 10, {"WAITS": "1"}))
    job.wait_for("both", lambda: len(job.members()) == 2)
    job.kill(1, signal.SIGTERM)
    assert not job.end() and job.process.returncode == 143, job.errors()
    assert "to leave" not in job.errors() and "rank 1 on localhost: killed by signal 15 (SIGTERM)" in job.errors()
