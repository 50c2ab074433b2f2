"""Programs of processes that use groups."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from hvdlite import api
from hvdlite.core.errors import ForkedProcessError, LaunchError, MismatchError, PeerLostError
from hvdlite.groups.group import Group
from tests.groups.worlds import FileStore, allgather, allreduce, barrier, result_of, sums

RANK = int(os.environ.get("HVDLITE_RANK", "0"))


def group_of(folder: str, name: str, members: Sequence[int], *, is_world: bool = False, timeout: float = 60.0) -> Group:
    """Return this rank's end of a group of some ranks of the job."""
    return api.join_group(FileStore(f"{folder}/{name}"), f"process group {name}", members.index(RANK), len(members), timeout,
                          None if is_world else members)


def by_hand(program: Callable[..., object], *arguments: object) -> object:
    """Run a program as a rank that no launcher has started: only the test knows which one it is."""
    for name in [name for name in os.environ if name.startswith("HVDLITE_") and name != "HVDLITE_START_TIMEOUT"]:
        del os.environ[name]
    return program(*arguments)


def without_launcher(name: str, *arguments: object) -> object:
    return by_hand(globals()[name], *arguments)


def left_over() -> list[str]:
    """Return this process's descriptors and threads."""
    threads = [thread.name for thread in threading.enumerate()]
    return sorted([*(f"fd {number}" for number in os.listdir("/proc/self/fd")), *threads])


def overlapping_groups(folder: str, size: int) -> None:
    """The world, neighbours, even ranks, and a group of one: used in turn, asynchronously too."""
    everybody = list(range(size))
    world = group_of(folder, "world", everybody, is_world=True)
    groups = [(everybody, world)]
    for name, members in (("low", everybody[:size // 2 + 1]), ("even", everybody[::2]), ("mixed", everybody[::-1]),
                          *((f"own {each}", [each]) for each in everybody)):
        if RANK in members:
            groups.append((members, group_of(folder, name, members)))
    for number in range(20):
        calls = []
        for members, group in groups:
            values = np.full(1 + 3000 * (number % 3), float(RANK + number))
            calls.append((members, values, group.start([allreduce(values)])))
            assert sums(group, float(members.index(RANK))) == sum(range(len(members)))
        for members, values, call in calls:
            result_of(call)
            assert (values == sum(members) + number * len(members)).all()
    for _, group in groups:
        group.close()


def uses_the_job_of_the_launcher(folder: str, size: int) -> list[int]:
    world = group_of(folder, "world", list(range(size)), is_world=True)
    assert api.is_initialized() and (api.rank(), api.size()) == (RANK, size)
    api.init()
    assert sums(world, 1.0) == size
    total = np.ones(3)
    api.runtime().allreduce("x", total, total, api.Sum).wait()
    assert (total == size).all()
    api.shutdown()
    assert api.is_initialized() and sums(world, 1.0) == size, "the group still uses it"
    world.close()
    assert not api.is_initialized()
    api.init()  # the same job again
    again = group_of(folder, "again", list(range(size)), is_world=True)
    both = group_of(folder, "both", list(range(size)))
    assert [sums(again, 1.0), sums(both, 2.0)] == [size, 2 * size]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("hvdlite-rank")]
    assert len(threads) == 1, threads
    api.shutdown()
    again.close()
    assert sums(both, 1.0) == size
    both.close()
    return [api.is_initialized()]


def begins_a_job_without_launcher(folder: str, rank: int, size: int) -> None:
    world = api.join_group(FileStore(f"{folder}/world"), "process group 0", rank, size, 60.0)
    api.init()
    assert (api.rank(), api.size(), api.local_rank()) == (rank, size, rank)
    assert sums(world, 1.0) == size
    world.close()
    assert api.is_initialized()
    api.shutdown()


def leaves_nothing_behind(folder: str, size: int) -> None:
    members = list(range(size))
    group_of(folder, "first", members).close()  # imports what is needed
    before: list[str] = []
    while not before or before != left_over():  # the runtime ends when all ranks have left
        time.sleep(0.2)
        gc.collect()
        before = left_over()
    for number in range(3):
        group = group_of(folder, f"group {number}", members)
        calls = [group.start([barrier()]) for _ in range(3)]
        assert sums(group, 1.0) == size
        for call in calls:
            result_of(call)
        group.close()
    del group, calls, call
    gc.collect()
    until = time.monotonic() + 30
    while left_over() != before:
        assert time.monotonic() < until, (before, left_over())
        time.sleep(0.01)


def one_ends(folder: str, size: int, how: str, victim: int, shares: bool) -> None:
    """One rank ends while the others wait for it, in a blocking call and in an asynchronous one."""
    members = list(range(size))
    group = group_of(folder, "world", members, is_world=shares)
    sums(group, 1.0)
    if victim == RANK:
        print("ready", flush=True)
        if how == "dies":
            time.sleep(60)
        if how == "breaks":
            group._execution._plane.execute = None  # type: ignore[assignment,method-assign]
            call = group.start([barrier()], blocking=True)
            assert isinstance(call.error, TypeError)
        if how == "fails":
            raise KeyError("no such column")
        return
    asynchronous = group.start([barrier()])
    result_of(group.start([allreduce(np.zeros(50_000))], blocking=True))
    result_of(asynchronous)


def one_dies_in_the_middle(folder: str, size: int) -> None:
    """A rank is killed at any time of a loop of large reductions."""
    group = group_of(folder, "world", list(range(size)))
    values = np.ones(3_000_000, np.float32)
    if RANK == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    try:
        while True:
            result_of(group.start([allreduce(values)], blocking=True))
    except PeerLostError as error:
        print(f"rank {error.rank}", flush=True)


def a_fork(folder: str) -> None:
    group = group_of(folder, "world", [0, 1], is_world=True)
    own = group_of(folder, "own", [0, 1])
    result_of(own.start([barrier()]))
    descriptors = set(os.listdir("/proc/self/fd"))
    child = os.fork()
    if not child:
        call = group.start([barrier()], blocking=True)
        assert isinstance(call.error, ForkedProcessError), call.error
        own.close()
        try:
            group_of(folder, "of the child", [0, 1], is_world=True)
            os._exit(100)
        except ForkedProcessError as error:
            assert "was forked from a rank" in str(error)
        kept = {name for name in descriptors if os.path.exists(f"/proc/self/fd/{name}")
                and os.readlink(f"/proc/self/fd/{name}").startswith("socket:")}
        os._exit(len(kept))  # with which the child could hide the death of its parent
    assert os.waitpid(child, 0)[1] == 0
    assert [sums(group, 1.0), sums(own, 1.0)] == [2, 2]
    group.close()
    own.close()


def one_comes_late(folder: str, size: int) -> None:
    group = group_of(folder, "world", list(range(size)), is_world=True)
    sums(group, 1.0)
    if size - 1 == RANK:
        in_the_data_loader(folder)
    sums(group, 1.0)
    sums(group, 1.0)
    group.close()


def in_the_data_loader(folder: str) -> None:
    while not os.path.exists(f"{folder}/reported"):
        time.sleep(0.01)


def ranks_that_do_not_fit(folder: str) -> None:
    try:
        api.join_group(FileStore(f"{folder}/sizes"), "group", RANK, 2 + RANK, 60.0)
    except LaunchError as error:
        assert "the ranks do not agree on their number: [2, 3]" in str(error)
    else:
        raise AssertionError
    for rank, size in ((2, 2), (-1, 2)):
        try:
            api.join_group(FileStore(f"{folder}/none"), "group", rank, size, 60.0)
        except ValueError as error:
            assert f"rank {rank} is not in 0..1" in str(error)
        else:
            raise AssertionError
    assert sums(group_of(folder, "then", [0, 1]), 1.0) == 2


def several_hosts(folder: str, size: int) -> None:
    """Collectives, disagreement and a rank that leaves, between hosts."""
    members = list(range(size))
    for name, is_world in (("world", True), ("own", False)):
        group = group_of(folder, name, members, is_world=is_world)
        for elements in (1, 5000):
            assert sums(group, float(RANK), elements) == sum(members)
        whole = np.empty(size, np.int64)
        result_of(group.start([allgather(np.array([RANK]), whole, size)]))
        assert whole.tolist() == members
        result_of(group.start([barrier()], blocking=True))
        call = group.start([allreduce(np.zeros(4 + RANK // 2))], blocking=True)
        assert isinstance(call.error, MismatchError) and "float64[4]) on ranks 0, 1; " in str(call.error), call.error
        assert sums(group, 1.0) == size
        group.close()
    some = [0, size - 1]
    if RANK in some:
        group = group_of(folder, "some", some)
        assert sums(group, 1.0) == 2
        if RANK == 0:
            group.close()
            return
        call = group.start([barrier()], blocking=True)
        assert isinstance(call.error, PeerLostError) and call.error.rank == 0, call.error
        sys.stdout.write(f"{type(call.error).__name__}\n")
