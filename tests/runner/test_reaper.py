"""Which processes belong to a job, and that no other is killed."""

from __future__ import annotations

import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlite_runner.host import processes, reaper
from hvdlite_runner.host.processes import Reaper
from hvdlite_runner.host.reaper import (
    Process,
    kill_all,
    kill_job,
    let_end,
    look_up,
    marked_processes,
    members,
    process_table,
)
from tests.worlds import HANGS_SECONDS


def table(*rows: tuple[int, int, int, str]) -> dict[int, Process]:
    """Build a process table of (pid, parent, session, state); the group is the session."""
    return {pid: Process(parent, session, session, state) for pid, parent, session, state in rows}


def test_a_job_is_its_ranks_their_sessions_and_their_descendants() -> None:
    found = table((1, 0, 1, "S"), (10, 1, 10, "S"), (11, 10, 11, "S"),  # init, the launcher, the reaper
                      (20, 10, 20, "Z"), (21, 1, 20, "S"),  # a rank that has ended, and an orphan of its session
                      (30, 10, 30, "S"), (31, 30, 31, "S"), (32, 31, 31, "R"),  # a rank, a child with a session, its child
                      (40, 1, 40, "S"), (41, 10, 10, "S"))  # strangers
    assert members(found, ranks={20, 30}) == {21, 30, 31, 32}


def test_processes_that_are_marked_belong_to_the_job_with_their_descendants() -> None:
    found = table((10, 1, 10, "S"), (11, 10, 11, "S"), (12, 10, 10, "S"), (13, 12, 10, "S"),
                      (50, 10, 50, "S"), (51, 50, 51, "S"), (52, 10, 52, "Z"))
    assert members(found, ranks=set(), marked={50, 52}) == {50, 51}, "12 is the launcher's child, but not of the job"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
    yield process
    process.kill()
    process.wait()


def test_where_there_is_no_proc_ps_lists_the_processes(sleeper: subprocess.Popen[bytes], tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_table()[sleeper.pid]
    monkeypatch.setattr(reaper, "PROC", str(tmp_path / "none"))
    found = look_up(sleeper.pid)
    assert found is not None and found[:2] == before[:2] and found.state == "S" and look_up(2**22 + 1) is None
    assert process_table()[sleeper.pid] == found and members(process_table(), {sleeper.pid}) == {sleeper.pid}
    kill_all({sleeper.pid: found._replace(start=1)}, [sleeper.pid])
    assert sleeper.poll() is None, "another process has its id"
    kill_job(b"NONE=1", {sleeper.pid: found.start})
    assert sleeper.wait(HANGS_SECONDS) == -signal.SIGKILL


def test_a_process_that_has_got_the_id_of_another_one_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    now = process_table()[sleeper.pid]
    earlier = now._replace(start=now.start - 1)
    kill_all({sleeper.pid: earlier}, [sleeper.pid])
    kill_job(b"no=mark", {sleeper.pid: earlier.start}, timeout=1.0)
    assert sleeper.poll() is None
    kill_job(b"no=mark", {sleeper.pid: now.start})
    assert sleeper.wait(HANGS_SECONDS) == -signal.SIGKILL


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_ranks_get_sigterm_and_are_waited_for_until_their_grace_is_over(sleeper: subprocess.Popen[bytes]) -> None:
    script = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True)); print(flush=True)\n" \
        "while True: signal.pause()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as stubborn:
        assert stubborn.stdout is not None and stubborn.stdout.readline() == "\n"
        ranks = {}
        for pid in (sleeper.pid, stubborn.pid):
            found = look_up(pid)
            assert found is not None
            ranks[pid] = found.start
        let_end(ranks, 0.5)
        assert stubborn.stdout.readline() == "told\n" and stubborn.poll() is None
        stubborn.kill()
        let_end(ranks, math.inf)  # zombies, and those that nobody has reaped, have ended
        let_end({os.getpid(): 0}, math.inf)  # another process has had this id
        assert "told" not in stubborn.stdout.read(), "once"
    assert sleeper.wait(HANGS_SECONDS) == -signal.SIGTERM


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_the_reaper_of_an_agent_that_stays_stopped_ends_the_job(tmp_path: Path) -> None:
    script = ("import os, selectors, signal, subprocess; from hvdlite_runner.host.worker_group import WorkerGroup; "
              "group = WorkerGroup(selectors.DefaultSelector(), print, os.environ); group.prepare(1.0); "
              "group.watch(subprocess.Popen(['sleep', '1000']).pid); os.kill(os.getpid(), signal.SIGSTOP)")
    mark = f"TEST_JOB={tmp_path}".encode()
    with subprocess.Popen([sys.executable, "-c", script],
                          env={**os.environ, "TMPDIR": str(tmp_path), "TEST_JOB": str(tmp_path)}) as agent:
        try:
            assert agent.wait(HANGS_SECONDS) == -signal.SIGKILL
            deadline = time.monotonic() + HANGS_SECONDS
            while marked_processes(mark) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not marked_processes(mark) and not list(tmp_path.iterdir())
        finally:
            kill_job(mark, {})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are found in /proc")
def test_the_reaper_of_a_job_inside_a_job_outlives_it_and_removes_its_directory(tmp_path: Path) -> None:
    script = ("import os, selectors, signal; from hvdlite_runner.host.worker_group import WorkerGroup; "
              "WorkerGroup(selectors.DefaultSelector(), print, os.environ).prepare(); print('ready', flush=True); "
              "signal.pause()")
    mark = f"TEST_JOB={tmp_path}"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "TMPDIR": str(tmp_path), "TEST_JOB": str(tmp_path)}) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"
        assert len(list(tmp_path.iterdir())) == 1
        kill_job(mark.encode(), {}, timeout=HANGS_SECONDS)
    assert launcher.returncode == -signal.SIGKILL and not list(tmp_path.iterdir())


def test_the_jobs_limit_marks_what_a_rank_starts_and_nothing_else(tmp_path: Path,
                                                                  sleeper: subprocess.Popen[bytes],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_adopt_orphans", lambda: False)
    before = resource.getrlimit(resource.RLIMIT_MSGQUEUE)
    reaper = Reaper(str(tmp_path))
    with reaper.marks():
        orphan = subprocess.run(["/bin/sh", "-c", "sleep 1000 >/dev/null & echo $!"], env={}, start_new_session=True,
                                stdout=subprocess.PIPE, check=True)
    try:
        assert resource.getrlimit(resource.RLIMIT_MSGQUEUE) == before
        reaper.end_job(HANGS_SECONDS)
        left = process_table()
        assert int(orphan.stdout) not in left or left[int(orphan.stdout)].state in "ZX"
        assert sleeper.poll() is None
    finally:
        reaper.stop()
