"""The file to which a process writes its stacks on a signal; see `diagnostics.process_probe`."""

from __future__ import annotations

from typing import Final, NamedTuple


class StackDumpTarget(NamedTuple):
    """Where a process writes its stacks, and upon which signal; the default is nowhere.

    Attributes:
        descriptor: a file descriptor of that process.
        signal: the signal's number; 0 for none.
    """

    descriptor: int = -1
    signal: int = 0


NO_STACK_DUMP: Final = StackDumpTarget()
