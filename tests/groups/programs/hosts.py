"""Programs of ranks on several hosts that use groups."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Sequence
from unittest import mock

import numpy as np

from hvdlite import api
from hvdlite.core.errors import DeadlockError, OperationTimeoutError, PeerLeftError
from hvdlite.groups import execution
from hvdlite.groups import groups as groups_module
from hvdlite.groups.group import Group
from hvdlite.groups.reports import RuntimeReports
from tests.groups.programs.groups import RANK, group_of
from tests.groups.worlds import HANGS_SECONDS, allreduce, barrier, result_of, sums


def meet(folder: str, name: str, size: int) -> None:
    """Wait for the other ranks without a collective."""
    open(f"{folder}/{name}.{RANK}", "x").close()
    until = time.monotonic() + HANGS_SECONDS
    while not all(os.path.exists(f"{folder}/{name}.{rank}") for rank in range(size)):
        assert time.monotonic() < until, name
        time.sleep(0.01)


def error_of(group: Group, *, timeout: float | None = None, blocking: bool = True) -> Exception | None:
    call = group.start([allreduce(np.ones(5))], blocking=blocking, timeout=timeout)
    assert call.wait(HANGS_SECONDS)
    return call.error


def one_leaves(folder: str, members: Sequence[int]) -> None:
    """A rank leaves groups that the others need: on the job's runtime, and those that are worlds of their own."""
    size = len(members)
    world = group_of(folder, "world", list(range(size)), is_world=True)
    for order in (list(range(size)), members):
        for how in ("unused", "idle", "within"):
            name = f"{how} {order}"
            group = group_of(folder, name, order)
            last = order.index(size - 1)
            if how != "unused":
                assert sums(group, 1.0) == size
            if size - 1 == RANK:
                if how == "within":
                    call = group.start([allreduce(np.ones(50_000))])
                    while not group.state.runner:
                        time.sleep(0.001)
                    group.abort("the test wants it")
                    assert call.wait(HANGS_SECONDS)
                    meet(folder, name, size)
                group.close()
            else:
                if how == "within":
                    meet(folder, name, size)
                error = error_of(group, blocking=how != "idle")
                assert isinstance(error, PeerLeftError) and error.rank == last, (name, error)
                assert ("in the middle of" if how == "within" else "without making this call") in str(error), (name, error)
                assert f"needs rank {size - 1}, " in str(error), error
            assert sums(world, 1.0) == size
            group.close()
    world.close()


def one_does_not_come(folder: str, size: int) -> None:
    mock.patch.object(execution, "ANSWER_SECONDS", HANGS_SECONDS).start()
    world = group_of(folder, "world", list(range(size)), is_world=True)
    for name, order in (("same", list(range(size))), ("reversed", list(range(size))[::-1])):
        group = group_of(folder, name, order)
        assert sums(group, 1.0) == size
        if size - 1 != RANK:
            error = error_of(group, timeout=0.3)
            assert isinstance(error, OperationTimeoutError) and error.ranks == (order.index(size - 1),), error
            assert f"rank {size - 1} did not make this call" in str(error), error
            assert f"rank {size - 1} last called call 1: all_reduce(SUM, float32[4])" in str(error), error
        assert sums(world, 1.0) == size
    world.close()


def sends_that_nobody_receives(folder: str) -> None:
    """They do not keep a rank that leaves, and are received later if somebody wants them."""
    world = group_of(folder, "world", [0, 1], is_world=True)
    group = group_of(folder, "group", [0, 1])
    other = 1 - RANK
    sent = [np.full(size, 10 * RANK + number, np.uint8) for number, size in enumerate((3, 100_000, 7))]
    calls = [group.send(values, other, number) for number, values in enumerate(sent)]
    wanted = np.empty(100_000, np.uint8)
    early = group.receive(wanted, other, 1)
    if RANK == 0:
        result_of(early)
        group.drain(HANGS_SECONDS)
        assert all(call.is_done and call.error is None for call in calls)
        group.close()
        sums(world, 1.0)
    else:
        sums(world, 1.0)  # rank 0 has left
        result_of(early)
        late = np.empty(3, np.uint8)
        result_of(group.receive(late, 0, 0))
        assert (late == 0).all()
        wrong = group.receive(late, 0, 2)
        assert wrong.wait(HANGS_SECONDS) and "gets a message of 7 bytes" in str(wrong.error)
        gone = group.receive(late, 0, 9)
        assert gone.wait(HANGS_SECONDS) and isinstance(gone.error, PeerLeftError)
        group.close()
    assert (wanted == 10 * other + 1).all()
    world.close()


def exits_without_closing(folder: str, blocking: bool) -> None:
    """Rank 0 has waited in a group that rank 1 left before it was connected; then the process ends."""
    world = group_of(folder, "world", [0, 1], is_world=True)
    group = group_of(folder, "group", [0, 1])
    if RANK == 1:
        group.close()
        sums(world, 1.0)
        return
    call = group.start([allreduce(np.ones(5))], blocking=blocking)
    call.when_done(lambda call: print(type(call.error).__name__))
    assert call.wait(HANGS_SECONDS)
    sums(world, 1.0)
    world.start([barrier()])  # for which nobody waits


def impatient() -> None:
    """Let groups that are made from now on tell of waits that take a quarter of a second."""
    mock.patch.object(groups_module, "GroupExecutor", functools.partial(execution.GroupExecutor, patience=0.25)).start()


def circle(folder: str, size: int) -> None:
    """Each rank waits in another group for the next one."""
    impatient()
    groups = {}
    world = group_of(folder, "world", list(range(size)), is_world=True)
    for first in range(size):
        pair = [first, (first + 1) % size]
        if RANK in pair:
            groups[first] = group_of(folder, f"pair {first}", pair)
            assert sums(groups[first], 1.0) == 2
    api.init()  # the group's
    call = groups[RANK].start([barrier()], blocking=RANK % 2 == 0)
    call.wait()
    assert isinstance(call.error, DeadlockError), call.error
    sys.stdout.write(str(call.error))
    for group in (*groups.values(), world):
        group.close()
    api.shutdown()


def no_circle(folder: str) -> None:
    """The same, but another thread comes in the end."""
    impatient()
    group_of(folder, "world", [0, 1], is_world=True)
    first, second = group_of(folder, "first", [0, 1]), group_of(folder, "second", [0, 1])
    mine, others = (first, second) if RANK == 0 else (second, first)
    until = threading.Event()

    def helps() -> None:
        assert not until.wait(3.0)  # longer than it takes to find a circle
        result_of(others.start([barrier()], blocking=True))

    thread = threading.Thread(target=helps)
    thread.start()
    result_of(mine.start([barrier()], blocking=True))
    thread.join()


def until_traced(group: Group) -> None:
    """Wait until rank 0's order to record what happens has come to this rank."""
    reports = group._reports
    assert isinstance(reports, RuntimeReports)
    while not reports._recorder.tracing:
        time.sleep(0.01)


def traced(folder: str) -> None:
    """A group before there is a job, and one beside the job that does not live on its runtime."""
    alone = group_of(folder, "alone", [0, 1])
    until_traced(alone)
    assert sums(alone, 1.0) == 2
    world = group_of(folder, "world", [0, 1], is_world=True)
    beside = group_of(folder, "beside", [1, 0])
    until_traced(world)
    assert sums(world, 1.0) == sums(beside, 1.0) == 2
    for group in (beside, alone, world):
        group.close()
