"""Agents without a network: the remote shell is a script on this machine. What needs real hosts: test_hosts.py."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.core.errors import ProtocolError
from hvdlite.core.launch_contract import FailureRecord
from hvdlite.core.world import World
from hvdlite.diagnostics.progress import Evaluation, Reading
from hvdlite_runner.host.reaper import marked_processes
from hvdlite_runner.messages import (
    MAGIC,
    AgentFrames,
    AgentReady,
    Exited,
    Output,
    Ping,
    ProcessStart,
    Signal,
    Start,
    Stop,
    TaskPiece,
    frame,
)
from tests.worlds import HANGS_SECONDS, HVDRUN, clean_environment

ORDERS = [Ping(), Signal(15), Stop(), TaskPiece(b"\0parcel"),
          Start([ProcessStart(0, World(0, 2, 0, 1, 0, 2), {}, (0, 2))], [b"python", b"\xff"], {"A": b"b"}, True)]
EVENTS = [AgentReady("3.11.2", "0.1.0", "a", 8, 77), Output(3, "stderr", b"\xff\n"),
          Exited(3, -9, False, FailureRecord(3, 3, 0.5, "ValueError", "boom", "Traceback"), Reading(metrics=[
              Evaluation(1.0, 2.0, {"loss": 0.5})]))]


@given(st.lists(st.sampled_from(ORDERS)), st.lists(st.integers(1, 40), min_size=1))
def test_orders_survive_any_cut_into_pieces(orders: list[object], sizes: list[int]) -> None:
    stream, frames, received, position = b"".join(map(frame, orders)), AgentFrames(events=False), [], 0  # type: ignore[arg-type]
    while position < len(stream):
        size = sizes[position % len(sizes)]
        received += frames.feed(stream[position:position + size])
        position += size
    assert received == orders


@given(st.binary(max_size=200).filter(lambda noise: MAGIC not in noise), st.integers(1, 50))
def test_what_a_login_shell_writes_is_passed_over(noise: bytes, size: int) -> None:
    stream = noise + MAGIC + b"".join(map(frame, EVENTS))
    frames = AgentFrames(events=True)
    pieces = [stream[start:start + size] for start in range(0, len(stream), size)]
    assert [event for piece in pieces for event in frames.feed(piece)] == EVENTS


@given(st.binary(max_size=300))
def test_garbage_is_an_error_or_nothing(content: bytes) -> None:
    try:
        AgentFrames(events=False).feed(content)
    except ProtocolError:
        pass


def test_a_frame_that_is_too_long_is_not_waited_for() -> None:
    with pytest.raises(ProtocolError, match="the limit is"):
        AgentFrames(events=False).feed(b"\xff\xff\xff\xff")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A remote shell to "hosts" that are this machine, each with a host name of its own in HOST."""
    monkeypatch.setenv("TEST_JOB", str(tmp_path))
    path = tmp_path / "rsh"
    path.write_text('#!/bin/sh\nexport HOST="$1"; shift\nexec sh -c "$*"\n')
    path.chmod(0o755)
    yield path
    mark = f"TEST_JOB={tmp_path}".encode()
    for _ in range(150):
        if not marked_processes(mark):
            return
        signal.sigtimedwait([], 0.1)
    raise AssertionError([Path(f"/proc/{pid}/cmdline").read_bytes() for pid in marked_processes(mark)])


def command(shell: Path, *arguments: str) -> list[str]:
    return [*HVDRUN, "--no-prefix", "--remote-shell", str(shell), *arguments]


def hvdrun(shell: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(shell, *arguments), capture_output=True, text=True, timeout=HANGS_SECONDS, check=False,
                          env={**clean_environment(), "OMP_NUM_THREADS": "1"})


def test_ranks_of_agents_and_of_the_launcher(shell: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.mkdir()
    ended = hvdrun(shell, "-H", "localhost:1,b:2", "sh", "-c", "echo ${HOST:-here} $HVDLITE_RANK $HVDLITE_CROSS_RANK; "
                   f"touch {said}/$HVDLITE_RANK; while [ $(ls {said} | wc -l) -lt 3 ]; do sleep 0.05; done; "
                   "exit $((HVDLITE_RANK / 2 * 5))")  # the first failure ends the others
    assert sorted(ended.stdout.splitlines()) == ["b 1 1", "b 2 0", "here 0 0"]
    assert ended.returncode == 5 and "hvdrun: rank 2 on b failed first: exit code 5" in ended.stderr


@pytest.mark.parametrize("control", ["auto", "tcp"])
def test_ranks_that_are_all_on_another_host_have_an_address_if_they_connect_by_tcp(
        shell: Path, control: str) -> None:
    job = hvdrun(shell, "--control", control, "-H", "b:2", "sh", "-c", "echo at $HVDLITE_COORDINATOR.")
    addresses = re.findall(r"at (.*)\.$", job.stdout, re.MULTILINE)
    assert job.returncode == 0 and len(addresses) == 2, job.stderr
    assert all(bool(re.fullmatch(r"127\.0\.0\.1:\d+", each)) == (control == "tcp") for each in addresses), addresses


def test_threads_are_shared_out_on_each_host(shell: Path) -> None:
    environment = {**os.environ}
    environment.pop("OMP_NUM_THREADS", None)
    ended = subprocess.run(command(shell, "-H", "localhost:1,b:2", "sh", "-c", "echo $OMP_NUM_THREADS"), capture_output=True,
                           text=True, timeout=HANGS_SECONDS, check=True, env=environment)
    cores = len(os.sched_getaffinity(0))
    assert sorted(ended.stdout.split()) == sorted([str(cores), *[str(max(1, cores // 2))] * 2])
    assert f"OMP_NUM_THREADS={cores} on localhost, {max(1, cores // 2)} on b" in ended.stderr


def test_a_rank_that_raises_on_another_host_is_told_with_its_traceback(shell: Path) -> None:
    ended = hvdrun(shell, "-H", "b:2", sys.executable, "-c", "import hvdlite as hvd\nhvd.init()\n"
                   "if hvd.rank() == 1:\n    raise KeyError('bad batch')\nhvd.barrier()")
    assert ended.returncode == 1 and "hvdrun: rank 1 failed first: KeyError: 'bad batch' (exit code 1)" in ended.stderr


@pytest.mark.parametrize(("script", "told"), [
    (r"printf '\033]0;owned\007\n' >&2; exit 3", r"host b cannot be reached by rsh \(exit code 3\): \\x1b\]0;owned\\x07"),
    ("echo oops >&2; exit 3", r"host b cannot be reached by rsh \(exit code 3\): oops"),
    (r"printf '\0hvdlite agent\0\377\377\377\377'; sleep 100", "host b sent something that is no message"),
    ("sleep 100", "host b did not start its agent within 2 s"),
    ("exec >&-; echo bye >&2; sleep 1000", "host b: rsh closed its output and did not end: bye"),
])
def test_a_remote_shell_that_does_something_else(shell: Path, script: str, told: str) -> None:
    shell.write_text(f"#!/bin/sh\n{script}\n")
    ended = hvdrun(shell, "--start-timeout", "2", "-H", "b:1", "true")
    assert ended.returncode == 2 and re.search(told, ended.stderr), ended.stderr


def test_a_host_that_is_lost_while_others_are_still_reached(shell: Path) -> None:
    """It is one line with its reason, and no rank is started."""
    shell.write_text('#!/bin/sh\nif [ $1 = c ]; then sleep 4; else (sleep 2; kill -9 -$$) & fi\nshift\nexec sh -c "$*"\n')
    ended = hvdrun(shell, "-H", "b:1,c:1", "echo", "started")
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1, ended
    assert ended.stderr.startswith("hvdrun: host b was lost: rsh ended with code -9"), ended.stderr


def test_a_remote_shell_that_is_not_there() -> None:
    ended = hvdrun(Path("/no/rsh"), "-H", "b:1,c:1", "true")
    assert ended.returncode == 2 and "cannot start /no/rsh" in ended.stderr and ended.stderr.count("\n") == 1


def test_the_doctor_waits_for_a_host_that_is_silent_while_it_collects_facts(shell: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "ssh").write_text("#!/bin/sh\nsleep 6.5\n")  # the doctor asks for its version
    (slow / "ssh").chmod(0o755)
    ended = subprocess.run([*command(shell, "-H", "b:1", "--doctor", "--json"), "--agent-timeout", "4"], capture_output=True,
                           text=True, timeout=HANGS_SECONDS, check=False,
                           env={**clean_environment(), "PATH": f"{slow}:{os.environ['PATH']}"})
    assert list(json.loads(ended.stdout)["hosts"]) == ["b"], ended.stdout + ended.stderr


def test_files_that_cannot_be_written_end_the_job_before_any_host_is_reached(shell: Path, tmp_path: Path) -> None:
    shell.write_text(f"#!/bin/sh\ntouch {tmp_path}/reached\nsleep 100\n")
    ended = hvdrun(shell, "--output-filename", "/proc/here", "-H", "b:1", "true")
    assert ended.returncode == 2 and "cannot write to --output-filename /proc/here" in ended.stderr, ended.stderr
    assert not (tmp_path / "reached").exists()


def test_output_of_every_rank_is_kept_here(shell: Path, tmp_path: Path) -> None:
    ended = hvdrun(shell, "--output-filename", str(tmp_path / "out"), "--fold", "-H", "b:1,c:1", "echo", "loaded")
    assert ended.returncode == 0 and ended.stdout == "loaded (x2)\n"
    assert [(tmp_path / f"out/rank.{rank}/stdout").read_text() for rank in (0, 1)] == ["loaded\n"] * 2


def test_only_errors_are_shown_until_a_rank_fails(shell: Path) -> None:
    ended = hvdrun(shell, "--show", "rank0", "-H", "b:2", "sh", "-c", "echo $HVDLITE_RANK; echo why >&2; exit $HVDLITE_RANK")
    assert ended.returncode == 1 and ended.stdout.splitlines() == ["0", "1"] and ended.stderr.count("why\n") == 2


@pytest.fixture
def long_job(shell: Path, tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], int]]]:
    """Start a job with a rank on another host, which ends when the file `done` exists; return it and the agent's id."""
    def begun(timeout: str) -> tuple[subprocess.Popen[str], int]:
        started = subprocess.Popen(
            command(shell, "--verbose", "-H", "b:1", "sh", "-c", f"while [ ! -e {tmp_path}/done ]; do sleep 0.1; done"),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**clean_environment(), "OMP_NUM_THREADS": "1", "HVDLITE_AGENT_TIMEOUT": timeout})
        jobs.append(started)
        agent = re.search(r"agent (\d+)", line_with(started, "host b is "))
        assert agent
        agents.append(int(agent[1]))
        line_with(started, "rank 0 is process")
        return started, agents[-1]

    jobs: list[subprocess.Popen[str]] = []
    agents: list[int] = []
    yield begun
    for pid in (*agents, *(job.pid for job in jobs if job.poll() is None)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for job in jobs:
        job.kill()
        job.communicate()


def line_with(job: subprocess.Popen[str], text: str) -> str:
    assert job.stderr is not None
    lines = []
    for line in job.stderr:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError(f"{text!r} did not come: {lines}")


def test_a_silence_of_a_host_is_told_and_survived(long_job: Callable[[str], tuple[subprocess.Popen[str], int]],
                                                  tmp_path: Path) -> None:
    job, agent = long_job("100")
    os.kill(agent, signal.SIGSTOP)
    told = line_with(job, "silent")
    assert re.fullmatch(r"hvdrun: host b has been silent for \d+ s; it counts as lost after 100 s "
                        r"\(HVDLITE_AGENT_TIMEOUT\)\n", told), told
    os.kill(agent, signal.SIGCONT)
    assert re.fullmatch(r"hvdrun: host b is heard again after \d+ s\n", line_with(job, "again"))
    (tmp_path / "done").touch()
    assert job.wait(HANGS_SECONDS) == 0


def test_a_silence_of_a_host_ends_the_job_when_the_knob_says_so(
        long_job: Callable[[str], tuple[subprocess.Popen[str], int]]) -> None:
    job, agent = long_job("3")
    os.kill(agent, signal.SIGSTOP)
    told = line_with(job, "was lost")
    assert re.match(r"hvdrun: host b was lost: nothing has been heard of it for \d+ s \(HVDLITE_AGENT_TIMEOUT\)", told), told
    assert job.wait(HANGS_SECONDS) == 1


def test_an_agent_ends_its_ranks_when_the_launcher_is_silent(
        long_job: Callable[[str], tuple[subprocess.Popen[str], int]], tmp_path: Path) -> None:
    job, agent = long_job("3")
    mark = f"TEST_JOB={tmp_path}".encode()
    of_launcher = {job.pid, agent}
    os.kill(job.pid, signal.SIGSTOP)
    for _ in range(int(10 * HANGS_SECONDS)):
        if not any(_is_shell(pid) for pid in marked_processes(mark) if pid not in of_launcher):
            break
        signal.sigtimedwait([], 0.1)
    else:
        raise AssertionError("the rank still runs")
    os.kill(job.pid, signal.SIGCONT)
    assert job.wait(HANGS_SECONDS) == 1


def test_an_agent_that_is_ended_is_a_lost_host_with_the_signal(
        long_job: Callable[[str], tuple[subprocess.Popen[str], int]]) -> None:
    """Its ranks were killed because of that; they have not failed."""
    job, agent = long_job("100")
    os.kill(agent, signal.SIGTERM)
    _, errors = job.communicate(timeout=HANGS_SECONDS)
    assert job.returncode == 1
    assert errors.splitlines()[-1] == "hvdrun: host b was lost: its agent has ended: it got SIGTERM (with ranks 0)", errors


def test_an_agent_passes_signals_on_as_hvdrun_does(shell: Path) -> None:
    """Slurm sends them to what srun has started: the agents."""
    handling = """
import os, signal, sys, time
def save(*_):
    time.sleep(1.5)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGUSR1, lambda *_: print("warned", flush=True))
signal.signal(signal.SIGTERM, save)
for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
    os.kill(os.getppid(), number)
    time.sleep(0.3)
time.sleep(1000)
"""
    ended = hvdrun(shell, "-H", "b:1", sys.executable, "-c", handling)
    assert ended.stdout.split() == ["warned", "saved"], ended


def _is_shell(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/comm").read_text() == "sh\n"
    return False
