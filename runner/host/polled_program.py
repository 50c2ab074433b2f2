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
from typing import IO, Final, Generic, Protocol, TypeVar

from hvdlite.core.errors import LaunchError
from hvdlite.core.system_limits import explained

T = TypeVar("T")

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


class PolledProgram(Generic[T]):
    """A program that runs again and again.

    The owner's loop must wake when a child process ends.

    Args:
        option: the option that names it, for people.
        program: a file or a command line.
        between: seconds from one start to the next.
        parse: returns what its output means. Raises `LaunchError` for other output, with what it should be.
        otherwise: what happens when it fails, for people.
        warn: called with a line about a failure, at most once in `WARN_SECONDS` for each kind.
        watcher: the job's processes of this host, with which the program ends; None if there are none.
    """

    def __init__(self, option: str, program: str, between: float, parse: Callable[[str], T], otherwise: str,
                 warn: Callable[[str], None], watcher: Watcher | None = None) -> None:
        self.name = f"{option} {program}"
        self._program = program
        self._between = between
        self._parse = parse
        self._otherwise, self._warn = otherwise, warn
        self._watcher = watcher
        self._run: _Run | None = None
        self._due = 0.0  # when it is started next
        self._warned: dict[str, float] = {}  # when, by the kind of the failure: its reason up to the first colon

    def turn(self, now: float, *, is_needed: bool = False) -> T | None:
        """Start the program, or return what it has said, if that is due; warn of a failure.

        Args:
            is_needed: whether a failure is raised instead.

        Raises:
            LaunchError: when it cannot be started, has failed, did not end in time, or has printed something else.
        """
        try:
            if self._run is None:
                if now >= self._due:
                    self._start(now)
                return None
            ended = os.waitid(os.P_PID, self._run.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            return self._result(self._run, is_overdue=not ended) if ended or now >= self._run.until else None
        except LaunchError as error:
            if is_needed:
                raise LaunchError(f"{self.name} {error}") from None
            self._warn_of(error, now)
            return None

    def wait(self, now: float) -> float:
        """Return the seconds until `turn` is due, if the end of the program does not make it due before."""
        return max(0.0, (self._due if self._run is None else self._run.until) - now)

    def close(self) -> None:
        """Kill the program if it runs; it is not started any more."""
        self._due = math.inf
        if self._run is not None:
            self._end(self._run)

    def _warn_of(self, error: LaunchError, now: float) -> None:
        kind = str(error).partition(":")[0]
        if now - self._warned.get(kind, -math.inf) >= WARN_SECONDS:
            self._warned[kind] = now
            first, intro, quoted = f"{self.name} {error}".partition(_OUTPUT)
            self._warn(f"{first}; {self._otherwise}{intro}{quoted}")

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

    def _result(self, run: _Run, *, is_overdue: bool) -> T:
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
        try:
            return self._parse(output)
        except LaunchError as error:
            raise LaunchError(f"did not print {error}{quoted}") from None

    def _end(self, run: _Run) -> None:
        self._run = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left in its session
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        if self._watcher is not None:
            self._watcher.forget(run.process.pid)
        run.output.close()
        run.errors.close()
