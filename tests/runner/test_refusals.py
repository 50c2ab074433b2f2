"""hvdrun where the system refuses something that was asked for, or lacks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, clean_environment

ENVIRONMENT = {**clean_environment(), "PYTHONPATH": PYTHON_PATH}
HVDRUN_THAT_MAY_NOT_BIND = """
import errno, os, sys
from hvdlite_runner.__main__ import main

def refuse(pid, cores):
    raise OSError(errno.EPERM, "Operation not permitted")

os.sched_setaffinity = refuse
sys.exit(main())
"""


@pytest.mark.parametrize("elastic", [(), ("--min-np", "2")])
def test_ranks_that_may_not_be_bound_run_on_any_core(elastic: tuple[str, ...]) -> None:
    ended = subprocess.run([sys.executable, "-c", HVDRUN_THAT_MAY_NOT_BIND, "-np", "2", *elastic, "--bind", "--no-prefix",
                            sys.executable, "-c", "import hvdlite; hvdlite.init(); print('ran'); hvdlite.shutdown()"],
                           capture_output=True, text=True, timeout=HANGS_SECONDS, env=ENVIRONMENT, check=False)
    assert ended.returncode == 0 and ended.stdout.count("ran") == 2 and "Traceback" not in ended.stderr, ended
    refused = "may run on any core: this system does not bind it to some (--bind): Operation not permitted"
    assert ended.stderr.count(refused) == 2, ended


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2, for a namespace")
@pytest.mark.parametrize(("loopback", "expected"), [
    ("ip link set lo up; ip addr del 127.0.0.1/8 dev lo", ""),
    ("true", "this host has neither 127.0.0.1 nor ::1: run `ip link set lo up`")])
def test_ranks_of_one_host_meet_by_tcp_with_the_loopback_that_there_is(loopback: str, expected: str) -> None:
    script = "import hvdlite as h, numpy as n; h.init(); print(h.allreduce(n.ones(1), op=h.Sum)[0]); h.shutdown()"
    ended = subprocess.run(["unshare", "-n", "sh", "-c", f"{loopback}; exec \"$@\"", "sh",
                            *HVDRUN, "-np", "2", "--no-prefix", sys.executable, "-c", script],
                           capture_output=True, text=True, timeout=HANGS_SECONDS, check=False,
                           env={**ENVIRONMENT, "HVDLITE_CONTROL": "tcp"})
    if "unshare" in ended.stderr:
        pytest.skip(f"no such network namespace here: {ended.stderr}")
    if expected:
        assert ended.returncode == 2 and expected in ended.stderr and ended.stderr.count("\n") == 1, ended
    else:
        assert ended.returncode == 0 and ended.stdout == "2.0\n2.0\n", ended
