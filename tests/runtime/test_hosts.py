"""Jobs on several hosts: to the ranks, hosts are what has a job directory of its own."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.runtime.programs import hosts as programs
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes

pytest.importorskip("torch")

@pytest.mark.parametrize(("hosts", "told"), [
    ((2, 2), [(0, 2, 0, 2, True), (1, 2, 0, 2, True), (0, 2, 1, 2, True), (1, 2, 1, 2, True)]),
    ((1, 3), [(0, 1, 0, 2, False), (0, 3, 1, 2, False), (1, 3, 0, 1, False), (2, 3, 0, 1, False)]),
])
def test_everything_works_between_hosts(hosts: tuple[int, ...], told: list[tuple[object, ...]]) -> None:
    ended = processes(sum(hosts), programs.collectives, hosts=hosts, imported=TORCH)
    assert [rank.result for rank in ended] == told


def test_hosts_whose_machines_reorder_stores_have_a_fence_each() -> None:
    processes(3, programs.collectives_where_stores_are_reordered, hosts=(2, 1), imported=TORCH)


def test_between_hosts_a_blocking_allreduce_needs_no_plane() -> None:
    processes(4, programs.a_blocking_allreduce_travels_with_its_requests, hosts=(2, 2), imported=TORCH)


@pytest.mark.parametrize(("hosts", "victim"), [((2, 2), 3), ((2, 2), 2), ((1, 3), 0), ((1, 1), 0)])
def test_a_death_on_another_host_is_named_by_all(hosts: tuple[int, ...], victim: int) -> None:
    with Processes(sum(hosts), programs.endless, hosts=hosts, imported=TORCH) as world:
        world.wait_for_all("moving")
        killed = time.monotonic()
        world.kill(victim)
        ended = world.wait(HANGS_SECONDS)
        took = time.monotonic() - killed
    for rank in ended:
        assert rank.code == (-9 if rank.rank == victim else 1), rank
    assert all(f"rank {victim} " in rank.stderr.splitlines()[-1] for rank in ended if rank.rank != victim)
    assert took < 15, "no time limit is tested, but that no timeout was waited for"


@pytest.mark.parametrize("victim", [2, 3])
def test_an_exception_on_another_host_is_everybodys_cause(victim: int) -> None:
    """Rank 2 leads rank 3."""
    with Processes(4, programs.an_exception_on_another_host_is_everybodys_cause, victim, hosts=(2, 2),
                   imported=TORCH) as world:
        ended = world.wait(HANGS_SECONDS)
    for rank in ended:
        assert rank.code == 1 and "no such column" in rank.stderr, rank
        assert rank.rank == victim or f"rank {victim} failed with KeyError" in rank.stderr, rank


@pytest.mark.parametrize("victim", [2, 0])
def test_a_rank_that_stops_answering_is_named_by_all(victim: int) -> None:
    """Rank 2, which speaks for rank 3, or rank 0, to whom it speaks."""
    with Processes(4, programs.endless, hosts=(2, 2), imported=TORCH, environment={
            "HVDLITE_HEARTBEAT_TIMEOUT": "3", "HVDLITE_SILENCE_CHECK_SECONDS": "1"}) as world:
        world.wait_for_all("moving")
        world.kill(victim, signal.SIGSTOP)
        for rank in range(4):
            if rank != victim:
                world.ranks[rank].wait(HANGS_SECONDS)
        world.kill(victim)
        ended = world.wait(HANGS_SECONDS)
    assert all(f"rank {victim} " in rank.stderr.splitlines()[-1] for rank in ended if rank.rank != victim), ended


def test_a_leader_that_leaves_first_still_speaks_for_its_host() -> None:
    processes(4, programs.a_leader_that_leaves_first_still_speaks_for_its_host, hosts=(2, 2), imported=TORCH)


def test_the_stall_report_names_the_one_whom_a_host_waits_for() -> None:
    """Rank 2 has reported the bucket to its leader, itself, which holds it back for rank 3."""
    with Processes(4, programs.the_stall_report_names_the_one_whom_a_host_waits_for, hosts=(2, 2), imported=TORCH,
                   environment={"HVDLITE_STALL_CHECK_TIME_SECONDS": "1"}) as world:
        world.wait_for(0, "waited", stream="stderr")
        world.wait_for(0, "time.sleep(600)", stream="stderr")
        for rank in range(4):
            world.kill(rank)
        told = world.wait(HANGS_SECONDS)[0].stderr
    assert "enqueued by ranks [0, 1, 2], not yet by ranks [3]" in told


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_under_gloo_on_one_host(victim: int) -> None:
    with Processes(3, programs.endless, environment={"HVDLITE_CPU_OPERATIONS": "gloo"}, imported=TORCH) as world:
        world.wait_for_all("moving")
        world.kill(victim)
        ended = world.wait(HANGS_SECONDS)
    for rank in ended:
        assert rank.code == (-9 if rank.rank == victim else 1), rank
        assert rank.rank == victim or f"rank {victim} " in rank.stderr.splitlines()[-1]


def test_gloo_can_be_closed_where_data_still_arrives_for_an_operation_that_has_failed() -> None:
    """Gloo does not take it then, and its thread does not end before there is nothing to take (gloo_listener.py)."""
    with Processes(3, programs.a_death_in_a_large_exchange, environment={"HVDLITE_CPU_OPERATIONS": "gloo"},
                   imported=TORCH) as world:
        ended = world.wait(HANGS_SECONDS)
    assert [rank.code for rank in ended] == [1, -9, 1]
    assert not any("gave up" in rank.stderr for rank in ended), ended


def test_gloo_leaves_the_scripts_own_process_group_alone(tmp_path: Path) -> None:
    processes(2, programs.gloo_leaves_the_scripts_own_process_group_alone, str(tmp_path / "meet"),
              environment={"HVDLITE_CPU_OPERATIONS": "gloo"}, imported=TORCH)


@pytest.mark.parametrize("control", ["auto", "tcp"])
def test_training_between_hosts_gives_the_same_parameters(control: str) -> None:
    """Learned buckets, broadcast and the eager lane, on uneven hosts with and without leaders, with 16-bit gradients."""
    ended = processes(3, programs.training_between_hosts_gives_the_same_parameters, hosts=(1, 2), imported=TORCH,
                      environment={"HVDLITE_CONTROL": control})
    assert len({rank.result for rank in ended}) == 1


def test_0_seconds_are_never() -> None:
    """Rank 1 comes when rank 0 waits in init(), leaves when it waits in shutdown(), and is silent in between."""
    never = ("START_TIMEOUT", "SHUTDOWN_TIMEOUT", "HEARTBEAT_TIMEOUT", "GLOO_TIMEOUT", "STALL_CHECK_TIME_SECONDS",
             "STALL_SHUTDOWN_TIME_SECONDS", "SILENCE_CHECK_SECONDS")
    ended = processes(2, programs.zero_seconds_are_never, hosts=(1, 1), imported=TORCH,
                      environment={f"HVDLITE_{name}": "0" for name in never})
    assert not any(rank.stderr for rank in ended), ended
