"""Process sets: the ranks that take part in a collective."""

from __future__ import annotations

import dataclasses

GLOBAL_PROCESS_SET_ID = 0


@dataclasses.dataclass(frozen=True)
class ProcessSet:
    """A set of ranks under an id; id 0 is the set of all ranks."""

    process_set_id: int = GLOBAL_PROCESS_SET_ID


global_process_set = ProcessSet()
