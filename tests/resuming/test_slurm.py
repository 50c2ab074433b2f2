"""A real Slurm queues a job again: after its warning, and after `scontrol requeue`; no sample is lost or counts twice."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")

from tests.resuming.campaign import judged, ledger_of
from tests.runner import slurm
from tests.worlds import HANGS_SECONDS, PYTHON_PATH, ROOT

WHY_NOT = slurm.unavailable()


@pytest.mark.long
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_job_is_queued_again_until_it_has_finished(tmp_path: Path) -> None:
    for name in ("slurm", "bin", "ledger"):
        (tmp_path / name).mkdir()
    for name, options in (("python", ""), ("hvdrun", "-m hvdlite_runner")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    ledger = tmp_path / "ledger"
    with slurm.Slurm(tmp_path / "slurm") as cluster:
        submitted = cluster.run(
            "sbatch", "--parsable", "--ntasks-per-node=2", "--nodes=1", "--chdir", str(ROOT), "--output",
            str(tmp_path / "out"), str(ROOT / "examples/slurm_requeue.sbatch"), "-m",
            "tests.resuming.programs.torch_job", str(tmp_path / "saved"),
            str(ledger), environment={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": PYTHON_PATH})
        job = submitted.stdout.strip()

        def until(condition: Callable[[], bool]) -> None:
            deadline = time.monotonic() + HANGS_SECONDS
            while not condition():
                assert time.monotonic() < deadline, (submitted, cluster.run("squeue").stdout, (tmp_path / "out").read_text())
                time.sleep(0.1)

        def trains(run: int) -> bool:
            lines = ledger / f"{run}.0"
            return lines.exists() and len(lines.read_text().splitlines()) > 4

        until(lambda: trains(0))
        cluster.run("scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1@300 does
        until(lambda: trains(1))
        cluster.run("scontrol", "requeue", job)
        until(lambda: cluster.run("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job).stdout.strip()
              in ("COMPLETED", "FAILED"))
    output = (tmp_path / "out").read_text()
    assert judged(ledger_of(ledger, 3), [True, True]) == [], output
    assert "hvdrun: ended by SIGTERM; all ranks ended in time" in output, output
