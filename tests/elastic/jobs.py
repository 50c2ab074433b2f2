"""Elastic jobs of this machine, or of hosts in network namespaces: started, watched and judged."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from hvdlite_runner.host.reaper import marked_processes
from tests.elastic.judge import spared
from tests.runner.networks import Hosts
from tests.worlds import HANGS_SECONDS, HVDRUN, PYTHON_PATH, ROOT, SHRINKS, clean_environment, shared_memory

HEALTHY_ENDED = "members that nobody had hurt were ended"


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
        steps: of the training, at least.
        environment: more variables for all members.
        program: another program with the same arguments.
        hosts: where it runs, with hvdrun on the first one; without it, on this machine.
    """

    def __init__(self, flags: Sequence[str], folder: Path, steps: int, environment: Mapping[str, str] | None = None, *,
                 program: str = "counting", hosts: Hosts | None = None) -> None:
        self.flags, self.told, self.steps, self.hosts = flags, folder / "told", steps, hosts
        self.environment = dict(environment or {})
        self._temporary = folder / "tmp"
        self._tag = f"TEST_ELASTIC={os.getpid()}-{folder}"
        self._shared = shared_memory()
        self._temporary.mkdir()
        self.told.mkdir(exist_ok=True)
        name, _, value = self._tag.partition("=")
        self._output = folder / "output"
        self._file = self._output.open("wb")
        launcher = HVDRUN if hosts is None else hosts.hvdrun()
        shrinks = [] if "--blacklist-cooldown-range" in flags else SHRINKS
        self.process = subprocess.Popen(
            [*launcher, *shrinks, *flags, sys.executable, "-m", f"tests.elastic.programs.{program}", str(self.told),
             str(steps)],
            stdin=subprocess.DEVNULL, stdout=self._file, stderr=self._file, cwd=ROOT,
            env={**(clean_environment() if hosts is None else hosts.environment()), "PYTHONPATH": PYTHON_PATH,
                 "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary), name: value, **self.environment})

    def _begun(self) -> dict[int, tuple[int, str]]:
        names = (path.name.split(".", 3) for path in self.told.glob("started.*"))
        return {int(member): (int(pid), host) for _, member, pid, host in names}

    def members(self) -> dict[int, int]:
        """Return the process id of each member that has begun."""
        return {member: pid for member, (pid, _) in self._begun().items()}

    def running(self) -> dict[int, int]:
        """Return the process id of each member that lives."""
        return {member: pid for member, pid in self.members().items() if _lives(pid)}

    def running_on(self, host: str) -> list[int]:
        """Return the members of a host that live."""
        begun = self._begun()
        return [member for member in self.running() if begun[member][1] == host]

    def step_of(self, member: int) -> int:
        """Return the step at which a member was last seen; -1 before its first."""
        try:
            return int((self.told / f"at.{member}").read_text(encoding="ascii") or -1)
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
        return self._output.read_text(encoding="utf-8", errors="replace")

    def end(self, timeout: float = HANGS_SECONDS) -> dict[int, Told]:
        """Wait for the job's end and check that nothing is left; return what the last members told."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            running = {member: _stacks(pid) for member, pid in self.running().items()}
            raise AssertionError(f"the job hangs, with members {running}\n{self.errors()}") from None
        finally:
            self.close()
        if self.hosts is not None:
            self.hosts.wait_until_empty(20)
        left = marked_processes(self._tag.encode())
        assert not left, f"processes were left: {left}\n{self.errors()}"
        assert not list(self._temporary.glob("*hvdlite*")), "a file of ours was left behind"
        assert shared_memory() <= self._shared
        told = {}
        for path in self.told.glob("ended.*"):
            fields = json.loads(path.read_text(encoding="ascii"))
            fields["history"] = [tuple(each) for each in fields["history"]]
            told[int(path.suffix[1:])] = Told(**fields)
        return told

    def end_of_orphans(self) -> None:
        """Wait until nothing is left of a job whose launcher was killed."""
        deadline = time.monotonic() + HANGS_SECONDS
        while left := marked_processes(self._tag.encode()):
            assert time.monotonic() < deadline, f"processes were left: {left}\n{self.errors()}"
            time.sleep(0.05)

    def succeed(self, timeout: float = HANGS_SECONDS, lost: Iterable[int] = (),
                lost_hosts: Collection[str] | None = None) -> dict[int, Told]:
        """Wait for the end of a job that is to succeed: the last members agree, and have done every step once.

        Args:
            lost: members that were killed. One of them may have been killed after its last step, when the job was not
                elastic any more; then the job's exit code is that of the failure.
            lost_hosts: the hosts that were lost. If they are given, no other members may have been ended.
        """
        told = self.end(timeout)
        pids = self.members()
        errors = self.errors()
        length = max((len(each.history) for each in told.values()), default=0)
        at_end = {member for member in lost if self.step_of(member) == length - 1}
        assert self.process.returncode == 0 or at_end, f"hvdrun ended with {self.process.returncode}\n{errors}"
        assert told, errors
        sizes = {each.size for each in told.values()}
        assert len(sizes) == 1 and len(told) <= sizes.pop() <= len(told.keys() | at_end), f"{told}\n{errors}"
        assert length >= self.steps, f"{told}\n{errors}"
        for member, each in told.items():
            assert each.pid == pids[member], "a survivor was restarted"
            assert [step for step, _ in each.history] == list(range(length)), f"{member}: {each.history}"
            assert each.right, f"member {member}'s weights are not those of its history {each.history}"
        assert len({(each.digest, str(each.history)) for each in told.values()}) == 1, f"replicas differ\n{errors}"
        if lost_hosts is not None and not at_end:
            trained = [member for member in pids if self.step_of(member) >= 0]
            ended = spared(errors, trained, told, set(lost), lost_hosts)
            assert not ended, f"{HEALTHY_ENDED}: {ended}\n{errors}"
        return told

    def close(self) -> None:
        """Kill what is left of the launcher; its reaper ends the rest."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()


def _stacks(pid: int) -> str:
    """Return the state of each thread of a process, and the function of the kernel in which it waits."""
    lines = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        state = (task / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
        lines.append(f"{state} {(task / 'comm').read_text().strip()} {(task / 'wchan').read_text()}")
    return "; ".join(lines)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False

