"""Elastic scripts for Horovod, one of them under `hvdrun --horovod-compat`: a rank is killed, and another one joins."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.elastic_jobs import ElasticJob
from tests.runner.elastic_jobs import HostsFile, Job
from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import PYTHON_PATH, clean_environment

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.slow


def test_a_rank_is_killed_and_another_one_joins() -> None:
    pytest.importorskip("torch")
    with tempfile.TemporaryDirectory() as name:  # a short one, for sockets
        folder = Path(name)
        hosts, gate = HostsFile(folder), folder / "gate"
        hosts.write("localhost:1", "127.0.0.1:1")  # two hosts: a failure bars a whole one, as Horovod's rule is
        environment = {**clean_environment(), "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1"}
        with Job(folder, "-np", "2", "--min-np", "1", "--max-np", "2", "--horovod-compat", *hosts.flags,
                 program=[sys.executable, str(PROGRAMS / "elastic_torch.py"), str(gate)], environment=environment) as job:
            job.wait_for("trains in process", 2)
            pids = {found[1]: int(found[2]) for found in re.finditer(r"rank (\d) of 2 trains in process (\d+)", job.text)}
            os.kill(pids["1"], signal.SIGKILL)
            assert f"rank 0 of 1 trains in process {pids['0']}" in job.wait_for("rank 0 of 1 trains")
            hosts.write("localhost:1", "127.0.0.2:1")
            job.wait_for("of 2 trains", 2)
            gate.touch()
            assert job.end() == 0, job.text
            assert job.text.count("done with 2") == 2 and "no more processes are started on 127.0.0.1" in job.text, job.text


def test_a_rank_of_keras_is_killed_and_another_one_joins(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs tensorflow")
    gate = tmp_path / "gate"
    with ElasticJob("tests.compat.running:run_for_horovod", str(PROGRAMS / "elastic_keras.py"), str(gate),
                    slots={"a": 1, "b": 1}, environment=ENVIRONMENT, imported=imported("tensorflow"), min_np=1) as job:
        for member in (0, 1):
            job.until_printed(member, "of 2 trains in process")
        job.kill(1)
        job.until_printed(0, "rank 0 of 1 trains in process")
        job.see({"a": 1, "c": 1})
        job.until_printed(2, "of 2 trains in process")
        gate.touch()
        job.finish()
        assert all("done with 2" in job.output(member) for member in (0, 2)), job
