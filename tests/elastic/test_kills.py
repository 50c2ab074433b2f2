"""Members of real jobs die, at random moments and of different causes; what is left trains on, exactly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.elastic.campaign import on_hosts, one
from tests.elastic.jobs import Job
from tests.runner.networks import Hosts, unavailable


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 6, *(pytest.param(each, marks=pytest.mark.long) for each in (0, 5, 8, 9))])
def test_members_killed_at_random_moments(seed: int) -> None:
    _, problem = one(seed)
    assert not problem, problem


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 4, 7, 10])
def test_members_of_two_hosts_are_lost_at_random_moments(seed: int, tmp_path: Path) -> None:
    assert on_hosts(seed)
    if why := unavailable():
        pytest.skip(why)
    with Hosts("ab", tmp_path) as hosts:
        _, problem = one(seed, hosts)
    assert not problem, problem


def test_rank_0_dies_while_another_member_fails(tmp_path: Path) -> None:
    """The first traceback is shown, the job goes on from a commit, and ends with 0."""
    job = Job(["-np", "3", "--min-np", "1"], tmp_path, 200, {"TROUBLE": "2:150:raise"})
    try:
        job.wait_for_all(3)
        job.wait_for_step(50)
        job.kill(0)
        told = job.succeed()
    finally:
        job.close()
    errors = job.errors()
    assert set(told) == {1}
    assert "RuntimeError: trouble ahead" in errors
    assert "world 3, 1 rank" in errors


def test_a_member_that_exits_with_0_has_not_finished(tmp_path: Path) -> None:
    job = Job(["-np", "2", "--min-np", "1"], tmp_path, 100, {"TROUBLE": "1:30:exit"})
    try:
        told = job.succeed()
    finally:
        job.close()
    assert set(told) == {0}
    assert told[0].history[29] == (29, 2)
    assert told[0].history[30] == (30, 1)


def test_too_few_members_end_the_job_with_the_first_failure(tmp_path: Path) -> None:
    job = Job(["-np", "2", "--min-np", "2", "--elastic-timeout", "3"], tmp_path, 500, {"TROUBLE": "1:30:raise"})
    try:
        told = job.end()
    finally:
        job.close()
    assert not told
    assert job.process.returncode != 0
    assert "RuntimeError: trouble ahead" in job.errors()


def test_a_script_that_catches_every_exception_comes_into_the_next_world(tmp_path: Path) -> None:
    """And a timeline that cannot be written there is a warning."""
    (tmp_path / "trace.2.json").mkdir()
    environment = {"TROUBLE": "2:30:kill", "HVDLITE_TIMELINE": str(tmp_path / "trace.json")}
    job = Job(["-np", "3", "--min-np", "1"], tmp_path, 100, environment, program="swallowing")
    try:
        told = job.succeed()
    finally:
        job.close()
    assert set(told) == {0, 1}
    errors = job.errors()
    for rank in ("[0]<stderr>:", "[1]<stderr>:"):
        warning = re.escape(rank) + r".* a world that has ended, the first in swallowing\(\), swallowing.py:"
        assert re.search(warning, errors), errors
    assert "[0]<stderr>:" in errors and "world 2 has no timeline: " in errors, errors
    assert "world 2, 2 ranks, goes on after commit 6; left: rank 2 on localhost (killed by signal 9 (SIGKILL)); it" in errors
