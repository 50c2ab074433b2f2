"""A torch script whose process joins a running elastic job."""

from __future__ import annotations

from pathlib import Path

from tests.elastic_jobs import ElasticJob
from tests.torch.programs.joining import join
from tests.worlds import TORCH


def test_a_joiner_runs_the_same_script(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ElasticJob(join, str(gate), slots={"a": 1}, imported=TORCH) as job:
        job.until_printed(0, "world of 1")
        job.see({"a": 2})
        job.until_printed(1, "world of 2")
        gate.touch()
        results = job.finish()
    assert results[0] == results[1]
