"""Unix sockets in directories with long names: a socket's path has at most 107 bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ROOM: Final = 100
"""Bytes of a path that fits everywhere."""


@contextmanager
def fitting(path: str) -> Iterator[str]:
    """Lend a path of the same socket that is short enough to bind or connect to.

    Where directories can be opened by descriptor (Linux), a long one goes by that; elsewhere the path is what it was.
    """
    if len(os.fsencode(path)) <= _ROOM or not hasattr(os, "O_PATH"):
        yield path
        return
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)
