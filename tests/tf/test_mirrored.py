"""`MirroredStrategy`: two ranks with global batches equal one process, through `fit` and in custom loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tf.support import run


@pytest.mark.parametrize(("backend", "optimizer", "options"), [
    ("tensorflow", "sgd", {"steps_per_execution": 3}), ("torch", "adam", {}),
    pytest.param("jax", "adam", {}, marks=pytest.mark.long),
], ids=["tensorflow-lambda: 'sgd', dict(steps_per_execution=3)", "torch-adam, {}", "jax-adam, {}"])
def test_fit_evaluate_and_predict_equal_one_process(backend: str, optimizer: str, options: dict[str, Any]) -> None:
    run(2, "mirrored:fit_evaluate_and_predict_equal_one_process", optimizer, options, KERAS_BACKEND=backend)


def test_callbacks_checkpoints_and_backups(tmp_path: Path) -> None:
    run(2, "mirrored:callbacks_checkpoints_and_backups", str(tmp_path))


def test_the_tutorials_custom_loop() -> None:
    run(2, "mirrored:the_tutorials_custom_loop")


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_the_scope_leaves_nothing_behind(backend: str) -> None:
    run(2, "mirrored:the_scope_leaves_nothing_behind", KERAS_BACKEND=backend)


def test_mixed_precision_embeddings_dropout_and_normalization() -> None:
    run(2, "mirrored:mixed_precision_embeddings_dropout_and_normalization")


def test_the_strategy_alone() -> None:
    run(1, "strategy_alone:a_strategy_alone")


def test_without_a_launcher_there_is_one_replica_and_launch_starts_more() -> None:
    run(1, "mirrored:without_a_launcher_there_is_one_replica_and_launch_starts_more")
