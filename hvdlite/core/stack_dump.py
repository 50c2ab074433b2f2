"""The file to which a process writes its stacks on a signal; see `diagnostics.process_probe`."""

from __future__ import annotations

from typing import Final, NamedTuple


class StackDumpTarget(NamedTuple):
    """The file to which a process writes its stacks, and the signal on which it does; by default there is none.

    Attributes:
        descriptor: a file descriptor of that process.
        signal: the signal's number; 0 for none.
    """

    descriptor: int = -1
    signal: int = 0


NO_STACK_DUMP: Final = StackDumpTarget()
