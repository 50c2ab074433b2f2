"""Collectives that are launched and never finish: who is told, and what ends the job."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError
from hvdlite.negotiation.messages import GpuProgress, OverdueWork
from hvdlite.negotiation.stalls import gpu_stall
from hvdlite.planes.nccl.cupy_device import EventPool
from hvdlite.planes.nccl.watcher import LaunchedGroup, LaunchedWork, Watcher
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.gpu_double.gpu import GpuDouble
from tests.gpu_double.worlds import Gpus, allreduce, begun
from tests.gpu_double.worlds import gpus as gpus

WORK = OverdueWork(1, 7, (0, 2, 3), "x", 61.0)


@pytest.mark.parametrize(("progress", "missing", "fault", "text"), [
    ({0: (7, 7, 6), 2: (7, 7, 6), 3: (6, 6, 6)}, (3,), "has not launched", "launched by ranks [0, 2], not yet by ranks [3]"),
    ({0: (7, 7, 6), 2: (8, 7, 6)}, (3,), "has not launched", "launched by ranks [0, 2], not yet by ranks [3]"),
    ({0: (9, 7, 6), 2: (7, 6, 6), 3: (7, 7, 7)}, (2,), "has launched, but its GPU has not come to,",
     "the GPUs of ranks [2] are busy with something before it"),
    ({0: (7, 7, 6), 2: (7, 7, 7), 3: (7, 7, 7)}, (0,), "has not finished", "launched by ranks [0, 2, 3]"),
])
def test_who_holds_a_launched_collective_up(progress: dict[int, tuple[int, int, int]], missing: tuple[int, ...], fault: str,
                                            text: str) -> None:
    told = {rank: (GpuProgress(0, 99, 99, 99), GpuProgress(1, *each)) for rank, each in progress.items()}
    stall = gpu_stall(WORK).with_progress(told, WORK.ranks)
    assert stall is not None and stall.missing == missing and stall.fault(missing[0]) == fault
    assert text in str(stall) and "'x' was launched 61 s ago" in str(stall)


def test_a_collective_that_is_finished_meanwhile_is_not_told() -> None:
    told = {rank: (GpuProgress(1, 9, 8, 7 + rank),) for rank in WORK.ranks}
    assert gpu_stall(WORK).with_progress(told, WORK.ranks) is None


class Clock:
    """The planes' clock. A test sets it forward."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(gpus: Gpus) -> Clock:
    gpus.options["clock"] = made = Clock()
    return made


Blocker = Callable[[Any, threading.Event], None]


def busy_gpu(gpu: Any, go_on: threading.Event) -> None:
    """Let the GPU compute what was launched before for very long."""
    gpu.slow = gpu.make_stream()
    gpu.launch(gpu.slow, "compute", lambda: go_on.wait(worlds.HANGS_SECONDS))


def stuck_launch(gpu: Any, go_on: threading.Event) -> None:
    """Let the thread that launches be blocked, as when a GPU's queue is full."""
    (communicator,) = gpu.nccl.communicators
    real = communicator.allReduce

    def late(*arguments: Any) -> None:
        go_on.wait(worlds.HANGS_SECONDS)
        real(*arguments)
    communicator.allReduce = late


@pytest.mark.parametrize(("block", "told"), [
    (busy_gpu, ["the GPUs of ranks [1] are busy with something before it",
                "rank 1 has launched, but its GPU has not come to, 'x': it is in "]),
    (stuck_launch, ["launched by ranks [0, 2], not yet by ranks [1]",
                    "rank 1 has not launched 'x': it waits for 'x' in ", ", test_nccl_stalls.py:"])])
def test_a_gpu_that_is_late_is_told_with_its_rank(gpus: Gpus, clock: Clock, block: Blocker, told: list[str],
                                                  caplog: pytest.LogCaptureFixture) -> None:
    go_on, launched = threading.Event(), threading.Barrier(3)

    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        gpu: Any = begun(gpus, runtime)
        if rank == 1:
            block(gpu, go_on)
        values = np.full(5, rank + 1.0)
        handle = allreduce(gpus, runtime, "x", values, stream=getattr(gpu, "slow", 0))
        if rank != 1 or block is busy_gpu:
            handle.wait()  # it is launched here
        launched.wait(worlds.HANGS_SECONDS)
        clock.now = 170.0
        wait_for(lambda: all(text in caplog.text for text in told))
        go_on.set()
        handle.wait()
        handle.completion.wait()
        assert (values == 6).all()
    worlds.threads(3, step)


def wait_for(predicate: Callable[[], bool]) -> None:
    deadline = time.monotonic() + worlds.HANGS_SECONDS
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_gpu_that_stays_late_ends_the_job(gpus: Gpus, clock: Clock) -> None:
    go_on, launched = threading.Event(), threading.Barrier(2)

    def step(runtime: Runtime) -> None:
        gpu: Any = begun(gpus, runtime)
        if runtime.world.rank == 1:
            busy_gpu(gpu, go_on)
        handle = allreduce(gpus, runtime, "x", np.ones(5), stream=getattr(gpu, "slow", 0))
        handle.wait()
        launched.wait(worlds.HANGS_SECONDS)
        clock.now = 1000.0
        with pytest.raises(HorovodInternalError, match="rank 1 has launched, but its GPU has not come to, 'x'"):
            handle.completion.wait()
        go_on.set()
    worlds.threads(2, step, stall_shutdown_time_seconds=800.0)


def test_work_that_takes_long_is_reported_once_for_each_time() -> None:
    gpu, clock, told = GpuDouble(), Clock(), list[float]()
    no_errors: Any = types.SimpleNamespace(check=lambda: None)
    watcher = Watcher(gpu.device, no_errors, lambda error: None, (60.0, 800.0),
                      lambda work: told.append(work.seconds), clock)
    gpu.hold(gpu.stream)
    pool = EventPool(gpu.device)
    group = LaunchedGroup(0, 1, (0, 1), ("x", "y", "z"), [], clock())
    work = LaunchedWork(gpu.device, pool.record(gpu.stream), watcher, group)
    work.for_entry(None)
    for now, count in ((150.0, 0), (165.0, 1), (500.0, 1), (1000.0, 2)):
        clock.now = now
        wait_for(lambda count=count: len(told) == count)  # type: ignore[misc]
    assert told == [65.0, 900.0] and group.overdue(1.0).name == "x' and 2 more, until 'z"
    assert watcher.progress() == ({}, {0: 1})
    gpu.release(gpu.stream)
    wait_for(lambda: watcher.progress() == ({0: 1}, {}))
    watcher.end(None)
    gpu.end()
