"""A rank's process: started in a session of its own, ended with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from hvdlite.core import launch_contract
from hvdlite_runner import guardian


class RankProcess:
    """One rank, with its output as two pipes."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], cores: Sequence[int]) -> None:
        self.rank = rank
        self._process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None and self._process.stderr is not None
        self.streams: dict[str, IO[bytes]] = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        for stream in self.streams.values():
            os.set_blocking(stream.fileno(), False)
        if cores:
            os.sched_setaffinity(self._process.pid, cores)
        self.pidfd = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else -1

    @property
    def pid(self) -> int:
        """The process id, also of its session and group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return how it ended (negative: by that signal), or None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the rank and the processes of its group."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # ended, and nobody of its group is left

    def close(self) -> None:
        """Reap the process and close its descriptors."""
        self._process.wait()
        for stream in self.streams.values():
            stream.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Guardian:
    """The process that ends the job if the launcher cannot (`guardian.py`)."""

    def __init__(self, job_directory: str) -> None:
        self._mark = mark(job_directory)
        environment = {name: value for name, value in os.environ.items() if name != launch_contract.JOB_DIRECTORY}
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(guardian.__file__)), job_directory, self._mark],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env=environment)

    def end_job(self, patience: float) -> None:
        """Kill whatever is left of the job, in whatever session."""
        guardian.kill_marked(self._mark.encode(), patience)

    def dismiss(self) -> None:
        """End the guardian: the launcher has cleaned up itself."""
        try:
            self._process.communicate(b"done", timeout=5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()


def mark(job_directory: str) -> str:
    """Return the entry of the environment that all processes of a job inherit."""
    return f"{launch_contract.JOB_DIRECTORY}={job_directory}"


def kill(processes: Sequence[RankProcess]) -> None:
    """Kill ranks with their groups."""
    for process in processes:
        process.send(signal.SIGKILL)
