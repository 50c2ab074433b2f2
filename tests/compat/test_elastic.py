"""Elastic scripts for Horovod under `hvdrun --horovod-compat`: one rank is killed, and another one joins."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.runner.elastic_jobs import HostsFile, Job
from tests.worlds import PYTHON_PATH, clean_environment

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("framework", "script"), [("torch", "elastic_torch.py"), ("tensorflow", "elastic_keras.py")],
                         ids=["torch", "keras"])
def test_a_rank_is_killed_and_another_one_joins(framework: str, script: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    with tempfile.TemporaryDirectory() as name:  # a short one, for sockets
        folder = Path(name)
        hosts, gate = HostsFile(folder), folder / "gate"
        hosts.write("localhost:1", "127.0.0.1:1")  # two hosts: a failure bars a whole one, as Horovod's rule is
        environment = {**clean_environment(), "PYTHONPATH": PYTHON_PATH, "TF_CPP_MIN_LOG_LEVEL": "3"}
        with Job(folder, "-np", "2", "--min-np", "1", "--max-np", "2", "--horovod-compat", *hosts.flags,
                 program=[sys.executable, str(PROGRAMS / script), str(gate)], environment=environment) as job:
            job.wait_for("trains in process", 2)
            pids = {found[1]: int(found[2]) for found in re.finditer(r"rank (\d) of 2 trains in process (\d+)", job.text)}
            os.kill(pids["1"], signal.SIGKILL)
            assert f"rank 0 of 1 trains in process {pids['0']}" in job.wait_for("rank 0 of 1 trains")
            hosts.write("localhost:1", "127.0.0.2:1")
            job.wait_for("of 2 trains", 2)
            gate.touch()
            assert job.end() == 0, job.text
            assert job.text.count("done with 2") == 2 and "no more processes are started on 127.0.0.1" in job.text, job.text
