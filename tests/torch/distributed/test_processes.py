"""Process groups of processes: what torch builds on them, groups that overlap, ends, and bad input."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.torch.distributed.programs import groups as programs
from tests.torch.distributed.programs import training
from tests.worlds import HANGS_SECONDS, TORCH, Processes, processes, shared_memory


def test_trainings_equal_those_on_gloo(tmp_path: Path) -> None:
    processes(2, training.trainings, str(tmp_path), imported=TORCH)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler (g++)")
def test_a_step_compiled_by_inductor(tmp_path: Path) -> None:
    processes(2, training.compiled_by_inductor, str(tmp_path), imported=TORCH)


def test_a_hook_whose_callbacks_communicate(tmp_path: Path) -> None:
    processes(2, training.powerSGD, str(tmp_path), imported=TORCH)


@pytest.mark.parametrize("program", [
    programs.beside_gloo, programs.another_device, programs.questions, programs.not_a_member, programs.destroyed,
    programs.destroyed_under_way, programs.destroyed_by_an_exception, programs.never_destroyed, programs.counts_steps,
    programs.forks, programs.leftovers], ids=lambda program: program.__name__)
def test_two_ranks(tmp_path: Path, program: object) -> None:
    before = shared_memory()
    for ended in processes(2, program, str(tmp_path), imported=TORCH):  # type: ignore[arg-type]
        assert "Traceback" not in ended.stderr and "gave up" not in ended.stderr, ended
    assert shared_memory() <= before


def test_groups_that_overlap(tmp_path: Path) -> None:
    processes(4, programs.overlapping_groups, str(tmp_path), imported=TORCH)


def test_sends_and_receives(tmp_path: Path) -> None:
    processes(3, programs.transfers, str(tmp_path), imported=TORCH)


def test_sizes_that_differ(tmp_path: Path) -> None:
    for ended in processes(2, programs.one_has_another_size, str(tmp_path), imported=TORCH):
        assert ended.result == "the ranks do not agree on their number: [2, 3]", ended


def test_backends_that_differ(tmp_path: Path) -> None:
    gloo, ours = processes(2, programs.one_has_another_backend, str(tmp_path), imported=TORCH)
    assert gloo.result != "no error"
    said = "LaunchError, a DistBackendError: default process group: rank 1 has waited in vain for rank 0; all 2 ranks must "
    assert str(ours.result).startswith(f"{said}make the group, with the same backend: "), ours


def test_a_rank_dies(tmp_path: Path) -> None:
    with Processes(2, programs.one_dies, str(tmp_path), imported=TORCH) as world:
        world.wait_for(1, "ready")
        world.kill(1)
        first, second = world.wait(HANGS_SECONDS)
    assert second.code == -signal.SIGKILL and first.code == 1
    assert "rank 1 was lost" in first.stderr
    assert "rank 1 was lost" in first.stdout.partition("in backward: ")[2], "DDP passes the error on"
