"""The fence: memory order between the ranks of a host, on machines that reorder stores (docs/protocol.md#memory-order).

x86 makes the stores of a processor visible in program order, and loads in program order. Other machines (aarch64) do
neither, and Python has no fence instruction. A `Fence` uses a lock of the kernel instead: every call locks and unlocks the
same eventfd. If call A of one rank comes before call B of another, everything that the first rank read and wrote before A
happens before everything that the other rank reads and writes after B.
"""

from __future__ import annotations

import os
import platform
from typing import Final

ORDERED_MACHINES: Final = frozenset({"x86_64", "amd64", "i386", "i486", "i586", "i686"})
"""Names of machines that keep the order of stores and of loads."""
_ONE: Final = (1).to_bytes(8, "little")


def is_needed() -> bool:
    """Return whether this machine may reorder the stores of one process as another process sees them."""
    return platform.machine().lower() not in ORDERED_MACHINES


def fence_file() -> int:
    """Return the descriptor of a kernel object for the `Fence`s of all ranks of a host."""
    if hasattr(os, "eventfd"):
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    reader, writer = os.pipe()
    os.close(writer)
    return reader


class Fence:
    """One rank's use of the host's fence.

    A call never blocks, and no rank can hold the lock when it dies: it is held only inside the system call.

    Args:
        descriptor: from `fence_file`, the same file in all ranks; owned by this object.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self) -> None:
        """Order what this rank has done before the call and what it does after it; see the top of this file."""
        if hasattr(os, "eventfd"):
            os.write(self._descriptor, _ONE)  # nobody reads it: 2**64 calls fit
        else:
            os.read(self._descriptor, 1)  # the end of an empty pipe, which takes the pipe's lock

    def close(self) -> None:
        """Close the descriptor, once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
