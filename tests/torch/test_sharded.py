"""`DistributedOptimizer(..., sharded=True)`: bit for bit like the whole optimizer, on any number of ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.torch.programs import sharded as programs
from tests.torch.programs import sharded_failures as failures
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes, shared_memory


@pytest.mark.parametrize("hosts", [(2,), (3,), (1, 2)])
def test_every_optimizer_trains_as_unsharded(hosts: tuple[int, ...]) -> None:
    processes(sum(hosts), programs.equals_unsharded, hosts=hosts, imported=TORCH)


def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    processes(2, programs.half_on_these_ranks, str(tmp_path), False, imported=TORCH)
    processes(3, programs.half_on_these_ranks, str(tmp_path), True, imported=TORCH)


def test_a_durable_checkpoint(tmp_path: Path) -> None:
    processes(2, programs.durable, str(tmp_path), False, imported=TORCH)
    processes(3, programs.durable, str(tmp_path), True, imported=TORCH)


def test_state_is_taken_over_from_the_root() -> None:
    processes(2, programs.state_is_taken_over_from_the_root, imported=TORCH)


def test_memory_is_used_again() -> None:
    processes(2, programs.memory_is_used_again, imported=TORCH)


def test_hooks_and_checks() -> None:
    processes(2, programs.hooks_and_checks, environment={"HVDLITE_REPLICA_CHECK_STEPS": "1"}, imported=TORCH)


def test_what_changes_between_steps() -> None:
    processes(2, programs.what_changes_between_steps, imported=TORCH)


def test_unusual_parameters_and_state() -> None:
    processes(2, failures.unusual_parameters_and_state, imported=TORCH)


def test_what_is_refused() -> None:
    processes(2, programs.refused, imported=TORCH)


def test_some_ranks() -> None:
    processes(3, programs.some_ranks, imported=TORCH)


def test_sparse_gradients() -> None:
    processes(2, programs.sparse_gradients, imported=TORCH)


def test_a_rank_is_killed_in_its_step() -> None:
    before = shared_memory()
    with Processes(3, failures.a_rank_is_killed_in_its_step, imported=TORCH) as world:
        ended = world.wait(HANGS_SECONDS)
    assert [rank.code for rank in ended] == [4, -signal.SIGKILL, 4], ended
    assert all("noticed" in rank.stdout for rank in (ended[0], ended[2]))
    assert shared_memory() <= before


@pytest.mark.parametrize(("hosts", "scheduler_first"), [((3,), False), ((1, 1, 1), True)])
def test_a_step_raises_on_an_owner(hosts: tuple[int, ...], scheduler_first: bool) -> None:
    processes(3, failures.step_raises_on_an_owner, scheduler_first, hosts=hosts, imported=TORCH)


@pytest.mark.parametrize("wait_in", ["backward", "step"])
def test_a_step_raises_before_its_update(wait_in: str) -> None:
    processes(3, failures.step_raises_before_its_update, environment={"HVDLITE_WAIT_IN": wait_in}, imported=TORCH)


def test_an_interrupted_step() -> None:
    processes(2, failures.step_is_interrupted, imported=TORCH)


def test_a_forked_child() -> None:
    processes(2, failures.forked, imported=TORCH)


def test_a_rank_has_joined() -> None:
    processes(2, failures.joined, imported=TORCH)


def test_a_step_that_raises_may_end_the_script() -> None:
    with Processes(2, failures.step_raises_and_ends_the_script, imported=TORCH) as world:
        ended = world.wait(HANGS_SECONDS)
    assert [rank.code for rank in ended] == [1, 1], ended
    assert "StepFailedError: step() of a sharded optimizer has raised on rank 1" in ended[0].stderr
    assert "ZeroDivisionError: the cause" in ended[1].stderr and "StepFailedError" not in ended[1].stderr


@pytest.mark.parametrize(("hosts", "hook"), [((2,), False), ((2, 1), False), ((2,), True)])
def test_only_some_ranks_shard(hosts: tuple[int, ...], hook: bool) -> None:
    processes(sum(hosts), failures.only_some_ranks_shard, hook, hosts=hosts, imported=TORCH)


def test_without_state() -> None:
    processes(2, failures.without_state, imported=TORCH)


def test_parts_of_a_model_are_saved_alone() -> None:
    processes(2, failures.saved_parts, imported=TORCH)


def test_who_owns_how_much() -> None:
    for rank in processes(2, failures.memory, imported=TORCH):
        ranks, text, uneven = rank.result
        assert sorted(each["owned"] for each in ranks) == [2 * 40_000, 3 * 40_000]
        assert all(2 * each["owned"] <= each["optimizer"] < 2 * each["owned"] + 100 for each in ranks), "two moments"
        assert len(text.splitlines()) == 3 and "owned, MiB" in text.splitlines()[0]
        assert uneven.splitlines()[3] == ("sharded=True: '4.weight' is 96% of all parameters, and a parameter is owned as a "
                                          "whole: rank 0 has it, where an equal part of 2 ranks is 50%")
