"""Ordered groups of processes: what only processes can show: deaths, forks, leftovers, the job that they share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.groups.programs import groups as programs
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes, shared_memory


def test_groups_that_overlap(tmp_path: Path) -> None:
    processes(4, programs.overlapping_groups, str(tmp_path), 4)


def test_a_group_uses_the_job_that_the_launcher_describes(tmp_path: Path) -> None:
    for ended in processes(2, programs.uses_the_job_of_the_launcher, str(tmp_path), 2):
        assert ended.result == [False] and ended.stderr == ""


def test_without_a_launcher_the_first_group_begins_a_job(tmp_path: Path) -> None:
    with Processes(1, programs.without_launcher, "begins_a_job_without_launcher", str(tmp_path), 0, 2) as first, \
            Processes(1, programs.without_launcher, "begins_a_job_without_launcher", str(tmp_path), 1, 2) as second:
        for world in (first, second):
            (ended,) = world.wait(HANGS_SECONDS)
            assert ended.code == 0, ended


def test_closed_groups_leave_nothing_behind(tmp_path: Path) -> None:
    before = shared_memory()
    processes(2, programs.leaves_nothing_behind, str(tmp_path), 2)
    assert shared_memory() <= before


@pytest.mark.parametrize("shares", [True, False], ids=["on the job's runtime", "a world of its own"])
@pytest.mark.parametrize(("how", "said"), [
    ("breaks", "PeerFailedError: rank 1 failed with TypeError: 'NoneType' object is not callable"),
    ("dies", "PeerLostError: rank 1 was lost"), ("fails", "PeerFailedError: rank 1 failed with KeyError: 'no such column'"),
    ("returns", "PeerLeftError: ")])
def test_all_hear_at_once_of_a_rank_that_ends(tmp_path: Path, how: str, said: str, shares: bool) -> None:
    with Processes(3, programs.one_ends, str(tmp_path), 3, how, 1, shares) as world:
        if how == "dies":
            world.wait_for(1, "ready")
            world.kill(1)
        for ended in world.wait(HANGS_SECONDS):
            if ended.rank == 1:
                assert ended.code == {"dies": -signal.SIGKILL, "fails": 1, "returns": 0, "breaks": 0}[how]
            else:
                assert ended.code == 1, ended
                assert said in ended.stderr or f"the same {said.partition(':')[0]} as another rank" in ended.stderr, ended


def test_a_rank_is_killed_in_the_middle_of_reductions(tmp_path: Path) -> None:
    with Processes(3, programs.one_dies_in_the_middle, str(tmp_path), 3) as world:
        for ended in world.wait(HANGS_SECONDS):
            code, said = (-signal.SIGKILL, "") if ended.rank == 1 else (0, "rank 1\n")
            assert (ended.code, ended.stdout) == (code, said), ended


def test_a_forked_child_has_no_group(tmp_path: Path) -> None:
    processes(2, programs.a_fork, str(tmp_path))


def test_a_rank_that_does_not_come_is_in_the_stall_report(tmp_path: Path) -> None:
    with Processes(3, programs.one_comes_late, str(tmp_path), 3,
                   environment={"HVDLITE_STALL_CHECK_TIME_SECONDS": "0.5"}) as world:
        world.wait_for(0, "it is in in_the_data_loader()", stream="stderr")
        (tmp_path / "reported").touch()
        ended = world.wait(HANGS_SECONDS)
    assert not any(each.code for each in ended), ended
    told = ended[0].stderr
    assert ("'process group world, call 2: all_reduce(SUM, float32[4])' has waited" in told
            and "enqueued by ranks [0, 1], not yet by ranks [2]" in told)


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    processes(2, programs.ranks_that_do_not_fit, str(tmp_path))


def test_several_hosts(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # Gloo
    ended = processes(4, programs.several_hosts, str(tmp_path), 4, hosts=[2, 2], imported=TORCH)
    assert ended[3].stdout == "PeerLeftError\n"
