"""Every benchmark runs, on small work; what it measures is not asserted, except the number of control messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import control_scale, report
from examples import fashion_mnist
from tests.worlds import HVDRUN, PYTHON_PATH, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ["--rounds", "1", "--seconds", "0.001", "--short"]
ONE_STEP = "from benchmarks import training; training.STEPS = 1; training.main()"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "ranks", "options"), [
    ("collectives", 2, SMALL), ("gradients", 2, SMALL), ("small_gradients", 2, SMALL), ("training", 2, SMALL),
    ("hooks", 2, SMALL),
    ("idle", 2, ["--idle-seconds", "0.1"]), ("planes", 2, SMALL), ("batch_norm", 2, SMALL),
])
def test_it_runs_and_records(script: str, ranks: int, options: list[str], tmp_path: Path) -> None:
    if script == "training":
        try:
            fashion_mnist.find(download=False)
        except FileNotFoundError as error:
            pytest.skip(str(error))
    record = tmp_path / f"{script}-{ranks}.json"
    port = free_port()
    launcher = [] if ranks == 1 else [*HVDRUN, "-np", str(ranks)]
    program = ["-c", ONE_STEP] if script == "training" else [f"benchmarks/{script}.py"]
    ended = subprocess.run([*launcher, sys.executable, *program, *options, "--record", str(record)],
                           cwd=ROOT, capture_output=True, text=True, timeout=150, check=False,
                           env={**os.environ, "PYTHONPATH": PYTHON_PATH, "BENCH_PORT": str(port), "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    assert rows and report._TABLES[script](rows, ranks)


def test_the_coordinator_gets_one_message_for_each_host_and_bucket() -> None:
    small, large = control_scale.measure(3, 2, 12, 4, rounds=1), control_scale.measure(3, 5, 48, 4, rounds=1)
    for cost in (small, large):
        assert cost["messages"]["to the coordinator"] == cost["hosts"] * cost["buckets"]
    assert small["buckets"] == large["buckets"]
