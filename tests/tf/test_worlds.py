"""Compiled functions of TensorFlow in an elastic job: traced once, they reduce over the ranks of each world."""

from __future__ import annotations

from pathlib import Path

from tests.elastic_jobs import ElasticJob
from tests.tf.support import ENVIRONMENT, PROGRAMS


def test_functions_outlive_worlds_of_other_sizes(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    program = f"{PROGRAMS}.worlds:train_elastically"
    with ElasticJob(program, str(gate), slots={"a": 1}, environment=ENVIRONMENT, min_np=1) as job:
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
    assert [results[member][0][-1] for member in members] == [(0, 2), (1, 2)]
    assert all(traces == 2 for _, traces in results.values())
