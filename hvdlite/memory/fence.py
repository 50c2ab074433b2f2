"""The fence: memory order between the ranks of a host, on machines that reorder stores (docs/protocol.md#memory-order).

On x86, stores become visible in program order, and loads execute in program order. Other machines (aarch64) guarantee
neither, and Python has no fence instruction. A `Fence` uses a kernel lock instead: every call locks and unlocks the same
eventfd. If call A of one rank precedes call B of another rank, all reads and writes of the first rank before A happen before
all reads and writes of the other rank after B.
"""

from __future__ import annotations

import os
import platform
import stat
from typing import Final

from hvdlite.core.kernel_files import open_eventfd

ORDERED_MACHINES: Final = frozenset({"x86_64", "amd64", "i386", "i486", "i586", "i686"})
"""Machines that preserve the order of stores and of loads."""
_ONE: Final = (1).to_bytes(8, "little")


def is_needed() -> bool:
    """Return whether other processes may observe the stores of a process out of order on this machine."""
    return platform.machine().lower() not in ORDERED_MACHINES


def fence_file() -> int:
    """Return the descriptor of the kernel object that the `Fence`s of all ranks of a host share."""
    descriptor = open_eventfd()
    if descriptor >= 0:
        return descriptor
    reader, writer = os.pipe()
    os.close(writer)
    return reader


class Fence:
    """One rank's end of the host's fence.

    A call never blocks. A dead rank cannot hold the lock: it is held only within the system call.

    Args:
        descriptor: from `fence_file`, the same file in all ranks; owned by this object, and closed with it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)

    def __call__(self) -> None:
        """Order the memory accesses of this rank before and after the call; see the top of this file."""
        if self._is_pipe:
            os.read(self._descriptor, 1)  # reading from an empty, closed pipe takes the pipe's lock
        else:
            os.write(self._descriptor, _ONE)  # never read: 2**64 calls fit

    def __del__(self) -> None:
        os.close(self._descriptor)  # not sooner: a number that is closed soon means another file
