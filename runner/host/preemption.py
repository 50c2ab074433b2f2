"""`--preemption-script`: a program of the user that says when this machine will be taken away. It runs every 5 seconds.

It prints the seconds that are left, such as 120, when the machine is to be taken away, else nothing, and ends with code 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from hvdlite.core.errors import LaunchError
from hvdlite_runner.host.polled_program import PolledProgram, Watcher

OPTION: Final = "--preemption-script"
SECONDS_BETWEEN: Final = 5.0
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
    return PolledProgram(OPTION, program, SECONDS_BETWEEN, seconds_left, "it is asked again", warn, watcher)
