"""Elastic jobs on several hosts that are this machine, reached by a script; what needs real networks is in test_hosts.py."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.elastic_jobs import PROGRAM, HostsFile, Job, begun
from tests.worlds import clean_environment


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, for sockets, and a remote shell in it: a host answers while there is a file open-HOST."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rsh"
        path.write_text(f'#!/bin/sh\n[ -e {name}/open-$1 ] || {{ echo "$1 is closed" >&2; exit 9; }}\n'
                        'shift\nexec sh -c "$*"\n')
        path.chmod(0o755)
        yield Path(name)


def job(folder: Path, *flags: str) -> Job:
    return Job(folder, "--remote-shell", str(folder / "rsh"), *flags)


def finish(running: Job, *members: int) -> int:
    for member in members:
        running.tell(member, "finish")
    return running.end()


def test_a_member_on_another_host_dies(folder: Path) -> None:
    (folder / "open-b").touch()
    with job(folder, "-H", "localhost:1,b:2", "-np", "3", "--min-np", "1") as running:
        running.wait_for("begun", 3)
        running.tell(1, "child")
        running.wait_for("child")
        running.tell(1, "kill")
        assert "left: rank 1 on b (killed by signal 9 (SIGKILL))" in running.wait_for("world 2")
        assert finish(running, 0, 2) == 0
        assert running.text.count("heard 2 0 2 localhost b ((0,), (1,))") == 2, running.text


def test_members_whose_processes_are_stopped_are_given_up(folder: Path) -> None:
    (folder / "open-b").touch()
    script = ["sh", "-c", f"{sys.executable} {PROGRAM} {folder}; exit $?"]  # the shell itself is not stopped
    with Job(folder, "--remote-shell", str(folder / "rsh"), "-H", "localhost:2,b:2", "-np", "4", "--min-np", "1",
             program=script) as running:
        pids = {id: int(pid) for id, pid, *_ in (begun(running.wait_for("begun")) for _ in range(4))}
        for member in ("1", "3"):
            os.kill(pids[member], signal.SIGSTOP)
        running.tell(2, "kill")
        line = running.wait_for("world 2")
        assert "rank 1 on localhost (its process was stopped" in line and "rank 3 on b (its process was stopped" in line
        assert finish(running, 0) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_joins_and_is_lost(folder: Path, number: int) -> None:
    (folder / "open-b").touch()
    hosts = HostsFile(folder)
    hosts.write("localhost:1")
    with Job(folder, "--remote-shell", str(folder / "rsh"), "--verbose", "-np", "1", *hosts.flags,
             environment={**clean_environment(), "HVDLITE_AGENT_TIMEOUT": "3"}) as running:
        running.wait_for("begun")
        hosts.write("localhost:1", "b:2")
        agent = re.search(r"agent (\d+)", running.wait_for("hvdrun: host b is"))
        assert agent is not None
        assert {tuple(begun(running.wait_for("begun"))[6:]) for _ in range(2)} == {("b", "1", "1")}
        running.wait_for("3 ranks, goes on where training stopped; joined: rank 1 on b, rank 2 on b; it took")
        (folder / "open-b").unlink()
        os.kill(int(agent[1]), number)
        reason = running.wait_for("host b was lost: ").partition("host b was lost: ")[2]
        lost = f"({reason} (lost with its host))"
        running.wait_for(f"1 rank, goes on after commit 12; left: rank 1 on b {lost}, rank 2 on b {lost}; it took")
        assert finish(running, 0) == 0


def test_nothing_is_left_of_hosts_that_are_this_one_when_hvdrun_is_killed(folder: Path) -> None:
    (folder / "open-b").touch()
    with job(folder, "-H", "localhost:1,b:1", "-np", "2", "--min-np", "1") as running:
        running.wait_for("begun", 2)
        running.process.kill()


def test_a_host_that_is_not_used_any_more_is_left(folder: Path) -> None:
    (folder / "open-b").touch()
    hosts = HostsFile(folder)
    hosts.write("b:1", "localhost:1")
    with job(folder, "-np", "2", "--min-np", "1", *hosts.flags) as running:
        running.wait_for("begun", 2)
        hosts.write("localhost:1")
        assert "left: rank 0 on b (its host was removed)" in running.wait_for("world 2")
        assert finish(running, 1) == 0 and "was lost" not in running.text


def test_a_host_that_cannot_be_reached_is_tried_again(folder: Path) -> None:
    hosts = HostsFile(folder)
    hosts.write("localhost:1", "b:1")
    with job(folder, "-np", "1", *hosts.flags) as running:
        assert "host b cannot be reached by rsh (exit code 9): b is closed; it is tried again" in running.wait_for("host b")
        running.wait_for("begun")
        (folder / "open-b").touch()
        running.wait_for("2 ranks")
        assert finish(running, 0, 1) == 0


def test_fixed_hosts_that_cannot_be_reached_end_the_job(folder: Path) -> None:
    with job(folder, "-H", "localhost:1,b:1", "-np", "2", "--min-np", "1") as running:
        assert running.end() == 2 and running.lines[-1].startswith("hvdrun: host b cannot be reached"), running.text
