"""`DistributedOptimizer(..., outer=)`: workers that train by themselves, on one host and on several."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.torch.programs import outer as programs
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes


@pytest.mark.parametrize(("hosts", "workers"), [((2,), "rank"), ((1, 1, 1), "host"), ((2, 2), "host")])
def test_local_sgd_at_every_step_is_synchronous_training(hosts: tuple[int, ...], workers: str) -> None:
    processes(sum(hosts), programs.equals_synchronous, workers, hosts=hosts, imported=TORCH,
              environment={"HVDLITE_REPLICA_CHECK_STEPS": "5"})


@pytest.mark.parametrize("hosts", [(2,), (3,), (1, 1, 2)])
def test_it_equals_the_oracle(hosts: tuple[int, ...]) -> None:
    processes(sum(hosts), programs.equals_the_oracle, hosts=hosts, imported=TORCH)


@pytest.mark.parametrize(("hosts", "workers"), [((2,), "rank"), ((1, 2), "host")])
def test_it_resumes_anywhere(hosts: tuple[int, ...], workers: str) -> None:
    processes(sum(hosts), programs.resumes_anywhere, workers, hosts=hosts, imported=TORCH)


def test_only_rank_zero_saves() -> None:
    processes(2, programs.only_rank_zero_saves, imported=TORCH)


def test_one_worker_is_a_plain_optimizer() -> None:
    ended = processes(2, programs.one_worker, imported=TORCH)
    assert "all 2 ranks are one worker" in ended[0].stderr, ended


def test_everything_is_merged_on_demand() -> None:
    processes(3, programs.synchronizes, environment={"HVDLITE_REPLICA_CHECK_STEPS": "1"}, imported=TORCH)


def test_dtypes() -> None:
    processes(2, programs.dtypes, imported=TORCH)


def test_two_optimizers_and_process_sets() -> None:
    processes(3, programs.two_optimizers_and_process_sets, environment={"HVDLITE_REPLICA_CHECK_STEPS": "2"}, imported=TORCH)


def test_the_next_world() -> None:
    processes(2, programs.goes_on_in_the_next_world, imported=TORCH)


def test_everything_is_merged_after_loading() -> None:
    processes(2, programs.synchronizes_after_loading, imported=TORCH)


def test_optimizer_state_is_broadcast_in_the_middle() -> None:
    processes(2, programs.broadcasts_in_the_middle, imported=TORCH)


def test_equal_buffers_stay() -> None:
    processes(2, programs.equal_buffers_stay, imported=TORCH)


def test_what_is_refused() -> None:
    processes(2, programs.refused, imported=TORCH)


@pytest.mark.parametrize("calls", [False, True])
def test_a_rank_that_skips_a_step_is_named(calls: bool) -> None:
    with Processes(2, programs.a_rank_skips_a_step, calls, imported=TORCH) as world:
        ended = world.wait(HANGS_SECONDS)
    assert "noticed" in ended[0].stdout, ended
