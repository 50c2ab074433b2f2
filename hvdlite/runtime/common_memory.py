"""Memory of one rank that the others of its host read."""

from __future__ import annotations

import weakref

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.runtime.runtime import Runtime


def common_memory(runtime: Runtime, name: str, owner: int, nbytes: int,
                  process_set: int = GLOBAL_PROCESS_SET_ID) -> Array | None:
    """Return memory that its owner writes and all ranks of a process set see, as bytes; all of them call this.

    The owner's process has it until the returned array is gone there; the others may read it only while the owner has it.

    Args:
        name: of the collective, free on all ranks.
        owner: its number in the job.

    Returns:
        The memory; None on all ranks where they are on several hosts, or the owner has no memory left.
    """
    ranks, heaps = runtime.members(process_set), runtime.connections.heaps
    if len(runtime.hosts.restrict_to(ranks).ranks_by_host) > 1:
        return None
    is_owner, taken, place = runtime.world.rank == owner, None, np.full(1, -1, np.int64)
    if is_owner:
        try:
            taken = heaps[owner].take(nbytes)
            taken.allocate(0, nbytes)
            place[0] = taken.start
        except MemoryError:
            pass  # it is told by `place`
    runtime.broadcast(name, place, owner, process_set=process_set, blocking=True).wait()
    if place[0] < 0:
        return None
    if taken is None:
        return heaps[owner].mapped(int(place[0]), nbytes).bytes[:nbytes]
    memory = taken.bytes[:nbytes]
    weakref.finalize(memory, heaps[owner].lend, [taken], lambda: True).atexit = False
    return memory
