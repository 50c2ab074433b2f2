"""Every benchmark runs, on small work; what it measures is not asserted, except the number of control messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks import control_scale, report
from examples import fashion_mnist
from tests.house.programs.small_benchmarks import run_small
from tests.worlds import TORCH, free_port, processes

SMALL = ["--rounds", "1", "--seconds", "0.001", "--short"]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "options"), [
    ("collectives", SMALL), ("gradients", SMALL), ("small_gradients", SMALL), ("training", SMALL), ("hooks", SMALL),
    ("idle", ["--idle-seconds", "0.1"]), ("planes", SMALL), ("batch_norm", SMALL),
    ("torch_distributed", SMALL), ("ledger", SMALL), ("sharded", SMALL),
])
def test_it_runs_and_records(script: str, options: list[str], tmp_path: Path) -> None:
    if script == "training":
        try:
            fashion_mnist.find(download=False)
        except FileNotFoundError as error:
            pytest.skip(str(error))
    record = tmp_path / f"{script}.json"
    processes(2, run_small, script, *options, "--record", str(record), timeout=150, imported=TORCH,
              environment={"BENCH_PORT": str(free_port())})
    rows = json.loads(record.read_text(encoding="utf-8"))["rows"]
    assert rows and report._TABLES[script](rows, 2)


def test_the_coordinator_gets_one_message_for_each_host_and_bucket() -> None:
    small, large = control_scale.measure(3, 2, 12, 4, rounds=1), control_scale.measure(3, 5, 48, 4, rounds=1)
    for cost in (small, large):
        assert cost["messages"]["to the coordinator"] == cost["hosts"] * cost["buckets"]
    assert small["buckets"] == large["buckets"]
