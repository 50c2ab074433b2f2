"""Programs of test_memory.py."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import api
from hvdlite.training.gradients.arrays import ArrayReducer
from tests.held import join_threads
from tests.worlds import HANGS_SECONDS

BUCKET = 8 << 20
"""Bytes of such a set, on each rank. A rank maps its own part, and what it reduces in the other's."""


def shared() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssShmem")) << 10


def begin() -> int:
    hvd.init()
    hvd.allreduce(np.ones(1 << 23))  # in all staging slots, which stay
    return shared()


def reducer_of_one(label: str) -> Any:
    reducer = ArrayReducer(api.runtime(), label, op=hvd.Sum)
    assert reducer.add((1 << 21,), "float32") == 0
    return reducer


def train(reducer: Any, rounds: int) -> int:
    for _ in range(rounds):
        reducer.expect([0])
        reducer.hand_over(0, np.full(1 << 21, 1 + hvd.rank(), np.float32))
        assert (reducer.finish()[0] == 3).all()
    return shared()



def the_buckets_of_sets_that_are_gone_go_back() -> None:
    before = begin()
    for turn in range(6):
        reducer = reducer_of_one(f"set.{turn}")
        used = train(reducer, 5) - before
        assert used >= BUCKET, (turn, used)
        if turn % 2:
            reducer.itself = reducer  # collected in a circle, maybe by another thread, maybe later than on the other rank
        del reducer
        if turn % 3 == hvd.rank():
            hvd.allreduce(np.ones(1), name="meanwhile")
            gc.collect()
        else:
            gc.collect()
            hvd.allreduce(np.ones(1), name="meanwhile")
        hvd.barrier()
        until = time.monotonic() + HANGS_SECONDS
        while shared() >= before + (2 << 20):  # background threads give them back, and the barrier does not wait for these
            assert time.monotonic() < until, (turn, shared())
            time.sleep(0.01)


def the_buckets_of_layouts_that_are_evicted_go_back() -> None:
    before = begin()
    reducer = reducer_of_one("set")
    for turn in range(5):
        used = train(reducer, 4 + (1 << turn)) - before  # learned again ever later
        assert BUCKET <= used < 4 * BUCKET, (turn, used)  # the old one lasts until the next round begins
        learned = api.runtime().gradients.layout("set", 1 << 20)
        if learned is not None and hvd.rank() == turn % 2:
            api.runtime().gradients.mark_stale(learned.layout)
        del learned


def jobs_one_after_the_other_leave_nothing(collects: bool) -> None:
    def job() -> tuple[int, int]:
        begin()
        train(reducer_of_one("set"), 4)
        hvd.shutdown()
        if collects:
            gc.collect()
        join_threads()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    first = job()
    before = shared()
    for _ in range(8):
        descriptors, threads = job()
        assert descriptors <= first[0] and threads <= first[1]
        gc.collect()
        assert shared() <= before + (1 << 20)


def a_shared_file_without_a_range_left_means_no_buckets() -> None:
    before = begin()
    runtime: Any = api.runtime()
    memory = runtime.plane._memory  # no limit on files makes it as short as this
    memory._length = memory._end + (8 << 20)  # on all ranks
    assert train(reducer_of_one("set"), 8) < before + (2 << 20)
