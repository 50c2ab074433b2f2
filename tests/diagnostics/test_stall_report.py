"""Nothing waits in silence: who is missing, where it is, and what becomes of a job that cannot go on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import DIRECTORY_PREFIX, PROCESSES_FILE, REPORT_SOCKET
from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.stall_report import CallHistory, RankState, StallReport, first_difference, location_in_dump
from hvdlite.negotiation.messages import RankStatus
from hvdlite.negotiation.stalls import NO_STALL, MessageStall, Stall
from hvdlite_runner.cli import main
from hvdlite_runner.reports.report import find_job
from tests.bootstrap.other_user import as_other_user, needs_root, other_user, shared_by_all
from tests.diagnostics.programs import stall_report as programs
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, ROOT, Processes, processes


def status(*recent: str, first_number: int = 1, waiting: tuple[str, ...] = ()) -> RankStatus:
    return RankStatus(location="train(), train.py:7", stack="  File train.py", recent=recent, first_number=first_number,
                      waiting=waiting)


@pytest.mark.parametrize(("one", "other", "expected"), [
    (status("a", "b"), status("a", "b"), None),
    (status("a", "b", "c"), status("a", "c", "b"), None),  # hooks run in any order
    (status("a"), status("a", "b", "c"), (2, "", "b")),
    (status("a", "x", "b"), status("a", "b"), (2, "x", "")),
    (status("a", "eval", "b"), status("a", "train", "b"), (2, "eval", "train")),
    (status("b", "c", first_number=2), status("a", "b", "d"), (3, "c", "d")),
    (status("a", "a"), status("a", "a", "a"), (3, "", "a")),
])
def test_where_two_ranks_part(one: RankStatus, other: RankStatus, expected: object) -> None:
    assert first_difference(one, other) == expected


def test_a_report_names_ranks_places_and_sequences_in_both_forms() -> None:
    stacks = 'Current thread 0x1:\n  File "/home/me/train.py", line 71 in evaluate\n'
    report = StallReport([Stall("x", 61.0, (0, 1), (2, 3)), Stall("y", 5.0, (0,), (1,))], {
        0: RankState(0, "alive", status("w", "x")), 1: RankState(1, "alive", status("w", "x", waiting=("x",))),
        2: RankState(2, "alive", status("w", "eval")),
        3: RankState(3, "its process 9 is stopped", None, stacks)})
    text, data = report.text(), report.as_dict()
    assert "rank 1 never enqueued 'y': it waits for 'x' in train(), train.py:7" in text
    assert "rank 2 never enqueued 'x': it is in train(), train.py:7" in text
    assert "since number 2: it called 'eval', rank 0 called 'x'" in text
    assert ("rank 3 never enqueued 'x' and does not answer: its process 9 is stopped; it is in evaluate(), train.py:71"
            in text)
    assert data["diagnosis"] == [report.diagnosis(rank) for rank in (1, 2, 3)]
    assert data["ranks"]["2"]["last_collectives"] == ["w", "eval"] and not data["ranks"]["3"]["answered"]
    assert json.loads(json.dumps(data)) == data


def test_collectives_that_a_rank_may_leave_out_are_not_among_its_last_ones() -> None:
    history = CallHistory()
    for name in ("a", "check" + NO_STALL, "b"):
        history.add(name)
    told = history.status(threading.get_ident(), (), (), Ledger())
    assert told.recent == ("a", "b") and told.first_number == 1


def test_ranks_that_are_alike_are_described_once() -> None:
    states = {rank: RankState(rank, "alive", status("w", "x", waiting=("x",))) for rank in (0, 1, 3)}
    text = StallReport([Stall("x", 61.0, (0, 1, 3), (2,))], {**states, 2: RankState(2, "alive", status("w"))}).text()
    assert "  rank 0 (alive) is in train(), train.py:7; alike: ranks 1, 3\n" in text and "rank 1 " not in text
    assert text.count("File train.py") == 2 and "\n  rank 2 never enqueued 'x': it is in train(), train.py:7\n" in text


def test_ranks_that_wait_for_each_others_messages_are_named_together() -> None:
    stalls = [MessageStall(f"message from rank {1 - rank} to rank {rank}", 61.0, (rank,), (1 - rank,)) for rank in range(2)]
    report = StallReport(stalls, {rank: RankState(rank, "alive", status(waiting=(stalls[rank].name,))) for rank in range(2)},
                         circle={1, 0})
    assert "  ranks 0, 1 wait for each other in sends and receives\n" in report.text()
    assert report.as_dict()["circle"] == [0, 1]
    assert ("rank 1 has not taken part in 'message from rank 1 to rank 0': it waits for 'message from rank 0 to "
            "rank 1' in train(), train.py:7") in report.text()


def test_the_place_in_a_c_level_stack() -> None:
    stacks = ('Thread 0x2:\n  File "/a/other.py", line 1 in other\n\nCurrent thread 0x1 (most recent call first):\n'
              f'  File "{ROOT}/hvdlite/api.py", line 3 in join\n  File "/a/b.py", line 5 in work\n')
    assert location_in_dump(stacks) == "work(), b.py:5"
    assert location_in_dump("") == ""


def test_a_stall_report_shows_where_the_missing_rank_is(tmp_path: Path) -> None:
    file = tmp_path / "stall.json"
    ended = processes(3, programs.a_stall_report_shows_where_the_missing_rank_is, environment={
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "0.5", "HVDLITE_STALL_REPORT_FILE": str(file)})
    told = ended[0].stderr
    assert "enqueued by ranks [0, 1], not yet by ranks [2]" in told
    assert "rank 2 never enqueued 'late': it is in dawdle(), stall_report.py:" in told
    assert "since number 3: it called 'own', rank 0 called 'late'" in told
    assert "its last collectives: before, process_set.add, own" in told and "time.sleep(2.5)" in told
    assert "what happened to 'late' on rank 0" in told and "enqueued (allreduce, float64[1], op Average)" in told
    assert not ended[1].stderr and not ended[2].stderr
    assert json.loads(file.read_text())["stalls"][0]["missing"] == [2]


@pytest.mark.parametrize("rank", [0, 1])
# docs/protocol.md#reports-on-demand
def test_a_rank_that_holds_pythons_lock_is_told_with_its_place(rank: int) -> None:
    with Processes(2, programs.stuck, rank, 6.0, environment={"HVDLITE_SILENCE_CHECK_SECONDS": "0.3"}) as world:
        ended = world.wait()
    assert [each.code for each in ended] == [0, 0]
    told = ended[1 - rank].stderr
    assert f"rank {rank} has not answered for 2 s: its process" in told and "something in it holds the GIL" in told
    assert "it is in stuck(), stall_report.py:" in told and f"rank {rank} answers again" in told


@pytest.mark.parametrize("rank", [0, 1])
# docs/protocol.md#silence
def test_a_stopped_rank_is_told_and_goes_on_when_it_is_continued(rank: int) -> None:
    with Processes(2, programs.a_stopped_rank_is_told_and_goes_on_when_it_is_continued, f"/tmp/hvdlite-go-{os.getpid()}",
                   environment={"HVDLITE_SILENCE_CHECK_SECONDS": "0.3"}) as world:
        go = Path(f"/tmp/hvdlite-go-{os.getpid()}")
        try:
            world.wait_for(rank, "ready")
            world.kill(rank, signal.SIGSTOP)
            world.wait_for(1 - rank, "is stopped (SIGSTOP", stream="stderr")
            world.kill(rank, signal.SIGCONT)
            world.wait_for(1 - rank, f"rank {rank} answers again", stream="stderr")
            go.touch()
            assert [each.code for each in world.wait()] == [0, 0]
        finally:
            go.unlink(missing_ok=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_silent_is_given_up(rank: int) -> None:
    with Processes(3, programs.stuck, rank, 1000.0,
                   environment={"HVDLITE_SILENCE_CHECK_SECONDS": "0.3", "HVDLITE_HEARTBEAT_TIMEOUT": "3"}) as world:
        for each in range(3):
            world.wait_for(each, "ready")
        begun = time.monotonic()
        for other in {0, 1, 2} - {rank}:
            assert world.ranks[other].wait(HANGS_SECONDS) == 1
            told = world.told(other).stderr
            assert f"PeerLostError: rank {rank} was lost: it has not answered for 3 s" in told, told
        assert time.monotonic() - begun < 20


def test_a_stall_ends_the_job_with_the_report_as_the_error() -> None:
    with Processes(2, programs.a_stall_ends_the_job_with_the_report_as_the_error, environment={
            "HVDLITE_STALL_CHECK_TIME_SECONDS": "0.5", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1"}) as world:
        for ended in world.wait(HANGS_SECONDS):
            assert ended.code == 0, ended
            assert "rank 1 never enqueued 'x': it is in absent(), stall_report.py:" in ended.result
            assert "threading.Event().wait(8)" in ended.result


def test_a_signal_asks_for_a_report() -> None:
    with Processes(2, programs.a_signal_asks_for_a_report, environment={"HVDLITE_REPORT_SIGNAL": "usr2"}) as world:
        world.wait_for_all("ready")
        time.sleep(0.5)
        world.kill(1, signal.SIGUSR2)
        world.wait_for(0, "rank 1 never enqueued 'x': it is in a_signal_asks_for_a_report(), stall_report.py:",
                       stream="stderr")
        assert [each.code for each in world.wait()] == [0, 0]


def test_hvdrun_reports_on_a_running_job(tmp_path: Path) -> None:
    script = Path(__file__).parent / "programs/stuck_script.py"
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    job = subprocess.Popen([*HVDRUN, "-np", "2", "--no-prefix", sys.executable, str(script), str(tmp_path / "stick")],
                           stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert job.stdout is not None
        assert [job.stdout.readline(), job.stdout.readline()] == ["ready\n", "ready\n"]

        def report(*options: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*HVDRUN, "--report", str(job.pid), *options],
                                  capture_output=True, text=True, env=environment, timeout=60)

        time.sleep(0.5)
        answer = report()
        assert answer.returncode == 0, answer
        assert "rank 1 never enqueued 'x': it is in evaluate(), stuck_script.py:" in answer.stdout
        assert json.loads(report("--json").stdout)["stalls"][0]["missing"] == [1]
        (tmp_path / "stick").touch()
        assert job.stdout.readline() == "sticking\n"
        time.sleep(0.3)
        answer = report()
        assert answer.returncode == 1 and "in stuck" in answer.stdout and "in evaluate" in answer.stdout, answer
    finally:
        job.terminate()
        job.wait(HANGS_SECONDS)
    missing = subprocess.run([*HVDRUN, "--report", str(job.pid)], capture_output=True, text=True, env=environment)
    assert missing.returncode == 2 and "has no running job" in missing.stderr


def test_a_job_whose_ranks_have_not_met_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job, killed = (tmp_path / f"{DIRECTORY_PREFIX}{pid}-x" for pid in (os.getpid(), 1 << 30))
    job.mkdir(mode=0o700)
    killed.mkdir(mode=0o700)
    for asked in ("", str(os.getpid())):
        with pytest.raises(LaunchError, match=rf"\. Not all ranks of hvdrun process {os.getpid()} have met$"):
            find_job(asked)
    (job / PROCESSES_FILE).touch()  # and rank 0 is on another host
    with pytest.raises(LaunchError, match=r"no job that you started with hvdrun is running on this host$"):
        find_job("")
    (job / REPORT_SOCKET).touch()
    for name in "ay":  # of an earlier process with the same id, as in a container that was started again
        (tmp_path / f"{DIRECTORY_PREFIX}{os.getpid()}-{name}").mkdir(mode=0o700)
    assert find_job("") == find_job(str(os.getpid())) == job
    with pytest.raises(LaunchError, match=rf"running: {os.getpid()}$"):
        find_job("1")


def test_several_jobs_are_listed_with_their_ranks_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        while not Path(f"/proc/{sleeper.pid}/cmdline").read_bytes():  # the program is being loaded
            time.sleep(0.01)
        for pid in (sleeper.pid, 2**22 + 1):
            job = tmp_path / f"{DIRECTORY_PREFIX}{pid}-x"
            job.mkdir(mode=0o700)
            (job / REPORT_SOCKET).touch()
            (job / PROCESSES_FILE).write_text('{"0": [5, -1, 0], "1": [6, -1, 0]}')
        with pytest.raises(LaunchError, match="several jobs are running on this host; choose one") as told:
            find_job("")
        sleeper.kill()
    assert re.search(rf"\n    {sleeper.pid}  0:00:\d\d  2 ranks  1000$", str(told.value), re.MULTILINE), told.value
    assert f"\n    {2**22 + 1}" in str(told.value), "it has ended just now"


@needs_root
def test_links_and_directories_of_other_users_are_no_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = shared_by_all(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    loop, inside, foreign = (shared / f"{DIRECTORY_PREFIX}{number}-x" for number in (1, 2, 3))

    def spoil() -> None:
        loop.symlink_to(loop)
        inside.symlink_to(private / "any")  # which the victim may not enter
        foreign.mkdir(mode=0o777)
        (foreign / REPORT_SOCKET).touch()

    as_other_user(spoil)
    (shared / f"{DIRECTORY_PREFIX}4-x").symlink_to(private)  # even a link to a directory of ours is none
    (private / REPORT_SOCKET).touch()
    with pytest.raises(LaunchError, match=r"^no job that you started with hvdrun is running on this host$"):
        find_job("")
    with pytest.raises(LaunchError, match=r"with mode 0700 \(owner 65534, mode "):
        find_job(str(foreign))
    with other_user(), pytest.raises(LaunchError, match=r"x: Permission denied; name the process id"):
        find_job(str(inside))


@needs_root
def test_another_user_who_listens_for_rank_0_is_not_believed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "job"
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / REPORT_SOCKET))
        with other_user():
            listener.listen()  # the kernel tells who has called this
        assert main(["--report", str(directory)]) == 2
    assert capfd.readouterr().err == (f"hvdrun: {directory / REPORT_SOCKET} is not served by rank 0 of a job of yours: the "
                                      "peer belongs to user 65534, not 0\n")


@pytest.mark.parametrize("content", [None, "", "{half", "[1]", '{"0": 1}'])
def test_a_directory_without_a_job_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str],
                                                          content: str | None) -> None:
    tmp_path.chmod(0o700)
    if content is not None:
        (tmp_path / PROCESSES_FILE).write_text(content)
    assert main(["--report", str(tmp_path)]) == 2
    told = capfd.readouterr().err
    assert told.startswith(f"hvdrun: {tmp_path} is not the directory of a running job whose ranks have met"), told
    assert told.count("\n") == 1
    assert main(["--report", str(tmp_path / "none")]) == 2
    assert capfd.readouterr().err.startswith(f"hvdrun: {tmp_path / 'none'}: No such file or directory; ")
