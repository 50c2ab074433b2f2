"""A program of the user that runs again and again: never twice at a time, and each time for 10 seconds at most.

It is a file or a command line. What it leaves behind in its session is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import IO, Final, Protocol

from hvdlite.core.errors import LaunchError
from hvdlite.core.system_limits import explained

LIMIT_SECONDS: Final = 10.0
"""Seconds that the program may run."""
WARN_SECONDS: Final = 60.0
"""Seconds between two warnings of one kind."""
_QUOTED: Final = 2000
"""Characters of the program's output that an error quotes."""
_OUTPUT: Final = "; it said:"


class Watcher(Protocol):
    """Ends processes with the job."""

    def watch(self, pid: int) -> None:
        """End a process with the job."""

    def forget(self, pid: int) -> None:
        """Take that back: it has been reaped."""


@dataclasses.dataclass
class _Run:
    """A run of the program."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    until: float


@dataclasses.dataclass(frozen=True)
class Said:
    """The standard output of a run that has ended with code 0, and all output, as an error quotes it."""

    output: str
    quoted: str


class PolledProgram:
    """A program that runs again and again.

    The owner's loop must wake when a child process ends.

    Args:
        option: the option that names it, for people.
        program: a file or a command line.
        between: seconds from one start to the next.
        warn: called with a line about a failure, at most once in `WARN_SECONDS` for each kind.
        watcher: the job's processes of this host, with which the program ends; None if there are none.
    """

    def __init__(self, option: str, program: str, between: float, warn: Callable[[str], None],
                 watcher: Watcher | None = None) -> None:
        self.name = f"{option} {program}"
        self._program = program
        self._between = between
        self._warn = warn
        self._watcher = watcher
        self._run: _Run | None = None
        self._due = 0.0  # when it is started next
        self._warned: dict[str, float] = {}  # when, by the kind of the failure: its reason up to the first colon

    def turn(self, now: float) -> Said | None:
        """Start the program, or return what it has said, if that is due.

        Raises:
            LaunchError: when it cannot be started, has failed, or did not end in time.
        """
        if self._run is None:
            if now >= self._due:
                self._start(now)
            return None
        ended = os.waitid(os.P_PID, self._run.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not ended and now < self._run.until:
            return None
        return self._result(self._run, is_overdue=not ended)

    def wait(self, now: float) -> float:
        """Return the seconds until `turn` is due, if the end of the program does not make it due before."""
        return max(0.0, (self._due if self._run is None else self._run.until) - now)

    def warn(self, error: LaunchError, consequence: str, now: float) -> None:
        """Warn of a failure, not too often."""
        kind = str(error).partition(":")[0]
        if now - self._warned.get(kind, -math.inf) >= WARN_SECONDS:
            self._warned[kind] = now
            first, intro, quoted = f"{self.name} {error}".partition(_OUTPUT)
            self._warn(f"{first}; {consequence}{intro}{quoted}")

    def close(self) -> None:
        """Kill the program if it runs."""
        if self._run is not None:
            self._end(self._run)

    def _start(self, now: float) -> None:
        self._due = now + self._between
        command = self._command()
        try:
            with explained("it"), contextlib.ExitStack() as files:
                output, errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))  # a pipe could stay open
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                                           start_new_session=True)
                files.pop_all()
        except OSError as error:
            raise LaunchError(f"cannot be started: {error.strerror}") from None
        if self._watcher is not None:
            self._watcher.watch(process.pid)
        self._run = _Run(process, output, errors, now + LIMIT_SECONDS)

    def _command(self) -> Sequence[str]:
        if not os.path.exists(self._program):
            return ["/bin/sh", "-c", self._program]
        path = os.path.abspath(self._program)
        if not os.access(path, os.X_OK):
            raise LaunchError(f"is not executable; chmod +x {self._program}")
        return ["/bin/sh", "-c", f"exec {shlex.quote(path)}"]  # a shell, because it also runs a file without a #! line

    def _result(self, run: _Run, *, is_overdue: bool) -> Said:
        run.output.seek(0)
        run.errors.seek(0)
        output, errors = (file.read().decode(errors="replace") for file in (run.output, run.errors))
        self._end(run)  # the process is reaped last: until then its session keeps its number
        lines = (output + errors)[-_QUOTED:].splitlines()
        quoted = _OUTPUT + "".join(f"\n  {line}" for line in lines) if lines else ""
        if is_overdue:
            raise LaunchError(f"did not end within {LIMIT_SECONDS:.0f} s{quoted}")
        if run.process.returncode:
            raise LaunchError(f"failed with code {run.process.returncode}{quoted}")
        return Said(output, quoted)

    def _end(self, run: _Run) -> None:
        self._run = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left in its session
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        if self._watcher is not None:
            self._watcher.forget(run.process.pid)
        run.output.close()
        run.errors.close()
