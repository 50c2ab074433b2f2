"""`DistributedOptimizer(..., outer=...)` for Keras: workers train by themselves and exchange their changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tf.support import run


@pytest.mark.parametrize(("backend", "size"), [
    ("tensorflow", 2), ("torch", 2), ("torch", 3), ("jax", 2),
    pytest.param("tensorflow", 3, marks=pytest.mark.long), pytest.param("jax", 3, marks=pytest.mark.long)])
def test_workers_train_by_themselves(backend: str, size: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")
    run(size, "outer:trains", str(tmp_path), KERAS_BACKEND=backend, HVDLITE_REPLICA_CHECK_STEPS="3")


def test_workers_of_several_ranks() -> None:
    run(3, "outer:workers_of_several_ranks", hosts=(2, 1), KERAS_BACKEND="torch")


def test_one_worker() -> None:
    run(2, "outer:one_worker", KERAS_BACKEND="torch")


def test_a_rank_that_skips_a_step_is_told() -> None:
    ended = run(2, "outer:a_rank_skips_a_step", KERAS_BACKEND="torch")
    assert all("outer exchange of fragment 0, begun at step " in rank.stdout and "different numbers of steps" in rank.stdout
               for rank in ended), ended
