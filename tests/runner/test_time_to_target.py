"""--sweep with --until: what ranks record, when it reaches the target, and what is shown."""

from __future__ import annotations

import csv
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import hvdlite
from hvdlite.core.errors import LaunchError
from hvdlite.diagnostics.progress import Evaluation, Progress, Reading, read_metrics
from hvdlite_runner.cli import job_settings
from hvdlite_runner.options import parser
from hvdlite_runner.reports.comparison import Comparison
from hvdlite_runner.reports.time_to_target import MetricTarget, RunMetrics, notes, rows, summary
from tests.worlds import HVDRUN, clean_environment

RISING = [Evaluation(10.0, 1, {"accuracy": 0.8, "lr": 0.1}), Evaluation(20.0, 2, {"accuracy": 0.9}),
          Evaluation(30.0, 3, {"accuracy": 0.89})]


def test_a_target_is_parsed_or_refused() -> None:
    assert MetricTarget.parse("accuracy=0.88") == MetricTarget.parse(" accuracy >= .88") == MetricTarget("accuracy", 0.88)
    assert MetricTarget.parse("loss<=3e-1") == MetricTarget("loss", 0.3, is_lower_bound=False)
    for wrong in ("accuracy", "=0.9", "accuracy=", "accuracy=high", "accuracy=nan", "loss<0.3"):
        with pytest.raises(LaunchError, match="METRIC=VALUE"):
            MetricTarget.parse(wrong)


def test_the_first_evaluation_that_reaches_a_target_counts() -> None:
    run = RunMetrics("64", RISING)
    assert run.reached(MetricTarget("accuracy", 0.85)) == run.reached(MetricTarget("accuracy", 0.9)) == RISING[1]
    assert run.reached(MetricTarget("accuracy", 0.91)) is None and run.reached(MetricTarget("loss", 0.0)) is None
    assert run.reached(MetricTarget("accuracy", 0.85, is_lower_bound=False)) == RISING[0]
    run = RunMetrics("64", [Evaluation(1.0, 1, {"loss": math.nan})])
    assert run.reached(MetricTarget("loss", 9.0, is_lower_bound=False)) is None


def test_the_table_has_the_last_value_of_each_metric_and_tells_what_was_not_reached() -> None:
    runs = [RunMetrics("64", RISING), RunMetrics("128", [Evaluation(5.0, 4, {"accuracy": 0.95, "loss": 0.2})]),
            RunMetrics("256", RISING[:1])]
    head, table = rows("batch-size", MetricTarget("accuracy", 0.85), runs)
    assert head == ["batch-size", "epochs to accuracy >= 0.85", "seconds", "last accuracy", "last lr", "last loss"]
    assert table == [["64", 2, 20.0, 0.89, 0.1, None], ["128", 4, 5.0, 0.95, None, 0.2], ["256", None, None, 0.8, 0.1, None]]
    assert summary("batch-size", MetricTarget("accuracy", 0.85), runs) == (
        "accuracy >= 0.85 soonest at batch-size 128: 5 s, 4 epochs; not reached at 256")
    assert summary("batch-size", MetricTarget("accuracy", 0.99), runs).startswith("no run reached accuracy >= 0.99")


def test_what_makes_a_comparison_doubtful() -> None:
    def told(name: str, *more: str, second: list[Evaluation] = RISING) -> list[str]:
        settings = job_settings(parser().parse_args(["-np", "1", "sh", *more]), {"PATH": os.environ["PATH"]})
        compared = Comparison(name, [("64", settings), ("128", settings)], {}, "")
        return [line.partition(":")[0] for line in notes(compared, [RunMetrics("64", RISING), RunMetrics("128", second)])]
    assert told("lr") == ["all runs recorded the same metrics"] and told("") == []
    assert told("batch-size", second=RISING[1:]) == [
        "the learning rate is the same at each batch-size unless the script scales it, as the examples do with "
        "--base-batch-size"]
    assert told("batch-size", "--base-batch-size", "64", second=RISING[1:]) == []


def test_a_metric_that_nobody_recorded_is_named() -> None:
    with pytest.raises(LaunchError, match=r"no metric 'accuracy', only loss, lr: call hvd.record_metrics"):
        RunMetrics.of("64", {0: Reading(metrics=[Evaluation(1.0, 1, {"lr": 0.1, "loss": 0.2})]),
                      1: Reading(metrics=[Evaluation(1.0, 1, {"accuracy": 1.0})])}, MetricTarget("accuracy", 0.9))
    with pytest.raises(LaunchError, match="no metric 'accuracy', nothing: call"):
        RunMetrics.of("64", {}, MetricTarget("accuracy", 0.9))


def test_metrics_are_kept_for_the_launcher(tmp_path: Path) -> None:
    mine = Progress()
    mine.record_metrics({"accuracy": 0.1}, 1)  # no launcher
    mine.publish(str(tmp_path), 3)
    mine.record_metrics({"accuracy": 0.5, "loss": math.nan}, 1)
    mine.record_metrics({"accuracy": 0.6}, 1.5)
    with open(tmp_path / "metrics.3", "a", encoding="utf-8") as file:
        file.write('[3.0, 2, {"accu')  # a full disk
    first, second = read_metrics(str(tmp_path), 3)
    assert (first.epoch, second.epoch, second.metrics) == (1, 1.5, {"accuracy": 0.6}) and math.isnan(first.metrics["loss"])
    assert 0 <= first.seconds <= second.seconds and read_metrics(str(tmp_path), 4) == []
    for wrong, epoch, message in (({"accuracy": "high"}, 1, "metric 'accuracy' is not a number: 'high'"),
                                  ({}, None, "the epoch is not a number"), ({}, -1, "cannot be -1")):
        with pytest.raises(ValueError, match=message):
            mine.record_metrics(wrong, epoch)  # type: ignore[arg-type]


def test_recording_alone_changes_nothing() -> None:
    hvdlite.init()
    hvdlite.record_metrics({"accuracy": 0.5}, 1)
    hvdlite.shutdown()


def test_runs_are_compared_and_one_that_fails_ends_the_comparison(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "programs/learning.py", tmp_path / "train.py")
    command = [*HVDRUN, "-np", "2", "--sweep", "batch-size=64,128,256,512,1024", "--until", "accuracy=0.9", "train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False,
                           env={**clean_environment(), "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 3 and "--batch-size 1024" not in ended.stderr, ended.stderr
    with open(tmp_path / "sweep.csv", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [(row["batch-size"], row["epochs to accuracy >= 0.9"], row["last lr"]) for row in written] == [
        ("64", "2.0", "0.64"), ("128", "3.0", "1.28"), ("256", "", "2.56")], "rank 0's records count"
    assert 0 < float(written[0]["seconds"]) < 100 and written[2]["seconds"] == "" and written[2]["last accuracy"] == "nan"
    assert "hvdrun: accuracy >= 0.9 soonest at batch-size" in ended.stdout and "not reached" in ended.stdout
    assert (tmp_path / "sweep.png").exists() or "pip install matplotlib" in ended.stderr
