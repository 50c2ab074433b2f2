"""`--record` and `--report FILE.jsonl`: what is written, what is read of it, and what may go wrong."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.progress import Reading
from hvdlite_runner.cli import main
from hvdlite_runner.messages import ProgressReply, Sample
from hvdlite_runner.output.job_output import Observers, ProgressObserver
from hvdlite_runner.reports.record import A_DAY, AT_ONCE, Recorder, RecordFile, jobs_in, report, show_record
from tests.runner.elastic_jobs import Job
from tests.runner.networks import Hosts, unavailable
from tests.worlds import HANGS_SECONDS, HVDRUN, clean_environment

TRAINING = """
import time, hvdlite as hvd, numpy as np
hvd.init()
for _ in range({steps}):
    if hvd.rank():
        time.sleep(0.02)
    hvd.allreduce(np.ones(9), name='x')
    hvd.record_step(8)
"""


class Clock:
    """A time that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sample(steps: int, blocked: float = 0.0, ledger: Ledger | None = None, checks: int = 0) -> Sample:
    return Sample(Reading(steps, 8 * steps, True, blocked, 0.1, ledger=ledger or Ledger(), peak=3 << 20,
                          replica_checks=checks, replica_mismatches=checks // 3), 2 << 20)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(path: Path, seconds: int = 30) -> Path:
    """Record a job whose rank 1 is late for some time, and loses its rank 0 then."""
    clock = Clock()
    recorder = Recorder(["python", "train.py"], RecordFile(str(path), clock), clock=clock)
    recorder.begin_world({0: "a", 1: "a"})
    for second in range(1, seconds + 1):
        clock.now += 1
        recorder.take("b", ProgressReply({}))
        early, late = (Ledger(float(second), 10 * second, part * second, (1 - part) * second) for part in (0.6, 0.1))
        recorder.take("localhost", ProgressReply({0: sample(10 * second, 0.6 * second, early, second // 10),
                                                  1: sample(10 * second, 0.1 * second, late, second // 10)}))
    recorder.ended(0, Reading(10 * seconds, 80 * seconds, True, 18.0, peak=5 << 20, replica_checks=3, replica_mismatches=1))
    recorder.noted("rank 0 on a: killed by signal 9\x1b[2J")
    recorder.begin_world({0: "a"})
    recorder.closed(137)
    return path


def test_the_lines_of_a_job(tmp_path: Path) -> None:
    found = lines(recorded(tmp_path / "r.jsonl"))
    assert [line["kind"] for line in found if line["kind"] != "sample"] == [
        "job", "world", "slowness", "rank", "note", "world", "end"]
    assert found[0]["command"] == ["python", "train.py"] and found[1]["ranks"] == {"a": "0-1"}
    samples = [line for line in found if line["kind"] == "sample"]
    assert len(samples) == 29, "the first round has nothing to be compared with"
    assert samples[-1] == {**samples[-1], "seconds": 30.0, "over": 1.0, "unit": "samples/s", "rate": 160.0,
                           "waits": [0.6, 0.1], "memory": [2, 2], "replica_checks": 3, "replica_mismatches": 1}
    slow = next(line for line in found if line["kind"] == "slowness")
    assert (slow["rank"], slow["cause"]) == (1, "computing") and "rank 1 is late" in slow["text"]
    assert found[-1]["exit_code"] == 137


def test_waits_are_a_share_of_the_time_in_which_the_rank_was_there(tmp_path: Path) -> None:
    found = lines(recorded(tmp_path / "r.jsonl"))
    for line in found[:20]:
        if line["kind"] == "sample":
            line["waits"][1] = line["memory"][1] = None
    assert "in waits: rank 0 60%, rank 1 10%" in list(report(found))


@pytest.mark.parametrize(("usual", "waited", "stalls"), [(0.1, 9, 0), (0.1, 15, 1), (30.0, 35, 0), (30.0, 45, 1)])
def test_a_stall_is_a_wait_that_is_much_longer_than_a_step(tmp_path: Path, usual: float, waited: int, stalls: int) -> None:
    clock, path = Clock(), tmp_path / "r.jsonl"
    recorder = Recorder(["x"], RecordFile(str(path), clock), clock=clock)
    recorder.begin_world({0: "a"})
    for second in range(3 * 60):
        clock.now += 1
        waits = "ranks 0 wait for 1" if second % 60 < waited else ""
        recorder.take("b", ProgressReply({}, waits))
        recorder.take("localhost", ProgressReply({0: sample(100, 0, Ledger(usual * 100, 100))}))
    recorder.closed(0)
    assert [line["text"] for line in lines(path) if line["kind"] == "stall"] == ["ranks 0 wait for 1"] * 3 * stalls


def test_lines_that_are_incomplete_are_passed_over(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "r.json")
    whole = path.read_text().splitlines()
    for number, line in enumerate(whole):
        for name in json.loads(line):
            values: list[Any] = ["1", {"a": []}, None]
            for value in values:
                changed = json.dumps({**json.loads(line), name: value})
                for job in jobs_in([each.encode() for each in [*whole[:number], changed, *whole[number + 1:]]]):
                    assert list(report(job))
    assert main(["--report", str(path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == [[json.loads(line) for line in whole]]
    path.write_text("\n".join(whole * 200))
    ended = subprocess.run(f"{shlex.join([*HVDRUN, '--report', str(path)])} | head -1", shell=True,
                           capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("job on") and not ended.stderr


def test_who_is_slow_is_forgotten_with_the_world_and_not_when_a_rank_ends(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "r.jsonl"
    recorder = Recorder(["x"], RecordFile(str(path), clock), clock=clock)

    def train(first: int, last: int, ranks: int = 2, waits: tuple[float, float] = (0.6, 0.1)) -> None:
        for second in range(first, last):
            clock.now += 1
            ledgers = [Ledger(float(second), 10 * second, part * second, 0.2 * second) for part in waits]
            recorder.take("localhost", ProgressReply({rank: sample(second, 0, ledgers[rank]) for rank in range(ranks)}))

    for _ in range(2):
        recorder.begin_world({0: "a", 1: "a"})
        train(1, 9)
        recorder.ended(1, Reading())
        train(9, 12, 1)
    recorder.begin_world({0: "a", 1: "a"})
    train(1, 9)
    train(100, 160, 2, (0.3, 0.3))
    recorder.closed(0)
    kinds = [(line["kind"], line.get("rank")) for line in lines(path) if line["kind"] in ("world", "slowness")]
    assert kinds == [("world", None), ("slowness", 1)] * 3 + [("slowness", None)], kinds


def test_what_a_record_tells(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(recorded(tmp_path / "r.jsonl"))
    assert main(["--report", path]) == 0
    shown = capfd.readouterr().out
    for text in ("python train.py", "recorded for 30.0 s; it ended with exit code 137", "1 to 3 s: 160.0 samples/s",
                 "27 to 30 s: 160.0 samples/s", "in waits: rank 0 60%, rank 1 10%",
                 "most memory: rank 0 5 MiB, rank 1 2 MiB",
                 "replica checks: 3, of which 1 found a difference", "0.0 s  world 1: ranks 0-1 on a", "rank 1 is late",
                 "30.0 s  hvdrun: rank 0 on a: killed by signal 9\\x1b", "30.0 s  world 2: ranks 0 on a"):
        assert text in shown, (text, shown)


def test_a_record_that_a_crash_has_cut_off_is_read_and_continued(tmp_path: Path) -> None:
    path = recorded(tmp_path / "r.jsonl")
    whole = path.read_bytes()
    for size in range(len(whole) - 2, len(whole) - 400, -7):
        (job,) = jobs_in(whole[:size].splitlines())
        assert "its end is not recorded" in list(report(job))[1] and "160.0 samples/s" in "".join(report(job))
    path.write_bytes(whole[:-30])
    recorded(path)
    first, second = jobs_in(path.read_bytes().splitlines())
    one, two = list(report(first)), list(report(second))
    assert "its end is not recorded" in one[1] and "exit code 137" in two[1] and one[2:-1] == two[2:len(one) - 1]
    for size in range(0, 300):
        for job in jobs_in(whole[:size].splitlines()):
            assert list(report(job))


def test_the_size_is_bounded_and_no_time_is_left_out(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "r.jsonl"
    recorder = Recorder(["x"], RecordFile(str(path), clock), clock=clock)
    recorder.begin_world(dict.fromkeys(range(64), "a"))
    for step in range(4000):
        clock.now += 1 if step < 2000 else 40
        recorder.take("localhost", ProgressReply({rank: sample(step, 0.37 * step) for rank in range(64)}))
    recorder.closed(0)
    seconds = clock.now - 100
    assert path.stat().st_size <= AT_ONCE + A_DAY * seconds / 86400 <= 1.05 * 10e6
    samples = [line for line in lines(path) if line["kind"] == "sample"]
    assert [line["over"] for line in samples[:500]] == [1.0] * 500, "each second at first"
    assert 5 < samples[-900]["over"] < 60 and sum(line["over"] for line in samples) > seconds - 100


def test_the_end_is_written_where_other_lines_had_no_room(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "r.jsonl"
    recorder = Recorder(["x"], RecordFile(str(path), clock), clock=clock)
    for rank in range(10_000):
        recorder.ended(rank, Reading(steps=10**9))
    recorder.closed(3)
    *others, note, end = lines(path)
    assert end["exit_code"] == 3 and path.stat().st_size <= AT_ONCE
    assert note["text"].startswith(f"{10_001 - len(others):,} lines were left out") and len(others) > 5000


def test_a_disk_that_hangs_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdlite_runner.reports.record._END_SECONDS", 0.2)
    file = RecordFile(str(tmp_path / "r.jsonl"))
    reader, writer = os.pipe()
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)))
    os.dup2(writer, file._target.descriptor)
    os.close(writer)
    Recorder(["x"], file).closed(0)
    assert "the disk takes nothing" in capfd.readouterr().err
    os.close(reader)


def test_files_that_are_no_place_for_a_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("print()")
    os.mkfifo(tmp_path / "fifo")
    for name, why in (("train.py", "is there, and no record"), ("fifo", "is no file"), ("none/r.jsonl", "No such file"),
                      (".", "Is a directory")):
        assert main(["-np", "1", "--record", str(tmp_path / name), "true"]) == 2
        assert why in capfd.readouterr().err
    assert (tmp_path / "train.py").read_text() == "print()"
    file = RecordFile(str(tmp_path / "r.jsonl"))
    with pytest.raises(LaunchError, match="another hvdrun writes this"):
        RecordFile(str(tmp_path / "r.jsonl"))
    file.close()
    assert main(["--report", str(tmp_path / "train.py")]) == 2 and "has no job" in capfd.readouterr().err
    for missing in ("none.jsonl", "none.json"):
        assert main(["--report", missing]) == 2 and "No such file" in capfd.readouterr().err
    for flags in (["--scaling", "1"], ["--mpi"]):
        assert main(["-np", "1", "--record", str(tmp_path / "r.jsonl"), *flags, "true"]) == 2
        assert "leave out --scaling" in capfd.readouterr().err


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_full_disk_ends_the_record_with_one_line(tmp_path: Path, at_the_end: bool,
                                                   capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    file = RecordFile(str(tmp_path / "r.jsonl"))
    recorder = Recorder(["x"], file)
    recorder.attach(told.append, lambda: False)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._target.descriptor)
    os.close(full)
    until = time.monotonic() + HANGS_SECONDS
    while not (told or at_the_end) and time.monotonic() < until:
        recorder.noted("x")
        time.sleep(0.01)
    elsewhere = len(told)
    if at_the_end:
        recorder.noted("x")
        while not file._queue.failed:
            time.sleep(0.01)
    recorder.closed(0)
    assert len(told) == elsewhere, "the job's output has ended"
    recorder_said = capfd.readouterr().err
    assert not (told and recorder_said), "once"
    (line,) = [*told, *recorder_said.splitlines()]
    assert "No space left on device; the record ends here" in line


def test_several_observers_get_everything() -> None:
    class Counts(ProgressObserver):
        wants_samples = True

        def __init__(self) -> None:
            self.got: list[Any] = []

        def take(self, host: str, event: ProgressReply) -> None:
            self.got.append(host)

        def closed(self, code: int) -> None:
            self.got.append(code)

    first, second = Counts(), Counts()
    both = Observers([first, second])
    both.take("a", ProgressReply({}))
    both.finish()
    both.closed(3)
    assert first.got == second.got == ["a", 3] and both.wants_samples and not Observers([]).wants_samples


def ask(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str | None, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANGS_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def trains(path: Path) -> bool:
    """Return whether a record has samples of ranks that train; the first ones are of ranks that start."""
    return path.exists() and any(line.get("rate") for job in jobs_in(path.read_bytes().splitlines()) for line in job)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*HVDRUN, "-np", "2", *arguments], stderr=subprocess.PIPE, text=True, cwd=folder,
                            env={**clean_environment(), "OMP_NUM_THREADS": "1"})


def test_a_job_whose_hvdrun_is_killed_has_a_record(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    job = start(tmp_path, "--record", "r.jsonl", "--metrics", "0", sys.executable, "-c", TRAINING.format(steps=100_000))
    assert job.stderr is not None
    line = next(line for line in job.stderr if "metrics at" in line)
    while not (path.exists() and path.read_bytes().count(b'"sample"') >= 2):
        assert job.poll() is None, job.stderr.read()
        time.sleep(0.1)
    assert 'hvdlite_samples_total{rank="1"}' in ask(int(line.rpartition("/")[0].rpartition(":")[2]))[2]
    job.send_signal(signal.SIGKILL)
    job.wait()
    job.stderr.close()
    assert show_record(str(path)) == 0
    shown = capfd.readouterr().out
    assert "its end is not recorded" in shown and "samples/s" in shown and "world 1: ranks 0-1 on localhost" in shown


@pytest.mark.parametrize("number", [0, signal.SIGINT])
def test_a_job_that_ends_has_its_end_in_the_record(tmp_path: Path, number: int) -> None:
    path = tmp_path / "r.jsonl"
    job = start(tmp_path, "--record", "r.jsonl", "--monitor", sys.executable, "-c", TRAINING.format(
        steps=10 if number == 0 else 100_000))
    while number and not trains(path):
        time.sleep(0.1)
    if number:
        job.send_signal(number)
    _, errors = job.communicate(timeout=HANGS_SECONDS)
    assert job.returncode == (128 + number if number else 0), errors
    (found,) = jobs_in(path.read_bytes().splitlines())
    assert found[-1]["kind"] == "end" and found[-1]["exit_code"] == job.returncode
    ended = [line for line in found if line["kind"] == "rank"]
    assert {line["rank"] for line in ended} == {0, 1} and all(line["memory"] > 1 << 20 for line in ended)
    if number:
        assert any("ended by SIGINT" in line["text"] for line in found if line["kind"] == "note")
    else:
        assert [line["samples"] for line in ended] == [80, 80]


def test_the_worlds_of_an_elastic_job_and_their_reasons(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, Job(  # a short name, for sockets
            Path(folder), "-np", "3", "--min-np", "1", "--record", str(tmp_path / "r.jsonl")) as job:
        job.wait_for("begun", 3)
        job.tell(1, "kill")
        job.wait_for("world 2")
        job.tell(2, "finish")
        job.tell(0, "finish")
        assert job.end() == 0
    shown = "\n".join(report(jobs_in((tmp_path / "r.jsonl").read_bytes().splitlines())[0]))
    told = ["world 1: ranks 0-2 on localhost", "hvdrun: rank 1 on localhost: killed by signal 9",
            "world 2: ranks 0-1 on localhost", "hvdrun: world 2, 2 ranks, goes on after commit 12; left: rank 1"]
    assert [shown.find(each) for each in told] == sorted(shown.find(each) for each in told) and told[0] in shown, shown


@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_ranks_of_another_host_are_recorded(tmp_path: Path) -> None:
    with Hosts("ab", tmp_path) as network:
        program = [sys.executable, "-c", TRAINING.format(steps=300)]
        placement = f"{network.address('a')}:1,{network.address('b')}:1"
        ended = subprocess.run(network.hvdrun("-H", placement, "--record", f"{tmp_path}/r.jsonl", *program),
                               env=network.environment(), capture_output=True, text=True, timeout=HANGS_SECONDS, check=False)
        assert ended.returncode == 0, ended.stderr
    found = lines(tmp_path / "r.jsonl")
    assert found[1]["kind"] == "world" and len(found[1]["ranks"]) == 2
    samples = [line for line in found if line["kind"] == "sample"]
    assert any(None not in line["waits"] and all(line["memory"]) for line in samples), samples
