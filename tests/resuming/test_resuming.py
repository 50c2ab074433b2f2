"""Some jobs of the campaign: `python -m tests.resuming` runs random ones."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")

from tests.resuming.campaign import FULL, WRITES, Job, Run, attempt


@pytest.mark.parametrize("workers", [0, 2])
def test_other_numbers_of_ranks_take_each_sample_once(workers: int) -> None:
    runs = [Run(1, signal.SIGTERM, 0.1, 0), Run(4, signal.SIGKILL, 0.1, 3), Run(2, signal.SIGUSR1, 0.05, 1)]
    assert attempt(Job("torch", workers, 2, runs))[0] == []


def test_losses_are_those_of_an_undisturbed_run() -> None:
    runs = [Run(2, signal.SIGKILL, 0.1, 0), Run(2, WRITES, 0.0, 1), Run(2, signal.SIGTERM, 0.05, 0)]
    wrong, ended = attempt(Job("torch", 0, 2, runs))
    assert wrong == [] and ended >= 2


def test_fit_with_checkpoints_takes_each_sample_once() -> None:
    pytest.importorskip("tensorflow")
    runs = [Run(2, signal.SIGTERM, 0.1, 1), Run(2, signal.SIGKILL, 0.1, 0)]
    assert attempt(Job("keras", 0, 5, runs))[0] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")
def test_a_full_disk_loses_no_older_checkpoint() -> None:
    wrong, ended = attempt(Job("torch", 0, 2, [Run(2, FULL, 0.1, 0)]), full_disk=True)
    assert wrong == [] and ended == 1
