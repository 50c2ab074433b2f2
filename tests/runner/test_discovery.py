"""The program that discovers the hosts of an elastic job: what it may print, and every way in which it can fail."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvdlite.core.errors import LaunchError
from hvdlite_runner.host.polled_program import LIMIT_SECONDS, DiscoveryScript, discover_once, parse_discovered


@pytest.mark.parametrize(("text", "found"), [
    ("a:2\nb\n", {"a": 2, "b": 4}),
    ("", {}),
    ("# none today\n\n", {}),
    ("  b:1  # spare\na:3\nb:2\n", {"b": 2, "a": 3}),  # the last line for a host counts
    ("a:0\nb:1\n", {"b": 1}),
    ("[fd00::2]:3\nme@c:1\n", {"fd00::2": 3, "me@c": 1}),
])
def test_lines_of_hosts(text: str, found: dict[str, int]) -> None:
    assert list(parse_discovered(text, 4).items()) == list(found.items())


@pytest.mark.parametrize("line", ["a b", "a:many", ":2", "Traceback (most recent call last):", "-oProxyCommand=x:1"])
def test_nonsense_is_told_with_its_line(line: str) -> None:
    with pytest.raises(LaunchError, match="line 2 of its output"):
        parse_discovered(f"a:1\n{line}\n", 1)


class Script:
    """A discovery program in a file, and what it makes the launcher say."""

    def __init__(self, folder: Path, content: str) -> None:
        self.path, self.warnings, self.pids, self.reaped = folder / "hosts.sh", [], [], []  # type: ignore[var-annotated]
        self.write(content)
        local = Mock(watch=self.pids.append, forget=self.reaped.append)
        self.discovery = DiscoveryScript(str(self.path), 1, self.warnings.append, local)

    def write(self, content: str) -> None:
        self.path.write_text(f"#!/bin/sh\n{content}\n")
        self.path.chmod(0o755)

    def run(self, now: float) -> object:
        """Let it run once, to its end."""
        assert self.discovery.turn(now) is None
        os.waitid(os.P_PID, self.pids[-1], os.WEXITED | os.WNOWAIT)
        return self.discovery.turn(now)


def wait_until_gone(group: int) -> None:
    """Wait for the end of a process group whose processes have been killed: whoever adopted them collects them."""
    with pytest.raises((ProcessLookupError, PermissionError)):
        while True:
            os.killpg(group, 0)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)  # this process has adopted them, if an earlier test has made it a subreaper
            os.sched_yield()


def test_it_runs_every_second_and_only_changes_are_told(tmp_path: Path) -> None:
    script = Script(tmp_path, "echo a:2")
    assert script.run(0.0) == {"a": 2}
    assert script.discovery.turn(0.5) is None and len(script.pids) == 1 and script.discovery.wait(0.25) == 0.75
    assert script.run(1.0) is None
    script.write("echo b; echo a:2")
    assert script.run(2.0) == {"b": 1, "a": 2}
    script.write("")
    assert script.run(3.0) == {} and script.run(4.0) is None, "no hosts are an answer"
    assert script.reaped == script.pids
    assert script.warnings == [f"--host-discovery-script {script.path} prints no host; ranks that run go on"]


@pytest.mark.parametrize(("content", "told"), [
    ("echo no such cluster >&2; exit 3", r"failed with code 3; it said:\n  no such cluster"),
    ("echo a:1 b:1", "line 1 of its output: 'a:1 b:1' is not host:slots"),
    ("exit 1", r"failed with code 1$"),
])
def test_the_first_failure_is_an_error_and_later_ones_are_warnings(tmp_path: Path, content: str, told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        Script(tmp_path, content).run(0.0)
    script = Script(tmp_path, "echo a")
    script.run(0.0)
    script.write(content)
    for now in (1.0, 2.0, 3.0):
        assert script.run(now) is None
    assert len(script.warnings) == 1 and "; the hosts stay as they were" in script.warnings[0]
    script.write("echo b")
    assert script.run(4.0) == {"b": 1}


@pytest.mark.parametrize("content", ["echo at $$: no route; exit 1", "echo $$ is no host"])
def test_a_failure_is_told_once_a_minute_whatever_it_prints(tmp_path: Path, content: str) -> None:
    script = Script(tmp_path, "echo a")
    script.run(0.0)
    script.write(content)
    for now in (1.0, 2.0, 60.5):
        script.run(now)
    assert len(script.warnings) == 1
    script.run(61.5)
    assert len(script.warnings) == 2 and len(script.discovery._program._warned) == 1
    script.write("exit 7")
    script.run(62.5)
    assert len(script.warnings) == 3, "another kind"


def test_one_that_cannot_be_started_any_more_changes_nothing(tmp_path: Path) -> None:
    script = Script(tmp_path, "echo a")
    script.run(0.0)
    script.path.chmod(0o644)
    assert script.discovery.turn(1.0) is None and "is not executable" in script.warnings[-1]
    script.path.chmod(0o755)
    with script.path.open("a"):  # the system does not start a file that is being written
        assert script.run(2.0) is None
    assert "the hosts stay as they were" in script.warnings[-1] and "Text file busy" in script.warnings[-1]
    script.write("echo b")
    assert script.run(3.0) == {"b": 1}


def test_one_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    script = Script(tmp_path, "echo a:1; sleep 1000")
    assert script.discovery.turn(0.0) is None and script.discovery.wait(1.0) == LIMIT_SECONDS - 1
    assert script.discovery.turn(LIMIT_SECONDS - 0.1) is None and len(script.pids) == 1, "never two at a time"
    with pytest.raises(LaunchError, match=r"did not end within 10 s"):
        script.discovery.turn(LIMIT_SECONDS)
    wait_until_gone(script.pids[0])


def test_what_it_leaves_behind_is_killed(tmp_path: Path) -> None:
    script = Script(tmp_path, "sleep 1000 & echo a:1")
    assert script.run(0.0) == {"a": 1}
    wait_until_gone(script.pids[0])


def test_a_command_line_and_a_file_that_is_not_executable(tmp_path: Path) -> None:
    assert discover_once("printf 'a:2\\nb\\n'", 3) == {"a": 2, "b": 3}
    (tmp_path / "no #! line").write_text("echo a:2\n")
    (tmp_path / "no #! line").chmod(0o755)
    assert discover_once(str(tmp_path / "no #! line"), 1) == {"a": 2}  # as in Horovod
    (tmp_path / "hosts").write_text("a:1\n")
    with pytest.raises(LaunchError, match=r"is not executable; chmod \+x"):
        discover_once(str(tmp_path / "hosts"), 1)
