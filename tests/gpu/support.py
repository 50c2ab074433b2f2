"""Ranks as processes on the GPUs that there are: one each, or all on one."""

from __future__ import annotations

from tests.worlds import Ended, Program, processes


def run(size: int, program: Program, *arguments: object, timeout: float = 85.0,
        environment: dict[str, str] | None = None) -> list[Ended]:
    """Run a program on `size` ranks; one that fails fails the test, with its output."""
    return processes(size, program, *arguments, timeout=timeout,
                     environment={"HVDLITE_START_TIMEOUT": "80", **(environment or {})})
