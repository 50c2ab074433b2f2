"""The job's key leaves the environment when a process joins its job: children, core dumps and loggers do not get it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping

from hvdlite.core.launch_contract import COORDINATOR, JOB_DIRECTORY, SECRET, SECRET_TAKEN

_JOB = (JOB_DIRECTORY, COORDINATOR)


class JobKey:
    """Keeps the key for the further worlds of the process, and for `init()` after `shutdown()`.

    Args:
        environ: the process's environment.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._kept: dict[str, str] = {}
        self._job: list[str | None] = []  # whose key it is

    def environment(self) -> Mapping[str, str]:
        """Return the environment as it was when it had the key."""
        if SECRET not in self._environ and self._job == self._identity():
            return {**self._environ, **self._kept}
        return self._environ

    def take(self) -> None:
        """Remove the key from the environment, also from what the kernel shows of it (/proc/PID/environ)."""
        if SECRET not in self._environ:
            return
        _overwrite(SECRET, self._environ[SECRET])
        self._kept, self._job = {SECRET: self._environ.pop(SECRET)}, self._identity()
        self._environ[SECRET_TAKEN] = str(os.getpid())

    def _identity(self) -> list[str | None]:
        return [self._environ.get(name) for name in _JOB]


def _overwrite(name: str, value: str) -> None:
    """Overwrite an environment variable with this value where the C library has it: at first, on the process's stack."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = getenv(name.encode())
    if address and ctypes.string_at(address) == value.encode():
        ctypes.memset(address, ord("0"), len(value.encode()))
