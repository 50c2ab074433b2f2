"""Errors, deaths and Ctrl-C inside `fit` and `tf.function`: told, and over soon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.tf.support import ENVIRONMENT, PROGRAMS, imported
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, Processes


@pytest.mark.parametrize(("fault", "kind", "told"), [
    ("raise", "PeerFailedError", "rank 1 failed with RuntimeError: out of paper"),
    ("kill", "PeerLostError", "rank 1 was lost")])
def test_the_others_end_soon_and_say_why(fault: str, kind: str, told: str) -> None:
    with Processes(2, f"{PROGRAMS}.faults:fit_with_a_fault", fault, environment=ENVIRONMENT,
                   imported=imported("tensorflow")) as world:
        world.wait_for(1, "there")
        begun = time.monotonic()
        assert world.ranks[0].wait(HANGS_SECONDS) != 0
        assert time.monotonic() - begun < 20
        assert told in world.told(0).stderr and f"caught {kind}\n" in world.told(0).stdout


def test_ctrl_c_ends_a_job_in_fit() -> None:
    script = f"from {PROGRAMS}.faults import fit_with_a_fault; fit_with_a_fault('none')"
    job = subprocess.Popen([*HVDRUN, "-np", "2", "--no-prefix", sys.executable, "-c", script], stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True,
                           env={**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH})
    assert job.stdout is not None
    assert [job.stdout.readline(), job.stdout.readline()] == ["there\n", "there\n"]
    job.send_signal(signal.SIGINT)
    begun = time.monotonic()
    job.communicate(timeout=HANGS_SECONDS)
    assert job.returncode == 130 and time.monotonic() - begun < 15
