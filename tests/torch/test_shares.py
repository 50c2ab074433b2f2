"""Shares of global batches in a `MirroredStrategy`: training equals one process, and shares follow speeds."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.torch.programs import shares as programs
from tests.worlds import TORCH, processes


def test_random_shares_train_like_one_process() -> None:
    processes(3, programs.random_shares_train_like_one_process, imported=TORCH)


def test_shares_follow_speeds() -> None:
    processes(3, programs.shares_follow_speeds, imported=TORCH)


def test_evaluation_loops_and_breaks_leave_ranks_alike() -> None:
    processes(3, programs.evaluation_loops_and_breaks_leave_ranks_alike, imported=TORCH)


def test_a_cast_between_batches() -> None:
    processes(2, programs.casts_between_batches, imported=TORCH)
