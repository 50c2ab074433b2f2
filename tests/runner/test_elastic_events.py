"""What hvdrun prints about each event of docs/elastic.md: who it was, where, why, and what follows. See tests/house.

Ranks only speak with the authority: tests/runner/programs/member.py.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.elastic_jobs import HostsFile, Job, begun
from tests.worlds import clean_environment

HASTY_HVDRUN = """
import sys
from hvdlite.membership.events import Limits
from hvdlite_runner.__main__ import main

usual = Limits.__init__

def hasty(self, *args, **kwargs):
    usual(self, *args, **{"quiesce_timeout": 0.4, **kwargs})

Limits.__init__ = hasty
sys.exit(main())
"""
"""It waits 0.4 s where it waits 10 s otherwise."""
HASTY = [sys.executable, "-c", HASTY_HVDRUN]
KILLED = "killed by signal 9 (SIGKILL)"
STOPPED = f"its process was stopped while others waited for it ({KILLED})"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def processes(job: Job, count: int) -> dict[int, int]:
    """Wait until members have begun; return their process ids."""
    return {int(id): int(pid) for id, pid, *_ in (begun(job.wait_for("begun")) for _ in range(count))}


def tell(job: Job, member: int, words: str, answer: str) -> None:
    """Let a member do something, and wait until it has."""
    job.tell(member, words)
    job.wait_for(answer)


def follows(job: Job, world: int, what: str) -> None:
    """Wait for the line about a world that has met, which is to say what happened, and from where the job goes on."""
    line = job.wait_for(f"hvdrun: world {world}, ")
    assert re.fullmatch(re.escape(f"hvdrun: world {world}, {what}; it took ") + r"[\d.]+ s", line), line


def test_ranks_that_are_killed_exit_or_raise(folder: Path) -> None:
    """The first one is rank 0, and one of the others has finished already."""
    with Job(folder, "-np", "4", "--min-np", "1") as job:
        job.wait_for("begun", 4)
        tell(job, 3, "finish", "has finished")
        tell(job, 2, "commits 20", "has commits")
        job.tell(0, "kill")
        assert job.wait_for("hvdrun: rank 0").endswith(f"rank 0 on localhost: {KILLED}")
        follows(job, 2, f"3 ranks, goes on after commit 20; left: rank 0 on localhost ({KILLED})")
        assert job.text.count("heard 2 2 1 3 ") == 3, "the rank with the newest commit is rank 0"
        job.tell(1, "exit 3")
        follows(job, 3, "2 ranks, goes on after commit 20; left: rank 1 on localhost (exit code 3)")
        tell(job, 2, "commits 30", "has commits")
        job.tell(3, "raise trouble")
        follows(job, 4, "1 rank, goes on after commit 30; left: rank 1 (process 3) on localhost (ValueError: trouble "
                "(exit code 1))")
        job.tell(2, "finish")
        assert job.end() == 0


def test_ranks_that_are_lost_before_elastic_run_and_during_recovery(folder: Path) -> None:
    with Job(folder, "-np", "4", "--min-np", "1", environment={**clean_environment(), "OUTSIDE": "3"}) as job:
        job.wait_for("begun", 4)
        job.tell(3, "exit 0")
        follows(job, 2, "3 ranks, goes on after commit 12; left: rank 3 on localhost (it ended with code 0, and had not "
                "called elastic.run)")
        tell(job, 2, "be dying", "is dying")
        job.tell(1, "kill")
        follows(job, 4, f"1 rank, goes on after commit 12; left: rank 1 on localhost ({KILLED}), "
                f"rank 1 (process 2) on localhost ({KILLED})")
        job.tell(0, "finish")
        assert job.end() == 0


def test_too_few_ranks(folder: Path) -> None:
    hosts = HostsFile(folder)
    hosts.write("localhost:2")
    with Job(folder, "-np", "2", "--min-np", "2", "--elastic-timeout", "0.5", *hosts.flags) as job:
        job.wait_for("begun", 2)
        job.tell(1, "kill")
        assert job.wait_for("they wait").startswith(
            "hvdrun: 1 of at least 2 ranks are left: they wait for others, at most 0.5 s; "
            f"left: rank 1 on localhost ({KILLED})")
        assert job.end() == 75
        assert "hvdrun: 2 ranks are needed; there were 1 after 0.5 s" in job.lines
        assert f"hvdrun: rank 1 on localhost failed first: {KILLED}" in job.lines, job.text


@pytest.mark.parametrize(("program", "told"), [
    ("echo no cluster; exit 3", "failed with code 3; it said:\nhvdrun:   no cluster"),
    ("echo a b", "did not print a list of hosts: line 1 of its output: 'a b' is not host:slots"),
    pytest.param("sleep 1000", "did not end within 10 s", marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_discovery_program_that_fails_at_the_start(folder: Path, program: str, told: str) -> None:
    with Job(folder, "-np", "1", "--host-discovery-script", program) as job:
        assert job.end() == 2 and job.text.startswith(f"hvdrun: --host-discovery-script {program} {told}"), job.text


def test_ranks_that_do_not_stop_when_others_do(folder: Path) -> None:
    hosts = HostsFile(folder)
    hosts.write("localhost:5")
    environment = {**clean_environment(), "HVDLITE_HEARTBEAT_TIMEOUT": "2"}
    at_most = "the others wait for it, at most 2 s if it does not answer, else"
    with Job(folder, "-np", "5", "--min-np", "1", *hosts.flags, launcher=HASTY, environment=environment) as job:
        pids = processes(job, 5)
        os.kill(pids[1], signal.SIGSTOP)
        tell(job, 2, "be deaf", "is deaf")
        tell(job, 3, "be computing", "is computing")
        job.tell(4, "kill")
        assert job.wait_for("rank 3 on").endswith(f"rank 3 on localhost has not stopped; {at_most} 600 s")
        silent = f"it did not stop within 2 s ({KILLED})"
        job.wait_for(f"hvdrun: rank 2 on localhost: {silent}")
        job.tell(3, "stop")
        follows(job, 2, f"2 ranks, goes on after commit 12; left: rank 4 on localhost ({KILLED}), "
                f"rank 1 on localhost ({STOPPED}), rank 2 on localhost ({silent})")
        tell(job, 3, "be computing", "is computing")
        hosts.write("localhost:5", "127.0.0.1:1")
        assert job.wait_for("has not reached").endswith(
            f"rank 1 (process 3) on localhost has not reached the boundary at which all ranks stop; {at_most} as long as it "
            "computes")
        job.tell(3, "stop")
        follows(job, 3, "3 ranks, goes on where training stopped; joined: rank 2 (process 5) on 127.0.0.1")
        for member in (0, 3, 5):
            job.tell(member, "finish")
        assert job.end() == 0


def test_ranks_for_which_others_wait_in_a_collective_and_at_the_end(folder: Path) -> None:
    with Job(folder, "-np", "4", "--min-np", "1", launcher=HASTY) as job:
        pids = processes(job, 4)
        tell(job, 1, "be deaf", "is deaf")
        job.tell(0, "blame 1")
        follows(job, 2, "3 ranks, goes on after commit 12; left: rank 1 on localhost (it held up the others: StallError: a "
                f"rank never came ({KILLED}))")
        os.kill(pids[2], signal.SIGSTOP)
        job.tell(3, "finish")
        follows(job, 3, f"2 ranks, goes on after commit 12; left: rank 1 (process 2) on localhost ({STOPPED})")
        for member in (0, 3):
            job.tell(member, "finish")
        assert job.end() == 0


def test_a_rank_is_killed_and_another_one_stopped_when_training_has_finished(folder: Path) -> None:
    hosts = HostsFile(folder)
    hosts.write("localhost:3")
    with Job(folder, "-np", "3", "--min-np", "1", *hosts.flags, launcher=HASTY) as job:
        pids = processes(job, 3)
        for member in range(3):
            tell(job, member, "be staying", "is staying")
            job.tell(member, "finish")
        job.wait_for("AllFinished", 3)
        job.tell(1, "kill")
        assert job.wait_for("hvdrun: ") == f"hvdrun: rank 1 on localhost: {KILLED}; training had finished"
        os.kill(pids[2], signal.SIGSTOP)
        job.tell(0, "exit 0")
        for text, told in (("no list of hosts", "the hosts stay as they were"), ("", "prints no host")):
            hosts.write(text)  # a second each, which is more than hvdrun waits for a stopped rank that it kills
            job.wait_for(told)
        os.kill(pids[2], signal.SIGCONT)
        job.tell(2, "exit 0")
        assert job.end() == 0 and "rank 2" not in job.text, job.text


def finish_and_stay(job: Job) -> None:
    """Let two members finish training, and not end."""
    job.wait_for("begun", 2)
    for member in range(2):
        tell(job, member, "be staying", "is staying")
        job.tell(member, "finish")
    job.wait_for("AllFinished", 2)


def test_rank_0_is_lost_when_training_has_finished(folder: Path) -> None:
    with Job(folder, "-np", "2", "--min-np", "1") as job:
        finish_and_stay(job)
        job.tell(0, "kill")
        job.wait_for(f"hvdrun: rank 0 on localhost: {KILLED}")
        job.tell(1, "exit 0")
        assert job.end() == 137 and job.lines[-1] == f"hvdrun: rank 0 on localhost failed first: {KILLED}", job.text


def test_a_rank_that_does_not_call_run_again(folder: Path) -> None:
    with Job(folder, "-np", "2", "--min-np", "1") as job:
        finish_and_stay(job)
        job.tell(1, "exit 0")
        job.tell(0, "again")
        follows(job, 2, "1 rank, goes on after commit 12; left: rank 1 on localhost (it did not call elastic.run again)")
        job.tell(0, "finish")
        job.wait_for("AllFinished")
        job.tell(0, "exit 0")
        assert job.end() == 0


def test_three_failures_in_a_row_without_progress(folder: Path) -> None:
    with Job(folder, "-np", "4", "--min-np", "1") as job:
        job.wait_for("begun", 4)
        job.tell(1, "raise early")
        follows(job, 2, "3 ranks, goes on after commit 12; left: rank 1 on localhost (ValueError: early (exit code 1))")
        job.tell(2, "kill")
        follows(job, 3, f"2 ranks, goes on after commit 12; left: rank 1 (process 2) on localhost ({KILLED})")
        job.tell(3, "raise late")
        assert job.end() == 1
        reason = ("hvdrun: members have failed 3 times in a row after commit 12, and training got no further "
                  "(--failures-without-progress)")
        first = "hvdrun: rank 1 on localhost failed first: ValueError: early (exit code 1)"
        assert job.lines[-3:] == [reason, first, "hvdrun: Traceback of early"], job.text


def test_one_slot_fails_again_and_again(folder: Path) -> None:
    flags = ("-H", "localhost:1,127.0.0.1:1", "--blacklist-cooldown-range", "0.2", "0.4")
    with Job(folder, "-np", "2", "--min-np", "1", *flags) as job:
        job.wait_for("begun", 2)
        for member, name in ((1, "rank 1"), (2, "rank 1 (process 2)"), (3, "rank 1 (process 3)")):
            if member > 1:
                follows(job, 2 * member - 1, f"2 ranks, goes on where training stopped; joined: {name} on 127.0.0.1")
            job.tell(member, "kill")
            if member == 3:
                assert job.wait_for("no more").endswith("no more processes are started on 127.0.0.1 for some time")
            follows(job, 2 * member, f"1 rank, goes on after commit 12; left: {name} on 127.0.0.1 ({KILLED})")
        job.tell(0, "finish")
        assert job.end() == 0
