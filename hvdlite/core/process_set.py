"""Process sets: the ranks that take part in a collective."""

from __future__ import annotations

import dataclasses

from hvdlite.core.errors import UnsupportedError

GLOBAL_PROCESS_SET_ID = 0


@dataclasses.dataclass(frozen=True)
class ProcessSet:
    """A set of ranks under an id; id 0 is the set of all ranks."""

    process_set_id: int = GLOBAL_PROCESS_SET_ID


global_process_set = ProcessSet()


def check_global(process_set: ProcessSet) -> None:
    """Raise `UnsupportedError` for any set but the global one."""
    if process_set != global_process_set:
        raise UnsupportedError("process sets other than the global one are not implemented yet")
