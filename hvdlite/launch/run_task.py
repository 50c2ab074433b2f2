"""A rank of `hvdlite.run`: hvdrun starts this module, which calls the function in the job's directory."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import cloudpickle

from hvdlite.core.errors import LaunchError
from hvdlite.core.launch_contract import JOB_DIRECTORY, MEMBER, RANK, RESULT_FILE, SECRET, TASK_FILE
from hvdlite.launch.run_function import pickled_failure, pickled_result, sign, verified, write_for_task


def main(environ: Mapping[str, str]) -> None:
    """Call the function, and write its result or exception to the job's directory.

    Raises:
        ProtocolError: when the task is not signed with the job's key.
        LaunchError: when there is no room for the result.
        Exception: the function's exception.
    """
    directory, key = Path(environ[JOB_DIRECTORY]), bytes.fromhex(environ[SECRET])
    sender = int(environ.get(MEMBER, environ[RANK]))  # ranks of an elastic job change
    first, last, call = cloudpickle.loads(verified((directory / TASK_FILE).read_bytes(), key, "task"))
    sys.path[:0] = [path for path in first if path not in sys.path]  # now: our own modules have been imported
    sys.path += [path for path in last if path not in sys.path]

    def send(outcome: bytes) -> None:
        part = directory / f"part.{sender}"
        part.unlink(missing_ok=True)  # of a result for which there was no room
        write_for_task(part, sign(outcome, key, f"result {sender}"), f"the result of rank {environ[RANK]}")
        part.replace(directory / f"{RESULT_FILE}.{sender}")  # now, and not before, it is whole

    try:
        func, args, kwargs = cloudpickle.loads(call)
        send(pickled_result(func(*args, **kwargs)))
    except BaseException as error:
        with contextlib.suppress(LaunchError):  # no room for that either: the launcher reports it
            send(pickled_failure(error))
        raise


if __name__ == "__main__":
    main(os.environ)
