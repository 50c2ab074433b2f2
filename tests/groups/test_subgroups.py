"""Groups of some ranks of a job: objects on its runtime, without threads and descriptors of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.elastic_jobs import ElasticJob
from tests.groups.programs import subgroups as programs
from tests.worlds import HANGS_SECONDS, NUMPY, TORCH, Processes, processes, shared_memory

HOSTS = pytest.mark.parametrize("hosts", [[3], [1, 2]], ids=["one host", "two hosts"])


def test_many_groups_cost_no_descriptors(tmp_path: Path) -> None:
    before = shared_memory()
    processes(4, programs.many, str(tmp_path), 4, 300)
    assert shared_memory() <= before


def test_memory_comes_back_when_all_have_closed_a_group(tmp_path: Path) -> None:
    processes(2, programs.memory_comes_back, str(tmp_path), 2)


@HOSTS
@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_who_makes_a_group_with_a_rank_that_is_lost_hears_it_at_once(tmp_path: Path, how: str, hosts: list[int]) -> None:
    if hosts[1:]:
        pytest.importorskip("torch")  # Gloo
    imported = TORCH if hosts[1:] else NUMPY
    with Processes(3, programs.one_is_lost, str(tmp_path), 3, how, hosts=hosts, imported=imported) as world:
        world.wait_for(2, "ready")
        if how == "dies":
            world.kill(2)
        for ended in world.wait(HANGS_SECONDS):
            assert ended.code == (-signal.SIGKILL if how == "dies" and ended.rank == 2 else 0), ended


def test_a_rank_that_does_not_come_is_named_after_the_groups_timeout(tmp_path: Path) -> None:
    processes(3, programs.one_does_not_come, str(tmp_path), 3)


def test_a_group_that_breaks_does_not_end_the_job(tmp_path: Path) -> None:
    processes(3, programs.a_group_that_breaks, str(tmp_path), 3)


def test_who_waits_in_a_collective_takes_messages(tmp_path: Path) -> None:
    processes(2, programs.a_message_for_a_thread_in_a_collective, str(tmp_path))


def test_groups_belong_to_one_world_of_an_elastic_job(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ElasticJob(programs.in_each_world, str(gate), slots={"a": 3}, min_np=2, hosts_are_fixed=True) as job:
        for member in range(3):
            job.until_printed(member, "world of 3")
        job.kill(1)
        for member in (0, 2):
            job.until_printed(member, "world of 2")
        gate.touch()
        assert job.finish() == {0: [3, 2], 2: [3, 2]}
