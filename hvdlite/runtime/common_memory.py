"""Memory that all ranks of a host see."""

from __future__ import annotations

import os
import weakref

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.memory.shared import COUNTER_STRIDE
from hvdlite.runtime.runtime import Runtime


def common_memory(runtime: Runtime, name: str, owner: int, nbytes: int,
                  process_set: int = GLOBAL_PROCESS_SET_ID) -> Array | None:
    """Return memory that all ranks of a process set see, as bytes; all of them call this.

    Each rank has it until the returned array and its views are gone there, or its world ends.

    Args:
        name: of the collective, free on all ranks.
        owner: the rank in whose part of the memory of its host it is; its number in the job.

    Returns:
        Zeros; None on all ranks where they are on several hosts, or the owner has no memory left.
    """
    ranks, heaps, rank = runtime.members(process_set), runtime.connections.heaps, runtime.world.rank
    if len(runtime.hosts.restrict_to(ranks).ranks_by_host) > 1:
        return None
    flag_bytes = len(ranks) * COUNTER_STRIDE
    taken, place = None, np.full(1, -1, np.int64)
    if rank == owner:
        try:
            taken = heaps[owner].take(flag_bytes + nbytes)
            taken.allocate(0, flag_bytes + nbytes)
            place[0] = taken.start
        except MemoryError:
            pass  # `place` tells the others
    runtime.broadcast(name, place, owner, process_set=process_set, blocking=True).wait()
    if place[0] < 0:
        return None
    mine = taken or heaps[owner].mapped(int(place[0]), flag_bytes + nbytes)
    has_let_go = mine.bytes[:flag_bytes].view(np.int64)[::COUNTER_STRIDE // 8]  # by index in the set
    if taken is not None:
        heaps[owner].lend([taken], lambda: bool(has_let_go.all()))
    memory = mine.bytes[flag_bytes:flag_bytes + nbytes]
    weakref.finalize(memory, _let_go, has_let_go, ranks.index(rank), os.getpid()).atexit = False
    return memory


def _let_go(has_let_go: Array, index: int, process: int) -> None:
    if os.getpid() == process:  # else this is a forked child
        has_let_go[index] = 1
