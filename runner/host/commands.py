"""The command of a rank: checked before anything starts, and run with the rank's environment."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite.core import launch_contract
from hvdlite.core.errors import LaunchError
from hvdlite.core.world import World

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""The shells' exit codes for a command that does not exist, and for one that cannot be executed."""


class CommandError(Exception):
    """Raised when the command cannot be started; contains the exit code that a shell would return."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def resolve_command(command: Sequence[str], path: str | None) -> list[str]:
    """Return the command line to start: a script in the working directory needs no `./`, and a Python script that is not
    executable is run with this Python.

    Args:
        path: the PATH in which the program is looked up.

    Raises:
        CommandError: when it cannot be started; its one line names what to type instead.
    """
    program = command[0]
    if shutil.which(program, path=path) is None:
        if not os.path.exists(program):
            raise CommandError(_missing(program, path), NOT_FOUND)
        if os.path.isdir(program):
            raise CommandError(f"{program!r} is a directory", NOT_EXECUTABLE)
        if not os.access(program, os.X_OK):
            if program.endswith(".py"):
                return [sys.executable, *command]
            raise CommandError(f"{program!r} is not executable; chmod +x {program}", NOT_EXECUTABLE)
        program = os.path.join(os.curdir, program)
    script = _script(command)
    if script is not None and not Path(script).exists():
        raise CommandError(_missing(script, path), NOT_FOUND)
    return [program, *command[1:]]


def _missing(program: str, path: str | None) -> str:
    """Return a message about a program or script that does not exist."""
    if re.match(r"[A-Za-z_]\w*=", program):
        return f"{program!r} is not a command: give -x once for each variable, -x {program}"
    if shutil.which(program.partition(" ")[0], path=path) is not None:
        return f"{program!r}: no such command; do not quote a command with its arguments: {program}"
    if program.endswith(".py"):
        return f"the script {program!r} does not exist (in {current_directory()})"
    return f"{program!r}: no such command"


def to_bytes(words: Sequence[str]) -> list[bytes]:
    """Return the words of a command as bytes, which need not be UTF-8."""
    return [os.fsencode(word) for word in words]


def values_to_bytes(environment: Mapping[str, str]) -> dict[str, bytes]:
    """Return variables with their values as bytes."""
    return {name: os.fsencode(value) for name, value in environment.items()}


def refused(command: Sequence[str], error: OSError) -> CommandError:
    """Return a message for the user after the system refused to start `command`."""
    if isinstance(error, FileNotFoundError):  # the file exists (it was looked up), but its interpreter does not
        return CommandError(f"cannot start {command[0]!r}: the interpreter on its first line does not exist", NOT_FOUND)
    hint = "; does its first line name an interpreter (#!/bin/sh)?" if error.errno == errno.ENOEXEC else ""
    hint = f"; start it with python: python {command[0]}" if hint and command[0].endswith(".py") else hint
    return CommandError(f"cannot start {command[0]!r}: {error.strerror}{hint}", NOT_EXECUTABLE)


def is_python(program: str) -> bool:
    """Return whether a program is a Python interpreter, by its name."""
    return re.fullmatch(r"python[0-9.]*", Path(program).name) is not None


def _script(command: Sequence[str]) -> str | None:
    """Return the script of a plain `python script.py ...`, or None."""
    is_plain = is_python(command[0]) and len(command) > 1 and not command[1].startswith("-")
    return command[1] if is_plain and command[1].endswith(".py") else None


def check_input(command: Sequence[str]) -> None:
    """Refuse a program that ranks without standard input would not get: it would end at once, as if it had succeeded.

    Raises:
        CommandError: its one line names what to type instead.
    """
    if _reads_standard_input(command):
        raise CommandError(f"{' '.join(command)} would read its program from standard input, and ranks have none: put the "
                           "program into a file, use python -c, or give rank 0 the input with --stdin", NOT_EXECUTABLE)


def _reads_standard_input(command: Sequence[str]) -> bool:
    """Return whether this is Python without a program (`python`, `python -`, `python -u -`): it would succeed at once."""
    if Path(command[0]).name == "env":
        rest = list(itertools.dropwhile(lambda word: "=" in word, command[1:]))
        return bool(rest) and _reads_standard_input(rest)
    if not is_python(command[0]):
        return False
    words = iter(command[1:])
    for word in words:
        if word in ("-", "/dev/stdin"):
            return True
        if not word.startswith("-") or word in ("--help", "--version") or set("cmhV?") & set(word.lstrip("-")):
            return False
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
    return True


def rank_environment(world: World, job_directory: str, inherited: Mapping[str, str],
                     settings: Mapping[str, str]) -> dict[str, str]:
    """Return the complete environment of a rank: the inherited one without another job's variables, plus this job's.

    Where `settings` say how `torch.distributed` finds rank 0, the rank's coordinates have torch's names too. An inherited
    RANK, say of the pod in which the launcher runs, would be the same for all ranks.
    """
    ours = launch_contract.CONTRACT_VARIABLES | {launch_contract.HOSTNAME, launch_contract.ELASTIC}
    stale = ours | {name.replace("HVDLITE_", "HOROVOD_") for name in ours} | another_jobs_torch_variables(inherited)
    for_torch = {}
    if launch_contract.MASTER_PORT in settings:
        for_torch = {name: str(getattr(world, field)) for name, field in launch_contract.TORCH_COORDINATES.items()}
    return {
        **{name: value for name, value in inherited.items() if name not in stale},
        **for_torch,
        "PYTHONUNBUFFERED": "1",
        **settings,  # may hold the coordinator's address and the key of this job
        **launch_contract.rank_environment(world, job_directory),
    }


def another_jobs_torch_variables(inherited: Mapping[str, str]) -> frozenset[str]:
    """Return the names of torch's variables that are those of a rank of another job of ours, and not the user's."""
    return launch_contract.TORCH_VARIABLES if launch_contract.RANK in inherited else frozenset()


def current_directory() -> str:
    """Return the working directory.

    Raises:
        LaunchError: when it has been deleted.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError("the working directory has been deleted: change to another one, or name one with "
                          "--working-directory DIR") from None


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
