"""--monitor, --scaling and --sweep: what ranks count, what is made of it, and what is shown."""

from __future__ import annotations

import csv
import dataclasses
import math
import operator
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import hvdlite
from hvdlite.core.errors import LaunchError
from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics import progress
from hvdlite_runner.cli import job_settings
from hvdlite_runner.host import commands
from hvdlite_runner.host.processes import sample, stall_lines
from hvdlite_runner.job.starts import Starts
from hvdlite_runner.messages import ProgressReply, Sample
from hvdlite_runner.options import parser
from hvdlite_runner.reports import comparison
from hvdlite_runner.reports.monitor import Monitor, ThroughputRecorder, table
from hvdlite_runner.reports.scaling import (
    Throughput,
    compare_sizes,
    notes,
    parse_sweep,
    saturation,
    scaling_rows,
    summary,
    with_equal_threads,
)
from hvdlite_runner.reports.scaling import rows as profile_rows
from hvdlite_runner.reports.time_to_target import MetricTarget, compare_times
from tests.worlds import HVDRUN, clean_environment


def test_a_ranks_progress_is_read_by_another_process(tmp_path: Path) -> None:
    mine = progress.Progress()
    mine.publish(str(tmp_path), 3)
    assert progress.read(str(tmp_path), 3) == progress.Reading()
    mine.round()
    mine.round()
    assert progress.read(str(tmp_path), 3).steps == 2 and not progress.read(str(tmp_path), 3).counts_samples
    begun = mine.block()
    assert progress.read(str(tmp_path), 3).blocked > 0, "in the middle of a wait"
    mine.unblock(begun - 0.5)
    for _ in range(progress.KEPT + 10):
        mine.step(64)
    found = progress.read(str(tmp_path), 3)
    assert (found.steps, found.samples, found.counts_samples) == (4106, 4106 * 64, True) and 0.5 <= found.blocked < 30
    assert found.rate > 0 and found.idle < 60
    mine.round()
    assert progress.read(str(tmp_path), 3).steps == 4106, "samples are counted, so optimizer steps are not"
    assert progress.read(str(tmp_path), 4) == progress.Reading()


def test_seconds_in_waits_never_become_fewer(tmp_path: Path) -> None:
    mine = progress.Progress()
    mine.publish(str(tmp_path), 0)
    found = [0.0]

    def look() -> None:
        found.append(progress.read(str(tmp_path), 0).blocked)

    for _ in range(20):
        begun = mine.block()
        time.sleep(0.002)
        look()
        mine.block()  # another thread
        look()
        mine.unblock(begun + 0.0015)  # what it was running was no wait
        look()
    assert found == sorted(found)
    mine.unblock(mine.block() - 1)
    look()
    assert found[-1] == mine.blocked, "what was shown too early is made up for"


def test_rates_leave_pauses_out() -> None:
    assert progress.rate_of([]) == 0.0
    assert progress.rate_of([(0.1, 32.0)] * 10 + [(30.0, 32.0)]) == pytest.approx(320)


def test_throughput_speedup_and_efficiency() -> None:
    def measured(rate: float) -> Throughput:
        return Throughput(rate, "samples/s")
    assert scaling_rows([(1, measured(100)), (4, measured(300))]) == [(1, 100, 1.0, 1.0), (4, 300, 3.0, 0.75)]
    assert scaling_rows([(2, measured(100)), (4, measured(150))]) == [(2, 100, 2.0, 1.0), (4, 150, 3.0, 0.75)]
    assert saturation([("16", measured(50)), ("32", measured(95)), ("64", measured(100))]) == "32"
    assert summary("n", [("1", measured(50)), ("2", measured(90)), ("3", measured(100)), ("4", measured(98))]) == (
        "throughput saturates at n 2: 3, the fastest value, gains 11.1%")
    assert summary("n", [("1", measured(100)), ("2", measured(95))]).endswith("saturates at n 1: no other value is faster")
    assert summary("n", [("1", measured(50)), ("2", measured(95))]) == "throughput still grows at n 2, the last value"
    one = progress.Reading(rate=10.0, counts_samples=True)
    assert Throughput.of({0: one, 1: one}) == Throughput(20.0, "samples/s")
    assert Throughput.of({rank: progress.Reading(5, 5 * (8 + rank), True, rate=1.0) for rank in range(2)}).step == 8.5
    assert Throughput.of({0: one, 1: progress.Reading(rate=10.0)}).unit == "batches/s"
    with pytest.raises(LaunchError, match="record_step"):
        Throughput.of({0: one, 1: progress.Reading()})


def test_what_is_swept() -> None:
    assert parse_sweep("batch-size=32, 64") == ("batch-size", ["32", "64"])
    assert parse_sweep("--lr=0.1")[0] == "lr"
    for wrong in ("batch-size", "=1", "a=", "--=1"):
        with pytest.raises(LaunchError, match="OPTION=VALUE"):
            parse_sweep(wrong)


def reading(steps: int, samples: int, blocked: float, idle: float, ledger: Ledger = progress.NOTHING) -> Sample:
    return Sample(progress.Reading(steps, samples, True, blocked, idle, ledger=ledger), 512 << 20)


def test_the_table_shows_rates_of_the_last_interval() -> None:
    before = {0: reading(10, 320, 1.0, 0.1), 1: reading(10, 320, 1.0, 0.1)}
    now = {0: reading(30, 960, 1.5, 0.1), 1: reading(10, 320, 1.0, 7.0), 2: reading(0, 0, 0.0, math.inf)}
    lines = table(before, now, {0: "a", 1: "a", 2: "b"}, 2.0, "ranks 0 wait for 1: 'x', 7 s")
    assert lines[0].split() == ["rank", "host", "steps/s", "samples/s", "in", "waits", "last", "step", "memory"]
    assert lines[1].split() == ["0", "a", "10.0", "320", "25%", "now", "512", "MiB"]
    assert lines[2].split() == ["1", "a", "0.0", "0", "0%", "7.0", "s", "ago", "512", "MiB"]
    assert lines[3].split() == ["2", "b", "0.0", "0", "0%", "none", "yet", "512", "MiB"]
    assert lines[4:] == ["all ranks: 320 samples/s", "ranks 0 wait for 1: 'x', 7 s"]


def test_the_table_shows_rows_of_ranks_where_they_differ() -> None:
    before = {rank: reading(10, 300, 1.0, 0.1) for rank in range(3)}
    now = {0: reading(20, 780, 1.0, 0.1), 1: reading(20, 460, 1.0, 0.1), 2: reading(0, 0, 0.0, math.inf)}
    assert table(before, now, {}, 1.0, "")[-1] == "all ranks: 640 samples/s; rows of a step by rank: 0: 48, 1: 16"
    now[1] = reading(20, 771, 1.0, 0.1)  # equal but for a last batch
    assert table(before, now, {}, 1.0, "")[-1] == "all ranks: 951 samples/s"


def test_the_table_stays_below_the_output() -> None:
    written: list[str] = []
    now = [0.0]
    monitor = Monitor(written.append, in_place=True, clock=lambda: now[0])
    monitor.begin_world({0: "localhost"})
    for second in (1.0, 2.0):
        now[0] = second
        monitor.take("localhost", ProgressReply({0: reading(int(second), 0, 0.0, 0.1)}))
    assert written[1] == "\x1b[2F\x1b[J" and written[0].count("\n") == written[2].count("\n") == 2
    monitor.clear_table()
    monitor.clear_table()
    assert written[3:] == ["\x1b[2F\x1b[J"]
    monitor.ended(0, progress.Reading())
    now[0] = 3.0
    monitor.take("localhost", ProgressReply({}))
    assert len(written) == 4, "no rank is left"


def test_what_a_rank_says_cannot_steer_the_terminal() -> None:
    written: list[str] = []
    now = [0.0]
    monitor = Monitor(written.append, in_place=False, clock=lambda: now[0])
    monitor.begin_world({0: "host\x1b[2J"})
    now[0] = 1.0
    monitor.take("localhost", ProgressReply({0: reading(1, 0, 0.0, 0.1)}, "ranks wait for '\x1b]0;title\x07'"))
    assert "\x1b" not in "".join(written) and "title" in "".join(written)


def test_who_waits_for_whom() -> None:
    stall = {"name": "x", "waited_seconds": 3.2, "submitted": [0, 1, 2], "missing": [3]}
    report = {"stalls": [{**stall, "name": "y", "waited_seconds": 1.0}, stall], "diagnosis": ["rank 3 is in load()"]}
    assert stall_lines(report) == ["ranks 0-2 wait for 3: 'x', 3 s", "  rank 3 is in load()"]
    assert stall_lines({"stalls": [], "diagnosis": []}) == []


def test_looking_at_a_worker_group(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "100"])
    progress.Progress().publish(str(tmp_path), 5)
    ranks, waits = sample(str(tmp_path), {5: process.pid})
    process.kill()
    process.wait()
    assert ranks[5].memory > 0 and ranks[5].reading.idle == math.inf and waits == ""


def test_a_negative_number_of_samples() -> None:
    with pytest.raises(ValueError, match="-1"):
        hvdlite.record_step(-1)


def hvdrun(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(Path(__file__).parent / "programs/samples.py", tmp_path / "train.py")
    return subprocess.run([*HVDRUN, *arguments], capture_output=True, text=True,
                          timeout=100, cwd=tmp_path, env={**clean_environment(), "OMP_NUM_THREADS": "1"}, check=False)


def test_scaling_prints_and_writes_its_table(tmp_path: Path) -> None:
    ended = hvdrun(tmp_path, "--scaling", "2,1", "--results", "out", "train.py")
    assert ended.returncode == 0, ended.stderr
    printed = [line.split() for line in ended.stdout.splitlines()]
    assert printed[0] == ["ranks", "threads", "samples/s", "speedup", "efficiency"]
    assert [row[:2] for row in printed[1:]] == [["1", "1"], ["2", "1"]]
    with open(tmp_path / "out.csv", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [row["ranks"] for row in written] == ["1", "2"] and float(written[0]["efficiency"]) == 1.0
    one, two = (float(row["samples/s"]) for row in written)
    assert 0 < one < 10 / 0.01 and 0 < two < 2 * 10 / 0.01, "no faster than it sleeps"
    assert float(written[1]["efficiency"]) == pytest.approx(two / one / 2, rel=0.01)
    assert (tmp_path / "out.png").exists() or "pip install matplotlib" in ended.stderr


def test_threads_of_a_rank_are_the_same_for_every_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "cores", lambda: 8)
    options = parser().parse_args(["--scaling", "1,4,2", sys.executable, "-c", "pass"])
    for environ, share, threads in (({}, 4, 2), ({"OMP_NUM_THREADS": "3"}, 0, None)):
        jobs = with_equal_threads([(str(size), job_settings(options, environ, size)) for size in options.scaling])
        assert [(value, settings.share_cores) for value, settings in jobs] == [("1", share), ("4", share), ("2", share)]
        for _, settings in jobs if threads else ():
            pool = SimpleNamespace(slots_of=lambda machine, slots=settings.slots: slots, remote=lambda machine: None)
            assert Starts(settings, pool, {}, b"", print)._threads("localhost")[0] == threads  # type: ignore[arg-type]


def test_what_the_samples_of_a_step_tell() -> None:
    def measured(step: float, peak: int) -> Throughput:
        return Throughput(1.0, "samples/s", peak << 20, step=step)
    assert list(notes("batch-size", [("8", measured(8, 100)), ("16", measured(16, 116)), ("32", measured(32, 160))])) == [
        "memory grows by 2.5 MiB a sample: the peak of one process, between 8 and 32 samples of a step"]
    alike = [("8", measured(8, 100)), ("16", measured(8, 101))]
    assert list(notes("batch", alike)) == ["a step had 8 samples at each batch: does the script read --batch?"]
    assert not list(notes("lr", alike)) and not list(notes("batch-size", [("8", measured(0, 1)), ("9", measured(0, 2))]))


def test_each_job_is_run_several_times_and_the_median_counts(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = iter([5.0, 1.0, 3.0, 8.0, 6.0])
    settings = job_settings(parser().parse_args(["-np", "1", "sh"]), {"PATH": os.environ["PATH"]})

    def run_job(*_: object) -> int:
        return 0 if operator.length_hint(figures) else 9

    monkeypatch.setattr(comparison, "run_job", run_job)
    compared = comparison.Comparison("size", [("10", settings), ("9", settings), ("11", settings)], {}, "", repeat=2)
    assert compared.run(lambda value, readings: (value, next(figures)), lambda row: row[1]) == (
        [comparison.Runs(("10", 1.0), (1.0, 5.0)), comparison.Runs(("9", 3.0), (3.0, 8.0))], 9)
    assert "hvdrun: --size 11 failed (exit code 9); the largest value that ran: 10\n" in capsys.readouterr().err
    (tmp_path / "train.py").write_text("parser.add_argument('--batch_size')")
    for name, lines in (("batch-size", 0), ("lr", 1)):
        job = dataclasses.replace(settings, command=[sys.executable, str(tmp_path / "train.py"), f"--{name}", "1"])
        assert len(list(comparison.Comparison(name, [("1", job)], {}, "")._unread())) == lines


def test_tables_of_repeated_runs_have_their_spread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    settings = job_settings(parser().parse_args(["-np", "1", "sh"]), {"PATH": os.environ["PATH"]})
    rates = iter([10.0, 12.0, 30.0, 20.0] * 2)

    def run_job(job: object, environ: object, recorder: ThroughputRecorder) -> int:
        rate = next(rates)
        found = [progress.Evaluation(100 / rate, 1, {"accuracy": rate / 20})]
        recorder.ended(0, progress.Reading(rate=rate, counts_samples=True, metrics=found))
        return 0

    monkeypatch.setattr(comparison, "run_job", run_job)
    compared = comparison.Comparison("", [("1", settings), ("2", settings)], {"OMP_NUM_THREADS": "1"},
                                     str(tmp_path / "out"), repeat=2)
    assert compare_sizes(compared) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["ranks", "threads", "samples/s", "speedup", "efficiency", "least", "of", "2", "greatest"],
        ["1", "1", "10.0", "1.00", "100.0%", "10.0", "12.0"], ["2", "1", "20.0", "2.00", "100.0%", "20.0", "30.0"]]
    assert (tmp_path / "out.csv").read_text().splitlines()[2] == "2,1,20.0,2.0,1.0,20.0,30.0"
    assert compare_times(compared, MetricTarget("accuracy", 0.55)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:3] == [["1", "1", "8.333", "0.6", "8.333", "-"], ["2", "1", "3.333", "1.5", "3.333", "5"]]


@pytest.mark.slow
def test_sweep_and_a_run_that_fails(tmp_path: Path) -> None:
    ended = hvdrun(tmp_path, "-np", "2", "--sweep", "batch-size=1,1000,2000", "train.py")
    assert ended.returncode == 0 and "hvdrun: throughput" in ended.stdout, ended.stderr
    assert [row["batch-size"] for row in csv.DictReader((tmp_path / "sweep.csv").open())] == ["1", "1000", "2000"]
    ended = hvdrun(tmp_path, "-np", "2", "--sweep", "batch-size=1,wrong,2", "train.py")
    assert ended.returncode == 1 and "ValueError" in ended.stderr and "hvdrun: --batch-size 2" not in ended.stderr
    ended = hvdrun(tmp_path, "--scaling", "1", sys.executable, "-c", "pass")
    assert ended.returncode == 2 and "hvd.record_step" in ended.stderr


def test_the_monitor_on_a_real_job(tmp_path: Path) -> None:
    ended = hvdrun(tmp_path, "-np", "2", "--monitor", sys.executable, "-c",
                   "import time, hvdlite as hvd, numpy as np\nhvd.init()\n"
                   "for _ in range(20):\n    hvd.allreduce(np.ones(9), name='x')\n    time.sleep(0.02)\n"
                   "    hvd.record_step(8)\n"
                   "if hvd.rank():\n    time.sleep(6)\nhvd.allreduce(np.ones(9), name='late')\n")
    assert ended.returncode == 0, ended.stderr
    assert "samples/s" in ended.stderr and "ranks 0 wait for 1: 'late'" in ended.stderr, ended.stderr


def test_where_the_time_of_each_rank_went() -> None:
    ledger = Ledger(seconds=10.0, steps=100, blocked=1.0, cpu=8.0, input=0.5, forward=3.0, backward=4.0, optimizer=1.0)
    shares = profile_rows({0: ledger, 1: Ledger(), 2: msgspec.structs.replace(ledger, forward=9.0)})
    assert [row[0] for row in shares] == [0, 2], "a rank without a step has no row"
    assert shares[0] == [0, 100, 100.0, *map(pytest.approx, (0.05, 0.3, 0.4, 0.1, 0.1, 0.05, 0.8))]
    assert shares[1][-2] == 0, "parts that overlap leave no rest"


def test_memory_and_use_of_a_swept_run() -> None:
    measured = Throughput.of({
        0: progress.Reading(rate=10.0, counts_samples=True, peak=5, ledger=Ledger(10.0, 100, 1.0, 8.0)),
        1: progress.Reading(rate=10.0, counts_samples=True, peak=7, ledger=Ledger(10.0, 100, 3.0, 4.0))})
    assert (measured.peak, measured.running, measured.waits) == (7, 0.6, 0.2)


def test_the_line_below_the_table_names_the_slow_rank() -> None:
    written: list[str] = []
    now = [0.0]
    monitor = Monitor(written.append, in_place=False, clock=lambda: now[0])
    monitor.begin_world({0: "localhost", 1: "localhost"})
    for second in range(1, 4):
        now[0] = float(second)
        late, early = (Ledger(10.0 * second, 10 * second, blocked * second, 8.0 * second) for blocked in (1.0, 5.0))
        monitor.take("localhost", ProgressReply({
            0: reading(second, 0, 0.0, 0.1, early), 1: reading(second, 0, 0.0, 0.1, late)}))
    assert "rank 1 is late; 40% of each step" not in written[0] and "rank 1 is late; 40% of each step" in written[-1]
    monitor.begin_world({0: "localhost", 1: "localhost"})
    now[0] += 1
    monitor.take("localhost", ProgressReply({0: reading(1, 0, 0.0, 0.1, early), 1: reading(1, 0, 0.0, 0.1, late)}))
    assert "is late" not in written[-1], "ranks of another world are compared from its beginning"


def test_a_job_of_long_steps_is_judged_too() -> None:
    written: list[str] = []
    now = [0.0]
    monitor = Monitor(written.append, in_place=False, clock=lambda: now[0])
    monitor.begin_world({0: "localhost", 1: "localhost"})
    for second in range(400):
        now[0], steps = float(second), second // 60
        late, early = (Ledger(60.0 * steps, steps, blocked * steps, 50.0 * steps) for blocked in (6.0, 30.0))
        monitor.take("localhost", ProgressReply({
            0: reading(steps, 0, 0.0, 0.1, early), 1: reading(steps, 0, 0.0, 0.1, late)}))
    assert "rank 1 is late; 40% of each step" in written[-1] and "is late" not in written[250]
    assert len(monitor._ledgers) == 6, "the last five steps"
