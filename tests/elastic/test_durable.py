"""Elastic jobs that end before their time leave a checkpoint, from which another job goes on without a lost step."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdlite.training.checkpoints import load
from tests.elastic.campaign import two_hosts
from tests.elastic.jobs import Job
from tests.runner.networks import Hosts, unavailable
from tests.worlds import HANGS_SECONDS

pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")


def _begin(folder: Path, *flags: str, bodies: str = "1", hosts: Hosts | None = None) -> Job:
    """Begin a job that ends some steps after the file "end" is in the folder of what it tells."""
    folder.mkdir()
    environment = {"CHECKPOINTS": str(folder.parent / "checkpoints"), "BODIES": bodies, "UNTIL": "end"}
    return Job(["-np", "2", "--min-np", "1", *flags], folder, 1, environment, hosts=hosts)


def _step(tmp_path: Path) -> int:
    found = load(tmp_path / "checkpoints")
    assert found is not None
    return int(found["step"])


@pytest.mark.parametrize("bodies", ["0", "1"], ids=["commits", "bodies"])
def test_too_few_ranks_leave_a_checkpoint(bodies: str, tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := _begin(tmp_path / "first", "--min-np", "2", "--elastic-timeout", "1", bodies=bodies))
    job.wait_for_all(2)
    job.wait_for_step(20)
    job.kill(1)
    assert not job.end() and job.process.returncode == 75, job.errors()
    step = _step(tmp_path)
    assert step >= 15 and (bodies == "0" or step == job.step_of(0)), "no finished body is lost"
    jobs.append(job := _begin(tmp_path / "second"))
    (job.told / "end").touch()
    told = job.succeed(lost=set(), lost_hosts=())
    assert all(each.right and each.history[step][0] == step for each in told.values())
    assert f"hvdlite: training goes on from a checkpoint in {tmp_path / 'checkpoints'}" in job.errors()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_hvdrun_ends_and_ranks_leave_a_checkpoint(number: int, tmp_path: Path, jobs: list[Job]) -> None:
    """In the middle of steps; nothing is left, though the grace is longer than the test may take."""
    jobs.append(job := _begin(tmp_path / "first", "--grace", "1000"))
    job.wait_for_all(2)
    job.wait_for_step(20)
    job.process.send_signal(number)
    job.process.wait(HANGS_SECONDS)
    job.end_of_orphans()
    assert not job.end() and job.process.returncode == (-number if number == signal.SIGKILL else 128 + number), job.errors()
    assert _step(tmp_path) == job.step_of(0) + 1 == job.step_of(1) + 1


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_hvdrun_is_killed_and_ranks_of_another_host_leave_a_checkpoint_too(tmp_path: Path, jobs: list[Job]) -> None:
    with two_hosts() as hosts:
        assert hosts is not None
        slots = ",".join(f"{hosts.address(name)}:1" for name in hosts.names)
        jobs.append(job := _begin(tmp_path / "first", "-H", slots, "--grace", "1000", hosts=hosts))
        job.wait_for_all(2)
        job.wait_for_step(20)
        job.process.kill()
        job.process.wait(HANGS_SECONDS)
        job.end_of_orphans()
        assert not job.end()
        assert _step(tmp_path) == job.step_of(0) + 1 == job.step_of(1) + 1


def test_all_ranks_get_sigterm(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := _begin(tmp_path / "first", "--grace", "4"))
    job.wait_for_all(2)
    for member in (0, 1):
        job.kill(member, signal.SIGTERM)
    assert not job.end() and job.process.returncode == 75, job.errors()
    assert _step(tmp_path) == job.step_of(0) + 1 == job.step_of(1) + 1
