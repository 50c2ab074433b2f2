"""The discovery of an elastic job's hosts by a program of the user that runs every second.

The program is a file or a command line. It prints a line for each host: `host` or `host:slots`; empty lines and comments (#)
are ignored, and of several lines for a host the last one counts. It never runs twice at a time and runs at most 10 seconds;
what it leaves behind in its session is killed. If it fails the first time, the job ends; later the hosts stay as they were.
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
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final

from hvdlite.core.errors import LaunchError
from hvdlite.core.system_limits import explained
from hvdlite_runner.host.worker_group import WorkerGroup
from hvdlite_runner.placement import parse_host

SECONDS_BETWEEN: Final = 1.0
"""Seconds from one start of the program to the next."""
LIMIT_SECONDS: Final = 10.0
"""Seconds that the program may run."""
WARN_SECONDS: Final = 60.0
"""Seconds between two warnings of one kind."""
_QUOTED: Final = 2000
"""Characters of the program's output that an error quotes."""
_OUTPUT: Final = "; it said:"


def parse_discovered(text: str, slots: int) -> dict[str, int]:
    """Return the slots of each host, in the order of first mention; a host with 0 slots is left out.

    Args:
        slots: of a host whose line has none.

    Raises:
        LaunchError: for a line of another form.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        try:
            name, given = parse_host(content)
        except LaunchError as error:
            raise LaunchError(f"line {number} of its output: {error}") from None
        found[name] = slots if given is None else given
    return {name: count for name, count in found.items() if count}


@dataclasses.dataclass
class _Run:
    """A run of the program."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    errors: IO[bytes]
    until: float


class DiscoveryScript:
    """A program that prints the hosts.

    The owner's loop must wake when a child process ends.

    Args:
        program: a file or a command line.
        slots: of a host for which the program prints none.
        warn: called with a line about a failure, at most once in `WARN_SECONDS` for each kind, and about an empty list.
        local: the job's processes of this host, with which the program ends; None if there are none.
    """

    def __init__(self, program: str, slots: int, warn: Callable[[str], None], local: WorkerGroup | None = None) -> None:
        self._program = program
        self._slots = slots
        self._warn = warn
        self._local = local
        self._run: _Run | None = None
        self._due = 0.0  # when it is started next
        self._known: Mapping[str, int] | None = None
        self._warned: dict[str, float] = {}  # when, by the kind of the failure: its reason up to the first colon

    def turn(self, now: float) -> Mapping[str, int] | None:
        """Start the program, or take its result, if that is due.

        Returns:
            The slots of each host when they have changed, else None.

        Raises:
            LaunchError: when there is no first answer.
        """
        if self._run is None:
            if now >= self._due:
                try:
                    self._start(now)
                except LaunchError as error:
                    self._failed(error, now)
            return None
        ended = os.waitid(os.P_PID, self._run.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if not ended and now < self._run.until:
            return None
        try:
            found = self._result(self._run, is_overdue=not ended)
        except LaunchError as error:
            self._failed(error, now)
            return None
        if self._known is not None and list(found.items()) == list(self._known.items()):
            return None
        if self._known and not found:
            self._warn(f"--host-discovery-script {self._program} prints no host; ranks that run go on")
        self._known = found
        return found

    def wait(self, now: float) -> float:
        """Return the seconds until `turn` is due, if the end of the program does not make it due before."""
        return max(0.0, (self._due if self._run is None else self._run.until) - now)

    def close(self) -> None:
        """Kill the program if it runs."""
        if self._run is not None:
            self._end(self._run)

    def _start(self, now: float) -> None:
        self._due = now + SECONDS_BETWEEN
        command = self._command()
        try:
            with explained("it"), contextlib.ExitStack() as files:
                output, errors = (files.enter_context(tempfile.TemporaryFile()) for _ in range(2))  # a pipe could stay open
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                                           start_new_session=True)
                files.pop_all()
        except OSError as error:
            raise LaunchError(f"cannot be started: {error.strerror}") from None
        if self._local is not None:
            self._local.watch(process.pid)
        self._run = _Run(process, output, errors, now + LIMIT_SECONDS)

    def _failed(self, error: LaunchError, now: float) -> None:
        """Warn of a failure, not too often.

        Raises:
            LaunchError: when there has been no answer yet.
        """
        reason = f"--host-discovery-script {self._program} {error}"
        if self._known is None:
            raise LaunchError(reason) from None
        kind = str(error).partition(":")[0]
        if now - self._warned.get(kind, -math.inf) >= WARN_SECONDS:
            self._warned[kind] = now
            first, intro, quoted = reason.partition(_OUTPUT)
            self._warn(f"{first}; the hosts stay as they were{intro}{quoted}")

    def _command(self) -> Sequence[str]:
        if not os.path.exists(self._program):
            return ["/bin/sh", "-c", self._program]
        path = os.path.abspath(self._program)
        if not os.access(path, os.X_OK):
            raise LaunchError(f"is not executable; chmod +x {self._program}")
        return ["/bin/sh", "-c", f"exec {shlex.quote(path)}"]  # a shell, because it also runs a file without a #! line

    def _result(self, run: _Run, *, is_overdue: bool) -> dict[str, int]:
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
            return parse_discovered(output, self._slots)
        except LaunchError as error:
            raise LaunchError(f"did not print a list of hosts: {error}{quoted}") from None

    def _end(self, run: _Run) -> None:
        self._run = None
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing is left in its session
            os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()
        if self._local is not None:
            self._local.forget(run.process.pid)
        run.output.close()
        run.errors.close()


def discover_once(program: str, slots: int) -> dict[str, int]:
    """Run the program and wait for it.

    Raises:
        LaunchError: when it fails.
    """
    script = DiscoveryScript(program, slots, warn=lambda line: None)
    try:
        while (found := script.turn(time.monotonic())) is None:
            time.sleep(0.01)
        return dict(found)
    finally:
        script.close()
