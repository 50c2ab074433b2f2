"""The contract suite's ranks as processes that mpiexec has started; see `test_mpi.py`."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hvdlite.planes.base import Plane, WaitUntil

ACTIVE = "CONTRACT_UNDER_MPI" in os.environ
HANGS_SECONDS = 30.0
POLL_SECONDS = 50e-6
"""Between two looks. There are more processes than cores, and MPI's own waiting takes a core all the time."""


@functools.cache
def world(size: int) -> Any:
    """Return a communicator of the first `size` processes; None on the others."""
    from mpi4py import MPI
    everybody = MPI.COMM_WORLD
    split = everybody.Split(everybody.rank < size, everybody.rank)
    return split if everybody.rank < size else None


def run(make_planes: Callable[..., list[Plane]], size: int,
        step: Callable[[int, Plane, WaitUntil, Callable[[], object]], Any]) -> list[Any]:
    """Run this process's step; return those of all processes. A failure ends them all."""
    communicator = world(size)
    if communicator is None:
        return []

    def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        deadline = time.monotonic() + HANGS_SECONDS
        while not predicate():
            assert time.monotonic() < deadline, "another rank failed, or this one waits in vain"
            time.sleep(POLL_SECONDS)

    def barrier() -> None:
        wait_until(communicator.Ibarrier().Test)

    (plane,) = make_planes(size, lambda rank: None)
    try:
        result = step(communicator.rank, plane, wait_until, barrier)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()
        communicator.Abort(1)
        raise
    plane.close()
    barrier()
    results: list[Any] = communicator.allgather(result)
    return results
