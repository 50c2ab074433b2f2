"""Files that exist in the kernel only. An old kernel or a sandbox (gVisor, a seccomp filter) may refuse to make them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Final

from hvdlite.core.errors import LaunchError

_log = logging.getLogger("hvdlite")

FILE_SPAN: Final = 1 << 62
"""Length of an anonymous file in bytes; reduced where the file system does not support it."""
LEAST_SPAN: Final = 1 << 32
REFUSED: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EACCES})
"""Error codes of a system call that the kernel does not have, or does not permit."""


def open_eventfd() -> int:
    """Return the descriptor of an eventfd that does not block; -1 where there is none."""
    return _open(lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))


def open_memfd(name: str, *, seals: bool = False) -> int:
    """Return the descriptor of an empty file in memory; -1 where there is none.

    Args:
        seals: whether it can be sealed.
    """
    return _open(lambda: os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if seals else 0)))


def anonymous_file() -> int:
    """Return the descriptor of an empty shared memory object without a name, whose length is fixed."""
    descriptor = open_memfd("hvdlite", seals=True)
    if descriptor < 0:
        descriptor = _unlinked_file()
    span = FILE_SPAN
    while True:
        try:
            os.ftruncate(descriptor, span)
            break
        except OSError as error:  # 32 bits, another file system, or `ulimit -f`
            if span <= LEAST_SPAN:
                os.close(descriptor)
                raise LaunchError(f"cannot make shared memory of {LEAST_SPAN >> 30} GiB (only used pages take memory): "
                                  f"{error.strerror}; `ulimit -f` must allow as much") from None
            span >>= 1
    with contextlib.suppress(OSError):  # not all files can be sealed; a process that shrinks one ends the others (SIGBUS)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def _unlinked_file() -> int:
    """Return the descriptor of a temporary file without a name."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="hvdlite-")
    except OSError as error:
        raise LaunchError("this system has no files in memory (memfd_create), and a temporary file for what ranks "
                          f"share cannot be made: {error.strerror}; name another place with TMPDIR") from None
    os.unlink(path)
    _log.warning("this system has no files in memory (memfd_create): the memory that ranks share is a file in %s; on a disk "
                 "this is slow, TMPDIR=/dev/shm names memory", os.path.dirname(path))
    return descriptor


def _open(call: Callable[[], int]) -> int:
    try:
        return call()
    except AttributeError:
        return -1  # not Linux, or an old C library
    except OSError as error:
        if error.errno in REFUSED:
            return -1
        raise
