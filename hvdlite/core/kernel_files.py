"""Files that exist in the kernel only. An old kernel or a sandbox (gVisor, a seccomp filter) may refuse to make them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Final

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


def _open(call: Callable[[], int]) -> int:
    try:
        return call()
    except AttributeError:
        return -1  # not Linux, or an old C library
    except OSError as error:
        if error.errno in REFUSED:
            return -1
        raise
