"""Ranks that do the same again and again, and compare what they hold."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import numpy as np

import hvdlite as hvd
from hvdlite.negotiation.mailboxes import CLASSES
from tests.held import join_threads


def held() -> tuple[int, int, int]:
    """Return the bytes of memory, the descriptors and the threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096, len(os.listdir("/proc/self/fd")), threading.active_count()


def starts(seconds: float) -> tuple[int, int, int, int]:
    """Start and end a job again and again; return how often, and what more is held at the end than after a third."""
    until, count, before = time.monotonic() + seconds, 0, None
    while True:
        hvd.init()
        over = bool(hvd.broadcast(np.array(time.monotonic() >= until), 0))
        assert hvd.allreduce(np.full(10, hvd.rank()), op=hvd.Sum)[0] == sum(range(hvd.size()))
        third = bool(hvd.broadcast(np.array(time.monotonic() >= until - seconds * 2 / 3), 0))
        hvd.shutdown()
        join_threads()
        count += 1
        if before is None and third:
            before = held()
        if over and before is not None:
            after = held()
            return count, after[0] - before[0], after[1] - before[1], after[2] - before[2]


def collectives(seconds: float) -> tuple[int, int, int, int]:
    """Call collectives of all kinds for a time; return what `starts` returns."""
    until, count, before = time.monotonic() + seconds, 0, None
    value = np.ones(3)
    hvd.init()
    for turn in range(4 * CLASSES[0][1]):  # afterwards, a new stem's mailbox takes the memory of an old one
        hvd.allreduce_(value, op=hvd.Max, name=f"begin {turn // 4} {turn}")
    while not hvd.broadcast(np.array(time.monotonic() >= until and before is not None), 0):
        for turn in range(100):
            hvd.allreduce_(value, op=hvd.Max, name=f"once {count} {turn}")
            hvd.broadcast_(value, 1, name=f"tensor {turn}")
            hvd.allgather(value, name="same name")
            handles = [hvd.allreduce_async(value, name=name, op=hvd.Max) for name in "ab"]
            hvd.synchronize(handles[0])
            hvd.synchronize(handles[1])
        count += 501
        if before is None and time.monotonic() >= until - seconds * 2 / 3:
            before = held()
    assert before is not None
    after = held()
    hvd.shutdown()
    return count, after[0] - before[0], after[1] - before[1], after[2] - before[2]
