"""The command of a rank: checked before anything starts, and run with the rank's environment."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite.core import launch_contract
from hvdlite.core.world import World

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of shells for a command that does not exist or cannot be executed."""


class CommandError(Exception):
    """Raised when the command cannot be started; carries the exit code a shell would give."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def resolve_command(command: Sequence[str], path: str | None) -> list[str]:
    """Return `command` as it is to be started: a script of the working directory is found without `./` too, and one in
    Python that is not executable is run with this Python.

    Args:
        path: the PATH to look the program up in.

    Raises:
        CommandError: when it cannot be started; one line that says what to type instead.
    """
    program = command[0]
    if shutil.which(program, path=path) is None:
        if not os.path.exists(program):
            raise CommandError(f"{program!r}: no such command", NOT_FOUND)
        if os.path.isdir(program):
            raise CommandError(f"{program!r} is a directory", NOT_EXECUTABLE)
        if not os.access(program, os.X_OK):
            if program.endswith(".py"):
                return [sys.executable, *command]
            raise CommandError(f"{program!r} is not executable; chmod +x {program}", NOT_EXECUTABLE)
        program = os.path.join(os.curdir, program)
    script = _script(command)
    if script is not None and not Path(script).exists():
        raise CommandError(f"the script {script!r} does not exist (in {os.getcwd()})", NOT_FOUND)
    return [program, *command[1:]]


def refused(command: Sequence[str], error: OSError) -> CommandError:
    """Return what to tell the user when the system refused to start `command`."""
    if isinstance(error, FileNotFoundError):  # the file is there, it has been looked up: its interpreter is not
        return CommandError(f"cannot start {command[0]!r}: the interpreter on its first line does not exist", NOT_FOUND)
    hint = "; does its first line name an interpreter (#!/bin/sh)?" if error.errno == errno.ENOEXEC else ""
    return CommandError(f"cannot start {command[0]!r}: {error.strerror}{hint}", NOT_EXECUTABLE)


def _script(command: Sequence[str]) -> str | None:
    """Return the script of a plain `python script.py ...`, None when it cannot be told."""
    if not Path(command[0]).name.startswith("python") or len(command) < 2:
        return None
    return command[1] if command[1].endswith(".py") and not command[1].startswith("-") else None


def rank_environment(world: World, job_directory: str, inherited: Mapping[str, str],
                     settings: Mapping[str, str]) -> dict[str, str]:
    """Return one rank's whole environment: what was inherited, without another job's marks, plus ours."""
    ours = set(launch_contract.COORDINATES) | {launch_contract.JOB_DIRECTORY, launch_contract.COORDINATOR,
                                               launch_contract.SECRET}
    stale = ours | {name.replace("HVDLITE_", "HOROVOD_") for name in ours}
    return {
        **{name: value for name, value in inherited.items() if name not in stale},
        "PYTHONUNBUFFERED": "1",
        **settings,  # may hold the coordinator's address and the key of this job
        **launch_contract.rank_environment(world, job_directory),
    }


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
