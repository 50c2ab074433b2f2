"""Programs of ranks that make groups of some ranks of their job."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np

from hvdlite import api
from hvdlite.core.errors import HorovodInternalError, LaunchError, PeerLostError
from hvdlite.training.elastic import run
from hvdlite.training.elastic.state import ObjectState
from tests.groups.programs.groups import RANK, group_of, left_over
from tests.groups.worlds import allreduce, barrier, result_of, sums
from tests.worlds import HANGS_SECONDS


def many(folder: str, size: int, count: int) -> float:
    """Make many groups and use them all, within few descriptors; return the seconds that it took to make them."""
    world = group_of(folder, "world", list(range(size)), is_world=True)
    others = [group_of(folder, f"first {number}", [0, 1]) for number in range(2)] if RANK < 2 else []
    sums(world, 1.0)
    before, begun = len(left_over()), time.monotonic()
    groups, choice = [], random.Random(1)
    for number in range(count):
        members = choice.sample(range(size), 2 + number % (size - 1))
        if RANK in members:
            groups.append((members, group_of(folder, f"part {number}", members)))
    seconds = time.monotonic() - begun
    assert len(left_over()) <= before + size, "a mapping of each rank's heap, at most"
    for members, group in groups:
        assert sums(group, float(RANK)) == sum(members)
    assert len(left_over()) <= before + size, "threads and descriptors that only calls need"
    for _, group in groups:
        group.close()
    sums(world, 1.0)
    for group in (*others, world):
        group.close()
    return seconds


def memory_comes_back(folder: str, size: int) -> None:
    """Groups that come and go use the same memory."""
    api.init()
    members = list(range(size))
    pages = []
    for number in range(12):
        group = api.open_group(f"group {number}", members, HANGS_SECONDS)
        for _ in range(4):
            assert sums(group, 1.0, 500_000) == size
        if RANK == 0:
            result_of(group.send(np.ones(1 << 20, np.uint8), 1, 0))
        elif RANK == 1:
            result_of(group.receive(np.empty(1 << 20, np.uint8), 0, 0))
        result_of(group.start([barrier()], blocking=True))
        group.close()
        descriptor = next(each for each in os.listdir("/proc/self/fd")
                          if "memfd:hvdlite" in os.readlink(f"/proc/self/fd/{each}"))
        total = np.zeros(1)
        api.runtime().allreduce(f"step {number}", total, total, api.Sum).wait()  # all have closed it
        pages.append(os.stat(f"/proc/self/fd/{descriptor}").st_blocks)
    assert pages[-1] <= pages[2], pages
    api.shutdown()


def one_is_lost(folder: str, size: int, how: str) -> None:
    """The last rank ends while the others make a group with it; they print how long they have waited."""
    world = group_of(folder, "world", list(range(size)), is_world=True)
    sums(world, 1.0)
    if size - 1 == RANK:
        print("ready", flush=True)
        time.sleep(0.5 if how == "leaves" else 60.0)
        world.close()
        return
    begun = time.monotonic()
    try:
        group_of(folder, "part", list(range(size)), timeout=100.0)
    except PeerLostError as error:
        assert error.rank == size - 1, error
    else:
        raise AssertionError("there is a group with a rank that is not there")
    print(f"{time.monotonic() - begun:.1f} s", flush=True)
    time.sleep(2.0)  # a rank that leaves now would be named, too


def one_does_not_come(folder: str, size: int) -> None:
    """The timeout of the group counts, and not that of the store."""
    world = group_of(folder, "world", list(range(size)), is_world=True)
    if size - 1 != RANK:
        begun = time.monotonic()
        try:
            group_of(folder, "part", list(range(size)), timeout=0.5)
        except LaunchError as error:
            assert f"in vain for rank {size - 1}; all {size} ranks must make the group" in str(error), error
        else:
            raise AssertionError("there is a group without a rank")
        assert time.monotonic() - begun < 10
    sums(world, 1.0)
    assert sums(group_of(folder, "part", list(range(size))), 1.0) == size, "they may try again"


def a_group_that_breaks(folder: str, size: int) -> None:
    """An error that one rank has alone ends the group on all, and not the job."""
    api.init()
    group, other = (api.open_group(name, list(range(size)), HANGS_SECONDS) for name in ("breaks", "other"))
    sums(group, 1.0)
    if RANK == 1:
        def no_memory(*_: object) -> None:
            raise MemoryError("no memory for 7 bytes")
        group._execution._plane.execute = no_memory  # type: ignore[assignment,method-assign]
    error = group.start([barrier()], blocking=True).error
    if RANK == 1:
        assert isinstance(error, MemoryError)
    else:
        assert isinstance(error, HorovodInternalError) and "rank 1 failed with MemoryError: no memory for 7" in str(error)
    assert sums(other, 1.0) == size
    total = np.ones(3)
    api.runtime().allreduce("x", total, total, api.Sum).wait()
    assert (total == size).all()
    again = api.open_group("breaks", list(range(size)), HANGS_SECONDS)
    assert sums(again, 1.0) == size
    api.shutdown()


def a_message_for_a_thread_in_a_collective(folder: str) -> None:
    """Rank 0 has no other thread that could take it: its script waits in a collective, and so does its worker."""
    api.init()
    group = api.open_group("pair", [0, 1], HANGS_SECONDS)
    length = 64 << 20  # more than a ring has
    if RANK == 0:
        received = np.zeros(length, np.uint8)
        call = group.receive(received, 1, 0)
        result_of(group.start([allreduce(np.ones(3))], blocking=True))
        result_of(call)
        assert received.all()
    else:
        result_of(group.send(np.ones(length, np.uint8), 0, 0))
        result_of(group.start([allreduce(np.ones(3))], blocking=True))
    group.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvdlite-group")]
    api.shutdown()


def in_each_world(gate: str) -> list[int]:
    """A member of an elastic job that makes groups in each world; return the sizes of the worlds."""
    api.init()
    state: Any = ObjectState(step=0)
    sizes = []

    @run
    def loop(state: Any) -> None:
        rank, size = api.rank(), api.size()
        everybody = api.open_group("everybody", list(range(size)), HANGS_SECONDS)
        pair = api.open_group("a pair", [size - 1, 0], HANGS_SECONDS) if rank in (0, size - 1) else None
        sizes.append(size)
        print(f"world of {size}", flush=True)
        done = np.zeros(1)
        try:
            while not done[0]:
                done[0] = os.path.exists(gate)
                for group, members in ((everybody, range(size)), (pair, (0, size - 1))):
                    if group is not None and len(members) > 1:
                        call = group.start([allreduce(np.ones(3))], blocking=True)
                        if call.error is not None:
                            raise call.error
                state.step += 1
                call = everybody.start([allreduce(done)], blocking=True)
                if call.error is not None:
                    raise call.error
        finally:
            everybody.close()
            if pair is not None:
                pair.close()

    loop(state)
    api.shutdown()
    return sizes
