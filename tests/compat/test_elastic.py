"""Elastic scripts for Horovod: a rank is killed, and another one joins. Under hvdrun: test_horovod_elastic.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.elastic_jobs import ElasticJob
from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import TORCH

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("script", "begun_with", "environment"), [
    ("elastic_torch.py", TORCH, {}), ("elastic_keras.py", imported("tensorflow"), ENVIRONMENT)], ids=["torch", "keras"])
def test_a_rank_is_killed_and_another_one_joins(tmp_path: Path, script: str, begun_with: Sequence[str],
                                                environment: Mapping[str, str]) -> None:
    if importlib.util.find_spec(begun_with[0]) is None:
        pytest.skip(f"needs {begun_with[0]}")
    gate = tmp_path / "gate"
    with ElasticJob("tests.compat.running:run_for_horovod", str(PROGRAMS / script), str(gate),
                    slots={"a": 1, "b": 1}, environment=environment, imported=begun_with, min_np=1) as job:
        for member in (0, 1):
            job.until_printed(member, "of 2 trains in process")
        job.kill(1)
        job.until_printed(0, f"rank 0 of 1 trains in process {job.processes[0].pid}")
        job.see({"a": 1, "c": 1})
        job.until_printed(2, "of 2 trains in process")
        gate.touch()
        job.finish()
        assert all("done with 2" in job.output(member) for member in (0, 2)), job
