"""The contract suite's ranks as processes that mpiexec has started; see `test_mpi.py`."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from hvdlite.planes.base import Plane, WaitUntil

ACTIVE = "CONTRACT_UNDER_MPI" in os.environ
HANGS_SECONDS = 30.0
POLL_SECONDS = 50e-6, 2e-4
"""Between the first two polls of a wait, and at most. There are more processes than cores, and MPI's own waits spin."""


@functools.cache
def world(size: int) -> Any:
    """Return a communicator of the first `size` processes; None on the others."""
    from mpi4py import MPI
    everybody = MPI.COMM_WORLD
    split = everybody.Split(everybody.rank < size, everybody.rank)
    return split if everybody.rank < size else None


def duplicate(size: int) -> Any:
    """Return a new communicator of the first `size` processes, of which others may still run a smaller world's test."""
    communicator, request = world(size).Idup()
    _wait_until(request.Test)
    return communicator


def _wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
    deadline = time.monotonic() + HANGS_SECONDS
    sleep, longest = POLL_SECONDS
    while not predicate():
        assert time.monotonic() < deadline, "another rank failed, or this one waits in vain"
        time.sleep(sleep)
        sleep = min(1.5 * sleep, longest)


def _gathered(communicator: Any, result: Any) -> list[Any]:
    """Return every process's result. mpi4py's `allgather` of objects spins."""
    mine, counts = np.frombuffer(msgspec.msgpack.encode(result), np.uint8), np.empty(communicator.size, np.int64)
    _wait_until(communicator.Iallgather(np.array([len(mine)], np.int64), counts).Test)
    encoded = np.empty(counts.sum(), np.uint8)
    _wait_until(communicator.Iallgatherv(mine, [encoded, counts.tolist()]).Test)
    return [msgspec.msgpack.decode(part) for part in np.split(encoded, np.cumsum(counts)[:-1])]


def run(make_planes: Callable[..., list[Plane]], size: int,
        step: Callable[[int, Plane, WaitUntil, Callable[[], object]], Any]) -> list[Any]:
    """Run this process's step; return those of all processes. A failure ends them all."""
    communicator = world(size)
    if communicator is None:
        return []

    def barrier() -> None:
        _wait_until(communicator.Ibarrier().Test)

    (plane,) = make_planes(size, lambda rank: None)
    try:
        result = step(communicator.rank, plane, _wait_until, barrier)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        sys.__stderr__.flush()
        communicator.Abort(1)
        raise
    plane.close()
    return _gathered(communicator, result)
