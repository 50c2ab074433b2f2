"""Programs of test_stall_report.py."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import numpy as np

import hvdlite as hvd


def a_stall_report_shows_where_the_missing_rank_is() -> None:
    hvd.init()
    hvd.allreduce(np.ones(1), name="before")

    def dawdle() -> None:
        hvd.allreduce(np.ones(1), name="own", process_set=own)
        time.sleep(2.5)

    own = hvd.add_process_set([2])
    if hvd.rank() == 2:
        dawdle()
    hvd.allreduce(np.ones(1), name="late")


def stuck(rank: int, seconds: float) -> None:
    hvd.init()

    def stuck() -> None:
        library, mutex, until = ctypes.PyDLL(None), ctypes.create_string_buffer(64), time.time() + seconds
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(until), 0))  # it holds the GIL; no signal disturbs it

    print("ready", flush=True)
    if hvd.rank() == rank:
        stuck()
    hvd.allreduce(np.ones(1), name="late")


def a_stopped_rank_is_told_and_goes_on_when_it_is_continued(go: str) -> None:
    hvd.init()
    big = np.ones(3_000_000)
    for turn in range(10_000):  # it is stopped in the middle of one of these
        hvd.allreduce_(big, op=hvd.Max)
        if turn == 20:
            print("ready", flush=True)
        if turn > 30 and hvd.broadcast(np.array(os.path.exists(go)), 0):
            break


def a_stall_ends_the_job_with_the_report_as_the_error() -> str:
    hvd.init()

    def absent() -> None:
        threading.Event().wait(8)
        hvd.allreduce(np.ones(1), name="other")

    try:
        if hvd.rank():
            absent()
        hvd.allreduce(np.ones(1), name="x")
    except hvd.StallError as error:
        assert error.rank == 1
        return str(error)
    raise AssertionError("no error")


def a_signal_asks_for_a_report() -> None:
    hvd.init()
    print("ready", flush=True)
    if hvd.rank():
        time.sleep(3)
    hvd.allreduce(np.ones(1), name="x")
