"""Elastic jobs of this machine, started, hurt and judged."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from hvdlite_runner.reaper import marked_processes
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, clean_environment, shared_memory

PROGRAM: Final = Path(__file__).parent / "programs" / "counting.py"


@dataclasses.dataclass
class Told:
    """What one member told at its end; see `programs/counting.py`."""

    pid: int
    rank: int
    size: int
    digest: str
    history: list[tuple[int, int]]
    right: bool


class Job:
    """A job of `programs/counting.py` under hvdrun; leaves nothing behind.

    Args:
        flags: of hvdrun, without the command.
        folder: an empty folder for the job.
        steps: of the training.
    """

    def __init__(self, flags: Sequence[str], folder: Path, steps: int, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self.steps = folder, steps
        self._tag = f"TEST_ELASTIC={os.getpid()}-{folder}"
        self._shared = shared_memory()
        (folder / "tmp").mkdir()
        (folder / "told").mkdir()
        name, _, value = self._tag.partition("=")
        self._errors = (folder / "errors").open("wb")
        self.process = subprocess.Popen(
            [*HVDRUN, *flags, sys.executable, str(PROGRAM), str(folder / "told"), str(steps)],
            stdin=subprocess.DEVNULL, stdout=self._errors, stderr=self._errors,
            env={**clean_environment(), "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"),
                 name: value, **(environment or {})})

    def members(self) -> dict[int, int]:
        """Return the process id of each member that has begun."""
        begun = (path.name.split(".") for path in (self.folder / "told").glob("started.*"))
        return {int(member): int(pid) for _, member, pid in begun}

    def running(self) -> dict[int, int]:
        """Return the process id of each member that lives."""
        return {member: pid for member, pid in self.members().items() if _lives(pid)}

    def step_of(self, member: int) -> int:
        """Return the step at which a member was last seen; -1 before its first."""
        try:
            return int((self.folder / "told" / f"at.{member}").read_text(encoding="ascii") or -1)
        except FileNotFoundError:
            return -1

    def wait_for(self, what: str, condition: Callable[[], bool], timeout: float = HANGS_SECONDS) -> None:
        """Block until `condition()` is true."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.errors()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout} s:\n{self.errors()}"
            time.sleep(0.005)

    def wait_for_step(self, step: int) -> None:
        """Block until some member is at a step."""
        self.wait_for(f"step {step}", lambda: any(self.step_of(member) >= step for member in self.members()))

    def wait_for_all(self, founders: int) -> None:
        """Block until all members of the first world train."""
        self.wait_for("all founders", lambda: all(self.step_of(member) >= 0 for member in range(founders)))

    def kill(self, member: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a member's process."""
        os.kill(self.members()[member], number)

    def errors(self) -> str:
        """Return what the job has written until now."""
        return (self.folder / "errors").read_text(encoding="utf-8", errors="replace")

    def end(self, timeout: float = HANGS_SECONDS) -> dict[int, Told]:
        """Wait for the job's end and check that nothing is left; return what the last members told."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs:\n{self.errors()}") from None
        finally:
            self.close()
        left = marked_processes(self._tag.encode())
        assert not left, f"processes were left: {left}\n{self.errors()}"
        assert not list((self.folder / "tmp").glob("*hvdlite*")), "a file of ours was left behind"
        assert shared_memory() <= self._shared
        told = {}
        for path in (self.folder / "told").glob("ended.*"):
            fields = json.loads(path.read_text(encoding="ascii"))
            fields["history"] = [tuple(each) for each in fields["history"]]
            told[int(path.suffix[1:])] = Told(**fields)
        return told

    def succeed(self, timeout: float = HANGS_SECONDS) -> dict[int, Told]:
        """Wait for the end of a job that is to succeed: the last members agree, and have done every step once."""
        told = self.end(timeout)
        pids = self.members()
        errors = self.errors()
        assert self.process.returncode == 0, f"hvdrun ended with {self.process.returncode}\n{errors}"
        assert told, errors
        sizes = {each.size for each in told.values()}
        assert sizes == {len(told)}, f"{told}\n{errors}"
        for member, each in told.items():
            assert each.pid == pids[member], "a survivor was restarted"
            assert [step for step, _ in each.history] == list(range(self.steps)), f"{member}: {each.history}"
            assert each.right, f"member {member}'s weights are not those of its history {each.history}"
        assert len({(each.digest, str(each.history)) for each in told.values()}) == 1, f"replicas differ\n{errors}"
        return told

    def close(self) -> None:
        """Kill what is left of the launcher; its reaper ends the rest."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._errors.close()


def hurt(job: Job, chance: random.Random, kills: int, seconds: float) -> list[str]:
    """Kill random members at random moments; return what was done.

    Args:
        kills: how many at most; a member that trains is always left alive.
        seconds: by when the last one is killed.
    """
    done: list[str] = []
    until = time.monotonic() + seconds
    for moment in sorted(chance.uniform(0, seconds) for _ in range(kills)):
        time.sleep(max(0.0, until - seconds + moment - time.monotonic()))
        alive = job.running()
        if len(alive) < 2 or job.process.poll() is not None:
            continue
        member = chance.choice(sorted(alive))
        if not any(job.step_of(other) >= 0 for other in alive if other != member):
            continue  # nobody else would have the state
        done.append(f"member {member} at step {job.step_of(member)}")
        try:
            os.kill(alive[member], signal.SIGKILL)
        except ProcessLookupError:
            done.pop()
    return done


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False

