"""`DistributedOptimizer(..., sharded=True)`: bit for bit like the whole optimizer, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.torch.programs import sharded as programs
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes


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


def test_what_is_refused() -> None:
    processes(2, programs.refused, imported=TORCH)


def test_some_ranks() -> None:
    processes(3, programs.some_ranks, imported=TORCH)


def test_a_rank_dies_in_its_step() -> None:
    with Processes(3, programs.a_rank_dies_in_its_step, imported=TORCH) as world:
        ended = world.wait(HANGS_SECONDS)
    assert [rank.code for rank in ended] == [4, 3, 4], ended
    assert all("noticed" in rank.stdout for rank in (ended[0], ended[2]))
