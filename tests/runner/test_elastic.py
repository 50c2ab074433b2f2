"""hvdrun's elastic jobs on one machine, with members that only speak with the authority: no runtime, no training."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvdlite.membership.events import Limits, StartMember
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.job.starts import Starts
from hvdlite_runner.placement import LOCAL
from tests.runner.elastic_jobs import HostsFile, Job, begun


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_member_dies_with_its_descendants_and_the_others_go_on(folder: Path) -> None:
    with Job(folder, "-np", "3", "--min-np", "1") as job:
        job.wait_for("begun", 3)
        job.tell(1, "child")
        child = int(job.wait_for("child").split()[-1])
        job.tell(1, "kill")
        assert job.wait_for("killed by").startswith("hvdrun: rank 1 on localhost: killed by signal 9 (SIGKILL)")
        assert not lives(child), "its descendants are killed before anybody is told"
        assert "hvdrun: world 2, 2 ranks, goes on after commit 12; left: rank 1" in job.wait_for("world 2")
        job.tell(2, "finish")
        job.tell(0, "finish")
        assert job.end() == 0
        assert job.text.count("heard 2 0 2 localhost localhost ((0, 1),)") == 2
        assert "[1]<stdout>:heard AllFinished" in job.text, "member 2 is rank 1 now"
        assert "hvdrun: failed: rank 1 on localhost: killed by signal 9" in job.lines[-1], "the summary"


def test_a_host_comes_and_goes(folder: Path) -> None:
    hosts = HostsFile(folder)
    hosts.write("localhost:1")
    with Job(folder, "-np", "1", "--max-np", "3", *hosts.flags) as job:
        assert begun(job.wait_for("begun"))[2:] == ["0", "1", "0", "0", "localhost", "1", "-"]
        hosts.write("localhost:1", "127.0.0.1:1")
        line = job.wait_for("begun")
        assert line.startswith(("[+1]<stdout>:", "[1]<stdout>:"))
        assert begun(line)[2:] == ["1", "2", "0", "0", "127.0.0.1", "1", "1"]
        assert "[1]<stdout>:heard 2 0 1 localhost 127.0.0.1 ((0, 1),)" in job.wait_for("[1]<stdout>:heard 2")
        assert "world 2, 2 ranks, goes on where training stopped; joined: rank 1 on 127.0.0.1; it took" in (
            job.wait_for("world 2"))
        hosts.path.write_text("nonsense here\n")
        assert "the hosts stay as they were" in job.wait_for("--host-discovery-script")
        hosts.path.write_text("")
        assert job.wait_for("prints no host").endswith("prints no host; ranks that run go on")
        hosts.write("127.0.0.1:1")
        assert "world 3, 1 rank, goes on where training stopped; left: rank 0 on localhost (its host was removed); it" in (
            job.wait_for("world 3"))
        job.tell(1, "finish")
        assert job.end() == 0 and job.text.count("did not print a list of hosts") == 1, job.text
        assert "[0]<stdout>:heard AllFinished" in job.text


def test_it_waits_for_slots_at_the_start(folder: Path) -> None:
    hosts = HostsFile(folder)
    hosts.write("localhost:1")
    with Job(folder, "-np", "2", "--elastic-timeout", "50", *hosts.flags) as job:
        assert "2 slots are needed, and 1 were discovered (localhost:1); waiting for more, at most 50 s" in (
            job.wait_for("waiting"))
        hosts.write("localhost:2")
        job.wait_for("begun", 2)
        for member in (0, 1):
            job.tell(member, "finish")
        assert job.end() == 0


def test_the_first_traceback_is_shown_when_the_job_ends(folder: Path) -> None:
    with Job(folder, "-np", "2", "--min-np", "2", "--output-filename", str(folder / "output")) as job:
        job.wait_for("begun", 2)
        job.tell(1, "raise trouble")
        assert job.end() == 75, "too few ranks are left, and there are no other hosts"
        assert "ValueError: trouble (exit code 1)" in job.text and "hvdrun: Traceback of trouble" in job.text, job.text
        assert "begun 1" in (folder / "output" / "rank.1" / "stdout").read_text()


def test_a_failure_from_which_training_went_on_is_not_the_cause_of_the_jobs_end(folder: Path) -> None:
    with Job(folder, "-np", "4", "--min-np", "1") as job:
        job.wait_for("begun", 4)
        job.tell(0, "raise early")
        job.wait_for("heard 2", 3)
        for member in (1, 2, 3):
            job.tell(member, "commits 20")
        job.wait_for("has commits", 3)
        job.tell(1, "raise late")
        job.wait_for("heard 3", 2)
        job.tell(2, "raise late")
        assert job.end() == 1
        assert "two members have failed in the same way" in job.text
        assert "hvdrun: Traceback of late" in job.text and "Traceback of early" not in job.text, job.text


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_of_the_user_ends_all_members(folder: Path, sign: int, code: int) -> None:
    with Job(folder, "-np", "2", "--min-np", "1") as job:
        job.wait_for("begun", 2)
        job.process.send_signal(sign)
        assert job.end() == code and "world 2" not in job.text, job.text


def test_a_member_that_sends_nonsense_is_killed(folder: Path) -> None:
    with Job(folder, "-np", "3", "--min-np", "1") as job:
        job.wait_for("begun", 3)
        job.tell(2, "kill")
        job.wait_for("world 2")  # the launcher knows who sends
        job.tell(0, "talk")
        job.wait_for("world 3")
        job.tell(1, "finish")
        assert job.end() == 0
        assert "rank 0 on localhost: hvdrun has ended it for what it sent: not a message: " in job.text


def test_nothing_is_left_when_hvdrun_is_killed(folder: Path) -> None:
    with Job(folder, "-np", "2", "--min-np", "1") as job:
        job.wait_for("begun", 2)
        job.tell(0, "child")
        job.wait_for("child")
        job.process.kill()  # leaving the context checks the rest


def test_members_are_bound_to_equal_parts_of_the_cores(folder: Path) -> None:
    script = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with Job(folder, "-np", "2", "--min-np", "1", "--bind", "--no-prefix", program=script) as job:
        assert job.end() == 0
        cores = [core for line in job.lines for core in json.loads(line)]
    own = sorted(os.sched_getaffinity(0))
    assert set(cores) <= set(own) and len(cores) == max(2, len(own) // 2 * 2), (cores, own)
    assert len(set(cores)) == len(cores) or len(own) == 1


def test_each_slot_of_a_machine_has_cores_of_its_own() -> None:
    """Whatever its host is called, and whether it was there from the beginning."""
    names = {"localhost": 2, "127.0.0.1": 1}
    hosts = Mock()
    hosts.machine_of.return_value, hosts.slots_of.return_value = LOCAL, names
    settings = JobSettings(["sh"], Limits(2), names, bind=True, share_cores=False)
    starts = Starts(settings, hosts, {}, "key", print)
    founders = [StartMember(0, "localhost", 0, 0, 2, is_joiner=False), StartMember(1, "127.0.0.1", 0, 1, 2, is_joiner=False)]
    joiner = StartMember(2, "localhost", 1, 2, 3, is_joiner=True)
    shares = [each.core_share for some in (founders, [joiner]) for order in starts.orders(some).values()
              for each in order.processes]
    assert shares == [(0, 3), (2, 3), (1, 3)]


def test_a_script_that_is_not_elastic_ends_like_any_other(folder: Path) -> None:
    script = ["sh", "-c", "exit $HVDLITE_RANK"]
    with Job(folder, "-np", "2", "--min-np", "1", program=script) as job:
        assert job.end() == 1 and "rank 1" in job.text and "world 2" not in job.text
    with Job(folder, "-np", "2", "--min-np", "1", program=["true"]) as job:
        assert job.end() == 0 and job.lines == []
    with Job(folder, "-np", "2", "--min-np", "1", program=["/proc/self/root/tmp/../no-such-program"]) as job:
        assert job.end() == 127


def test_texts_of_members_do_not_control_the_terminal(folder: Path) -> None:
    with Job(folder, "-np", "2", "--min-np", "1") as job:
        job.wait_for("begun", 2)
        job.tell(0, "raise \x1b]0;owned\x07")
        job.wait_for("world 2")
        job.tell(1, "finish")
        assert job.end() == 0
        assert r"rank 0 on localhost: ValueError: \x1b]0;owned\x07 (exit code 1)" in job.text and "\x1b" not in job.text
