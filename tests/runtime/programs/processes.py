"""Programs of test_processes.py."""

from __future__ import annotations

import gc
import logging
import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import api
from hvdlite.diagnostics.progress import read
from hvdlite.training.gradients.arrays import ArrayReducer
from tests.held import join_threads


def collectives(size: int) -> None:
    hvd.init()
    assert hvd.size() == size
    total = sum(range(hvd.size()))
    for count in (0, 1, 1000, 3_000_000):
        assert (hvd.allreduce(np.full(count, hvd.rank()), op=hvd.Sum) == total).all()
    array = np.full((3, 5), hvd.rank(), np.float32)
    assert hvd.allreduce_(array, op=hvd.Max) is array and (array == hvd.size() - 1).all()
    assert hvd.allgather(np.full(hvd.rank(), 1)).sum() == total
    assert hvd.broadcast(np.array(hvd.rank()), 0) == 0
    handle = hvd.allreduce_async([1.5])
    assert hvd.synchronize(handle)[0] == 1.5 and hvd.poll(handle)
    hvd.barrier()
    hvd.shutdown()
    hvd.shutdown()


def ranks_of_a_machine_that_reorders_stores_share_a_fence() -> None:
    platform.machine = lambda: "aarch64"
    left = []
    for _ in range(2):
        hvd.init()
        files = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
        assert files.count("anon_inode:[eventfd]") == 4, files  # a bell each, and the fence
        for count in (10, 1000, 3_000_000):
            for turn in range(5):
                assert (hvd.allreduce(np.full(count, hvd.rank() + turn), op=hvd.Sum) == 3 + 3 * turn).all()
        hvd.shutdown()
        left.append(len(os.listdir("/proc/self/fd")))
    assert left[1] <= left[0], left


def without_a_launcher_it_is_size_one() -> None:
    for name in list(os.environ):
        if name.startswith(("HVDLITE_", "HOROVOD_")):
            del os.environ[name]
    hvd.init()
    print(hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_size(), hvd.allreduce([4]), hvd.is_homogeneous())


def loop() -> None:
    hvd.init()
    step = 0
    while True:
        hvd.allreduce(np.ones(1000, np.float32), name="gradient")
        step += 1
        if step == 20:
            print("running", flush=True)


def an_exception_travels_with_its_traceback(origin: int) -> None:
    hvd.init()

    def prepare_batch() -> None:
        raise KeyError("no such column")

    hvd.barrier()
    if hvd.rank() == origin:
        prepare_batch()
    hvd.allreduce(np.ones(3))


def a_death_is_seen_although_a_forked_worker_holds_every_socket() -> None:
    hvd.init()
    if hvd.rank() == 1 and os.fork() == 0:
        try:
            hvd.allreduce(np.ones(1))
        except hvd.HorovodInternalError as error:
            print(type(error).__name__, flush=True)
        while True:
            time.sleep(1)
    while True:
        hvd.allreduce(np.ones(1), name="x")


def forked_workers_and_their_own_forks_leave_the_job_alone() -> None:
    hvd.init()
    for _turn in range(5):
        child = os.fork()
        if child == 0:
            grandchild = os.fork()
            if grandchild:
                os.waitpid(grandchild, 0)
            os._exit(0)
        hvd.allreduce(np.ones(100))
        assert os.waitpid(child, 0)[1] == 0
    hvd.allreduce(np.ones(100))


def forked_workers_that_shut_down_and_end_normally_leave_the_job_alone() -> None:
    hvd.init()
    rank, directory = hvd.rank(), os.environ["HVDLITE_JOB_DIRECTORY"]
    reducer = ArrayReducer(api.runtime(), "set", op=hvd.Sum)
    reducer.add((100_000,), "float64")

    def step() -> Any:
        reducer.expect([0])
        reducer.hand_over(0, np.full(100_000, 1.0 + rank))
        return reducer.finish()[0]

    for _ in range(5):
        step()
    hvd.record_step(7)
    child = os.fork()
    if child == 0:
        hvd.record_step(1000)
        hvd.shutdown()
        del reducer
        gc.collect()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read(directory, rank).samples == 7
    for _ in range(5):
        assert (step() == 3).all()


def a_rank_that_dies_before_init_is_named_by_the_others() -> None:
    if os.environ["HVDLITE_RANK"] == "1":
        os._exit(7)
    hvd.init()


def ranks_end_in_any_order_without_noise() -> None:
    hvd.init()
    hvd.allreduce(np.ones(3))
    time.sleep(0.3 * hvd.rank())  # rank 0 is through first, and has to serve the others
    if hvd.rank() > 0:
        try:
            hvd.allreduce(np.ones(3), name="late")
        except hvd.PeerLeftError as error:
            print(error)


def an_idle_job_uses_no_processor_time() -> float:
    hvd.init()
    hvd.allreduce(np.ones(1))
    before = time.process_time()
    time.sleep(3)
    used = time.process_time() - before
    hvd.barrier()
    return used


def init_and_shutdown_again_leak_nothing() -> None:
    counts = []
    for _turn in range(20):
        hvd.init()
        hvd.allreduce(np.ones(1))
        hvd.shutdown()
        join_threads()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert all(last <= max(early) for last, *early in zip(counts[-1], *counts[:5], strict=True)), counts


def the_control_plane_over_tcp() -> None:
    hvd.init()
    for _turn in range(200):
        assert hvd.allreduce(np.array(hvd.rank()), op=hvd.Sum) == 3
    time.sleep(2.2)  # heartbeats travel
    hvd.barrier()


def init() -> None:
    hvd.init()


def many_small_collectives_leave_nothing_behind(number: int) -> None:
    hvd.init()
    value = np.ones(3)

    def held() -> tuple[int, int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * 4096, len(os.listdir("/proc/self/fd")), threading.active_count()

    for count in range(number):
        match count % 4:
            case 0:
                hvd.allreduce_(value, op=hvd.Max, name=f"once {count}")
            case 1:
                hvd.broadcast_(value, 1, name=f"tensor {count % 1000}")
            case 2:
                hvd.allgather(value, name="same name")
            case 3:
                handles = [hvd.allreduce_async(value, name=name) for name in "ab"]
                hvd.synchronize(handles[0])
                hvd.synchronize(handles[1])
        if count == number // 3:
            before = held()
    after = held()
    assert after[0] - before[0] < 2.5e6 and after[1] <= before[1] and after[2] == before[2], (before, after)
    hvd.shutdown()


def numpys_grouped_calls_and_the_story_of_a_tensor() -> None:
    hvd.init()
    rank = hvd.rank()
    arrays = [np.full(3, rank + 1.0), np.full((2, 2), rank, np.int64), np.full(4, 10.0 * rank)]
    one, two, three = hvd.grouped_allreduce(arrays, name="g", op=hvd.Sum)
    assert (one == 3).all() and (two == 1).all() and two.dtype == np.int64 and (three == 10).all()
    assert (arrays[0] == rank + 1).all()
    handle = hvd.grouped_allreduce_async_(arrays, op=hvd.Max)
    assert hvd.synchronize(handle)[0] is arrays[0] and hvd.poll(handle) and (arrays[2] == 10).all()
    assert hvd.grouped_allreduce([]) == []
    rows = hvd.grouped_allgather([np.full(rank + 1, rank), np.zeros((1, 2))])
    assert rows[0].tolist() == [0, 1, 1] and rows[1].shape == (2, 2)
    parts = hvd.grouped_reducescatter([np.ones(5), np.ones((2, 3))], op=hvd.Sum)
    assert parts[0].tolist() == [2.0] * (3 - rank) and parts[1].shape == (1, 3)
    angles = hvd.allreduce(np.eye(2)[rank], op=hvd.Adasum)
    assert angles.tolist() == [1, 1], "orthogonal vectors are added"
    try:
        hvd.allreduce(np.ones(rank + 1), name="uneven")
    except hvd.MismatchError as error:
        assert "What happened to 'uneven' on rank" in str(error) and "enqueued (allreduce, float64[" in str(error)
    else:
        raise SystemExit("no error")
    story = hvd.story("uneven").splitlines()
    assert "enqueued" in story[0] and "failed" in story[-1] and hvd.story("unheard of") == ""
    logging.getLogger("hvdlite").warning("hello")
