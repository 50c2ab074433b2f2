"""Hosts that are to be left: by `hvdrun --leave`, by a signal to an agent, and as a program says. See docs/elastic.md."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite_runner.host.polled_program import preemption_script, seconds_left
from tests.runner.elastic_jobs import HostsFile, Job
from tests.worlds import HANGS_SECONDS, HVDRUN, clean_environment

KILLED = "killed by signal 9 (SIGKILL)"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, for sockets, and a remote shell to hosts that are this machine, with names in HOST."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rsh"
        path.write_text('#!/bin/sh\nexport HOST="$1"; shift\nexec sh -c "$*"\n')
        path.chmod(0o755)
        yield Path(name)


def job(folder: Path, *flags: str, hosts: str = "localhost:1,b:2", np: int = 3) -> Job:
    return Job(folder, "--remote-shell", str(folder / "rsh"), "-H", hosts, "-np", str(np), "--min-np", "1", *flags)


def hvdrun(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run another hvdrun; return its exit code and what it has printed."""
    ended = subprocess.run([*HVDRUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                           timeout=HANGS_SECONDS, env={**clean_environment(), "TMPDIR": str(folder / "tmp")})
    return ended.returncode, ended.stdout


def follows(running: Job, world: int, what: str) -> None:
    line = running.wait_for(f"hvdrun: world {world}, ")
    assert re.fullmatch(re.escape(f"hvdrun: world {world}, {what}; it took ") + r"[\d.]+ s", line), line


def finish(running: Job, *members: int) -> None:
    for member in members:
        running.tell(member, "finish")
    assert running.end() == 0 and "was lost" not in running.text, running.text


def test_a_host_is_left_on_demand(folder: Path) -> None:
    with job(folder) as running:
        running.wait_for("begun", 3)
        pid = str(running.process.pid)
        assert hvdrun(folder, "--leave", "c") == (2, "hvdrun: the job has no host c; it has: localhost, b\n")
        assert hvdrun(folder, "--leave", "b", "--job", pid) == (
            0, "host b is not used any more; its ranks leave at the next boundary: rank 1 on b, rank 2 on b\n"
            "host b has been left\n")
        assert running.wait_for("to leave") == "hvdrun: rank 1 on b, rank 2 on b: to leave (hvdrun --leave)"
        follows(running, 2, "1 rank, goes on where training stopped; left: rank 1 on b (hvdrun --leave), rank 2 on b "
                "(hvdrun --leave)")
        assert hvdrun(folder, "--leave", "b") == (2, "hvdrun: the job has no host b; it has: localhost\n")
        assert hvdrun(folder, "--leave", "localhost") == (
            2, "hvdrun: all ranks are on host localhost, and none would be left that has the state; to end the job: kill "
            f"{pid}\n")
        finish(running, 0)


def test_a_host_that_was_left_is_used_again_when_discovery_has_lost_it_and_finds_it(folder: Path) -> None:
    hosts = HostsFile(folder)
    hosts.write("localhost:1", "127.0.0.1:1")
    with Job(folder, "-np", "2", "--min-np", "1", *hosts.flags) as running:
        running.wait_for("begun", 2)
        assert hvdrun(folder, "--leave", "localhost")[1].endswith("host localhost has been left\n")
        follows(running, 2, "1 rank, goes on where training stopped; left: rank 0 on localhost (hvdrun --leave)")
        hosts.write("127.0.0.1:2")
        follows(running, 3, "2 ranks, goes on where training stopped; joined: rank 1 (process 2) on 127.0.0.1")
        hosts.write("127.0.0.1:2", "localhost:1")
        follows(running, 4, "3 ranks, goes on where training stopped; joined: rank 2 (process 3) on localhost")
        finish(running, 1, 2, 3)


def test_who_cannot_be_asked_to_leave_a_host(folder: Path) -> None:
    (folder / "tmp").mkdir()
    assert hvdrun(folder, "--leave", "b") == (2, "hvdrun: no job that you started with hvdrun is running on this host\n")
    with Job(folder, "-np", "1", program=["sh", "-c", "echo here; sleep 1000"]) as running:
        running.wait_for("here")
        pid = running.process.pid
        assert hvdrun(folder, "--leave", "localhost", "--job", str(pid)) == (
            2, f"hvdrun: hvdrun process {pid} has no running job on this host; running: none. Not elastic, or started on "
            f"another host: process {pid}\n")


def test_a_job_that_ends_before_its_host_is_left(folder: Path) -> None:
    with job(folder) as running:
        running.wait_for("begun", 3)
        running.tell(2, "be computing")
        running.wait_for("is computing")
        with subprocess.Popen([*HVDRUN, "--leave", "b"], stdout=subprocess.PIPE, text=True,
                              env={**clean_environment(), "TMPDIR": str(folder / "tmp")}) as leaving:
            assert leaving.stdout is not None and "leave at the next boundary" in leaving.stdout.readline()
            running.process.send_signal(signal.SIGINT)
            assert leaving.stdout.read() == "the job has ended\n" and leaving.wait(HANGS_SECONDS) == 0
        assert running.end() == 130


def test_a_signal_to_an_agent_is_a_notice_of_its_host(folder: Path) -> None:
    with job(folder, "--verbose", "--grace", "20") as running:
        found = re.search(r"agent (\d+)", running.wait_for("hvdrun: host b is"))
        running.wait_for("begun", 3)
        assert found is not None
        os.kill(int(found[1]), signal.SIGTERM)
        why = "hvdrun's agent got SIGTERM"
        assert running.wait_for("to leave") == f"hvdrun: rank 1 on b, rank 2 on b: to leave within 20 s ({why})"
        follows(running, 2, f"1 rank, goes on where training stopped; left: rank 1 on b ({why}), rank 2 on b ({why})")
        finish(running, 0)


def test_a_rank_that_does_not_leave_after_a_signal_to_its_agent(folder: Path) -> None:
    with job(folder, "--verbose", "--grace", "1", hosts="localhost:1,b:1", np=2) as running:
        found = re.search(r"agent (\d+)", running.wait_for("hvdrun: host b is"))
        running.wait_for("begun", 2)
        running.tell(1, "be computing")
        running.wait_for("is computing")
        assert found is not None
        os.kill(int(found[1]), signal.SIGTERM)
        follows(running, 2, "1 rank, goes on where training stopped; left: rank 1 on b (hvdrun's agent got SIGTERM; it had "
                f"not left in time ({KILLED}))")
        finish(running, 0)


def on_b(script: str) -> tuple[str, str]:
    """Return the flags of a program that says nothing on this host."""
    return "--preemption-script", f'[ -z "$HOST" ] || {{ {script}; }}'


def test_a_program_says_when_a_host_is_taken_away(folder: Path) -> None:
    with job(folder, *on_b("echo 50")) as running:
        assert running.wait_for("to leave") == "hvdrun: rank 1 on b, rank 2 on b: to leave within 50 s (--preemption-script)"
        follows(running, 2, "1 rank, goes on where training stopped; left: rank 1 on b (--preemption-script), rank 2 on b "
                "(--preemption-script)")
        finish(running, 0)


def test_a_rank_that_has_not_left_in_time_is_killed(folder: Path) -> None:
    go = folder / "go"
    with job(folder, *on_b(f"while [ ! -e {go} ]; do sleep 0.02; done; echo 0.5"), hosts="localhost:1,b:1",
             np=2) as running:
        running.wait_for("begun", 2)
        running.tell(1, "be computing")
        running.wait_for("is computing")
        go.touch()
        follows(running, 2, "1 rank, goes on where training stopped; left: rank 1 on b (--preemption-script; it had not "
                f"left in time ({KILLED}))")
        finish(running, 0)


def test_all_ranks_are_to_leave_with_the_host_of_hvdrun(folder: Path) -> None:
    go, why = folder / "go", "--preemption-script on hvdrun's own host"
    script = f'[ -n "$HOST" ] || {{ while [ ! -e {go} ]; do sleep 0.02; done; echo 6; }}'
    with job(folder, "--preemption-script", script) as running:
        running.wait_for("begun", 3)
        go.touch()
        assert running.end() == 75, running.text
        assert f"hvdrun: rank 0 on localhost, rank 1 on b, rank 2 on b: to leave within 6 s ({why})" in running.lines
        assert running.lines[-1] == f"hvdrun: all ranks were told to leave: {why}"
        assert running.text.count("heard Dismissed") == 3, running.text


@pytest.mark.parametrize("output", ["soon\n", "-1\n", "inf\n", "nan\n", "1 2\n"])
def test_what_is_no_number_of_seconds(output: str) -> None:
    with pytest.raises(LaunchError, match="a number of seconds"):
        seconds_left(output)


def test_a_program_that_fails_is_told_and_asked_again(tmp_path: Path) -> None:
    events: list[float | str | None] = []
    answer, now, pids = tmp_path / "answer", 0.0, list[int]()
    script = preemption_script(f"cat {answer}", events.append, Mock(watch=pids.append))
    for said in (None, "soon", "tomorrow", "", " 120\n", "7"):
        if said is not None:
            answer.write_text(said)
        before = len(pids)
        script.turn(now)
        if len(pids) > before:
            os.waitid(os.P_PID, pids[-1], os.WEXITED | os.WNOWAIT)
        events += filter(None, [script.turn(now)])
        now += 5.0
    failed, nonsense, *seconds = events
    name = f"--preemption-script cat {answer}"
    assert isinstance(failed, str) and failed.startswith(f"{name} failed with code 1; it is asked again; it said:\n")
    assert nonsense == f"{name} did not print a number of seconds; it is asked again; it said:\n  soon"
    assert seconds == [120.0, 7.0]
    script.close()
    assert script.turn(now) is None and len(pids) == 6 and script.wait(now) == math.inf, "it is asked no more"
