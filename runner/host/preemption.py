"""`--preemption-script`: a program of the user that says when this machine will be taken away. It runs every 5 seconds.

It prints the seconds that are left, such as 120, when the machine is to be taken away, else nothing, and ends with code 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from hvdlite.core.errors import LaunchError
from hvdlite_runner.host.polled_program import PolledProgram, Said, Watcher
from hvdlite_runner.messages import HostNoticed, Remark

OPTION: Final = "--preemption-script"
SECONDS_BETWEEN: Final = 5.0
"""Seconds from one start of the program to the next."""


def seconds_left(said: Said) -> float | None:
    """Return the seconds after which the machine is taken away; None if it is not.

    Raises:
        LaunchError: for other output.
    """
    if not said.output.strip():
        return None
    try:
        seconds = float(said.output)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise LaunchError(f"did not print a number of seconds{said.quoted}")
    return seconds


class PreemptionScript:
    """The program, until it has said that the machine will be taken away.

    Args:
        program: a file or a command line.
        report: called with `HostNoticed`, or with a `Remark` about a failure, not too often.
        watcher: see `PolledProgram`.
    """

    def __init__(self, program: str, report: Callable[[HostNoticed | Remark], None], watcher: Watcher) -> None:
        self._program = PolledProgram(OPTION, program, SECONDS_BETWEEN, lambda line: report(Remark(line)), watcher)
        self._report = report
        self._is_over = False
        self.close = self._program.close

    def turn(self) -> None:
        """Start the program, or report its result, if that is due."""
        now = time.monotonic()
        try:
            said = None if self._is_over else self._program.turn(now)
            seconds = None if said is None else seconds_left(said)
        except LaunchError as error:
            self._program.warn(error, "it is asked again", now)
            return
        if seconds is not None:
            self._is_over = True
            self._report(HostNoticed(OPTION, seconds))

    def wait(self) -> float:
        """Return the seconds until `turn` is due; infinity for never."""
        return math.inf if self._is_over else self._program.wait(time.monotonic())
