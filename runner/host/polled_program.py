"""A program of the user that runs again and again: never twice at a time, and each time for 10 seconds at most.

It is a file or a command line. What it leaves behind in its session is killed.

`--preemption-script` says when this machine will be taken away: every 5 seconds it prints the seconds that are left, such as
120, else nothing, and ends with code 0.

`--host-discovery-script` prints every second a line for each host of an elastic job: `host` or `host:slots`; empty lines
and comments (#) are ignored, and of several lines for a host the last one counts. If it fails the first time, the job ends;
later the hosts stay as they were.
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
from typing import IO, Final, Generic, Protocol, TypeVar

from hvdlite.core.errors import LaunchError
from hvdlite.core.system_limits import explained
from hvdlite_runner.host.processes import exit_code
from hvdlite_runner.placement import parse_host

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
            ended = exit_code(self._run.process) is not None
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


OPTION: Final = "--preemption-script"
PREEMPTION_SECONDS: Final = 5.0
"""Seconds from one start of the program to the next."""


def seconds_left(output: str) -> float | None:
    """Return the seconds after which the machine is taken away; None if it is not.

    Raises:
        LaunchError: for other output.
    """
    if not output.strip():
        return None
    try:
        seconds = float(output)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise LaunchError("a number of seconds")
    return seconds


def preemption_script(program: str, warn: Callable[[str], None], watcher: Watcher) -> PolledProgram[float | None]:
    """Return the program, which is a file or a command line; see `PolledProgram`."""
    return PolledProgram(OPTION, program, PREEMPTION_SECONDS, seconds_left, "it is asked again", warn, watcher)


DISCOVERY_SECONDS: Final = 1.0
"""Seconds from one start of the program to the next."""

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
            raise LaunchError(f"a list of hosts: line {number} of its output: {error}") from None
        found[name] = slots if given is None else given
    return {name: count for name, count in found.items() if count}


class DiscoveryScript:
    """A program that prints the hosts; see `PolledProgram`.

    Args:
        program: a file or a command line.
        slots: of a host for which the program prints none.
        warn: called with a line about a failure, not too often, and about an empty list.
        local: the job's processes of this host, with which the program ends; None if there are none.
    """

    def __init__(self, program: str, slots: int, warn: Callable[[str], None], local: Watcher | None = None) -> None:
        self._program = PolledProgram(
            "--host-discovery-script", program, DISCOVERY_SECONDS, lambda output: parse_discovered(output, slots),
            "the hosts stay as they were", warn, local)
        self._warn = warn
        self._known: Mapping[str, int] | None = None
        self.wait, self.close = self._program.wait, self._program.close

    def turn(self, now: float) -> Mapping[str, int] | None:
        """Start the program, or take its result, if that is due.

        Returns:
            The slots of each host when they have changed, else None.

        Raises:
            LaunchError: when there is no first answer.
        """
        found = self._program.turn(now, is_needed=self._known is None)
        if found is None or (self._known is not None and list(found.items()) == list(self._known.items())):
            return None
        if self._known and not found:
            self._warn(f"{self._program.name} prints no host; ranks that run go on")
        self._known = found
        return found


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
