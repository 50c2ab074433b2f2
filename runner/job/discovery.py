"""The discovery of an elastic job's hosts by a program of the user that runs every second.

It prints a line for each host: `host` or `host:slots`; empty lines and comments (#) are ignored, and of several lines for a
host the last one counts. If it fails the first time, the job ends; later the hosts stay as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from hvdlite.core.errors import LaunchError
from hvdlite_runner.host.polled_program import PolledProgram
from hvdlite_runner.host.worker_group import WorkerGroup
from hvdlite_runner.placement import parse_host

SECONDS_BETWEEN: Final = 1.0
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

    def __init__(self, program: str, slots: int, warn: Callable[[str], None], local: WorkerGroup | None = None) -> None:
        self._program = PolledProgram(
            "--host-discovery-script", program, SECONDS_BETWEEN, lambda output: parse_discovered(output, slots),
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
