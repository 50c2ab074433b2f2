"""Optimizers, tapes and compiled functions of TensorFlow and Keras in elastic jobs, whose worlds they outlive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.elastic_jobs import ElasticJob
from tests.tf.support import ENVIRONMENT, PROGRAMS, imported


def grown_and_shrunk(program: str, gate: Path, backend: str) -> list[Any]:
    """Run a job of one member, then of three, then without the first one; return what the last two returned, by rank."""
    environment = {**ENVIRONMENT, "KERAS_BACKEND": backend}
    with ElasticJob(f"{PROGRAMS}.worlds:{program}", str(gate), slots={"a": 1}, environment=environment,
                    imported=imported(backend), min_np=1) as job:
        job.until_printed(0, "trained in world 1\n")
        job.see({"a": 3})
        job.until(lambda: any(len(order.members) == 3 for order in job.orders.values()))
        for member in range(3):
            job.until_printed(member, f"trained in world {max(job.orders)}\n")
        job.kill(0)
        job.until(lambda: 0 not in job.orders[max(job.orders)].members)
        members = job.orders[max(job.orders)].members
        for member in members:
            job.until_printed(member, f"trained in world {max(job.orders)}\n")
        gate.touch()
        results = job.finish()
    return [results[member] for member in members]


def test_functions_outlive_worlds_of_other_sizes(tmp_path: Path) -> None:
    results = grown_and_shrunk("train_elastically", tmp_path / "gate", "tensorflow")
    assert [worlds[-1] for worlds, _ in results] == [(0, 2), (1, 2)]
    assert all(traces == 2 for _, traces in results)


@pytest.mark.parametrize("backend", ["torch", pytest.param("tensorflow", marks=pytest.mark.long),
                                     pytest.param("jax", marks=pytest.mark.long)])
def test_optimizers_of_keras_outlive_worlds(tmp_path: Path, backend: str) -> None:
    results = grown_and_shrunk("fit_elastically", tmp_path / "gate", backend)
    assert [worlds[-1] for worlds in results] == [(0, 2), (1, 2)]
