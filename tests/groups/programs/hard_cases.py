"""Programs of hard cases; see tests/groups/test_hard_cases.py."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from typing import Any
from unittest import mock

import numpy as np

from hvdlite import api
from tests.groups.programs.groups import RANK
from tests.groups.worlds import barrier, result_of, sums


def shut_down_with_an_open_group(folder: str, size: int) -> str:
    api.init()
    group = api.open_group("group", list(range(size)), 10.0)
    sums(group, 1.0)
    if RANK == 1:
        api.shutdown()
        return ""
    begun = time.monotonic()
    call = group.start([barrier()], blocking=True)
    took = time.monotonic() - begun
    group.close()
    api.shutdown()
    return f"{took:.1f} s: {call.error!r}"


def rings_come_back(folder: str, size: int, last: int) -> int:
    """Rank `last` closes each group last."""
    api.init()
    total = np.zeros(1)
    for number in range(10):
        group = api.open_group(f"group {number}", [0, 1], 30.0)
        values = np.zeros(100, np.uint8)
        calls = [group.send(values, 1 - RANK, 0), group.receive(np.empty(100, np.uint8), 1 - RANK, 0)]
        for call in calls:
            result_of(call)
        if last != RANK:
            group.close()
        api.runtime().allreduce(f"step {number}", total, total, api.Sum).wait()
        if last == RANK:
            group.close()
        api.runtime().allreduce(f"again {number}", total, total, api.Sum).wait()
    lent = len(api.runtime().connections.heaps[RANK]._lent)
    api.shutdown()
    return lent


def a_child_asks_for_a_message(folder: str, size: int) -> str:
    api.init()
    group = api.open_group("group", [0, 1], 10.0)
    sums(group, 1.0)
    if RANK == 0:
        time.sleep(1.0)
        result_of(group.send(np.full(100, 7, np.uint8), 1, 0))
        time.sleep(4)
        answer = ""
    else:
        values = np.zeros(100, np.uint8)
        with mock.patch.object(group._messages, "let_work", lambda: None):  # the parent's worker is late
            call = group.receive(values, 0, 0)
            time.sleep(2)
            pid = os.fork()
            if not pid:
                done = call.is_done
                os._exit(7 if done else 8)
            _, status = os.waitpid(pid, 0)
        ended = call.wait(4)
        answer = f"child: {os.waitstatus_to_exitcode(status)}; parent ended {ended}, {call.error!r}, got {values[0]}"
    try:
        group.close()
        api.shutdown()
    except Exception as error:
        answer += repr(error)
    return answer


def a_child_with_the_lock(folder: str, size: int) -> str:
    api.init()
    group = api.open_group("group", [0, 1], 10.0)
    sums(group, 1.0)
    answer = ""
    if RANK == 1:
        call = group.receive(np.zeros(100, np.uint8), 0, 0)
        group._messages._lock.acquire()  # another thread is in `advance`
        pid = os.fork()
        if not pid:
            signal.alarm(5)
            assert not call.is_done
            os._exit(0)
        group._messages._lock.release()
        _, status = os.waitpid(pid, 0)
        answer = str(os.waitstatus_to_exitcode(status))
    group.close()
    api.shutdown()
    return answer


def a_handler_in_the_middle_of(folder: str, size: int, where: str) -> str:
    """A signal handler of all ranks makes a blocking call (of the job), while its thread makes a group."""
    api.init()
    runtime = api.runtime()
    main = threading.get_ident()
    total = np.zeros(1 << 22)
    done = []

    def handler(*_: Any) -> None:
        handle = runtime.allreduce("in the handler", total, total, api.Sum)
        begun = time.monotonic()
        while not handle.done() and time.monotonic() < begun + 8:
            time.sleep(0.01)
        done.append(handle.done())

    signal.signal(signal.SIGUSR1, handler)
    if where == "fallocate":
        original = os.posix_fallocate

        def allocate(*arguments: Any) -> None:
            original(*arguments)
            if threading.get_ident() == main and not done:
                signal.raise_signal(signal.SIGUSR1)
        patch: Any = mock.patch.object(os, "posix_fallocate", allocate)
    else:
        channel = runtime.connections.oob
        original_wait = channel.wait

        def wait(is_over: Any, until: float) -> bool:
            def over() -> bool:
                if not done:
                    signal.raise_signal(signal.SIGUSR1)
                return is_over()
            return original_wait(over, until)
        patch = mock.patch.object(channel, "wait", wait)
    with patch:
        group = api.open_group("group", list(range(size)), 60.0)
    sums(group, 1.0)
    group.close()
    api.shutdown()
    return str(done)


def rank_zero_shuts_down_with_an_open_group(folder: str, size: int) -> str:
    api.init()
    group = api.open_group("group", list(range(size)), 10.0)
    sums(group, 1.0)
    if RANK == 0:
        api.shutdown()
        return ""
    begun = time.monotonic()
    call = group.start([barrier()], blocking=True)
    took = time.monotonic() - begun
    group.close()
    api.shutdown()
    return f"{took:.1f} s: {call.error!r}"


def a_job_that_fails_just_after_a_meeting(folder: str, size: int) -> str:
    from hvdlite.groups.meeting import GroupMeeting
    api.init()
    runtime = api.runtime()
    meet = GroupMeeting.meet

    def slow(self: Any, deadline: float) -> Any:
        found = meet(self, deadline)
        if RANK == 1:
            os._exit(0)
        assert runtime._state.ended.wait(20)
        return found

    with mock.patch.object(GroupMeeting, "meet", slow):
        try:
            api.open_group("group", [0, 1], 20.0)
        except BaseException as error:
            return repr(error)[:200]
    return "made"


def memory_of_a_group_that_one_rank_cannot_make(folder: str, size: int) -> int:
    import dataclasses
    api.init()
    runtime = api.runtime()
    connections, total = runtime.connections, np.zeros(1)

    def no_plane(*_: Any) -> Any:
        raise MemoryError("no memory")

    for number in range(5):
        if RANK == 1:
            runtime.connections = dataclasses.replace(connections, group_planes=no_plane)
        try:
            api.open_group(f"group {number}", [0, 1], 20.0).close()
        except MemoryError:
            pass
        runtime.allreduce(f"step {number}", total, total, api.Sum).wait()
    runtime.connections = connections
    lent = len(connections.heaps[RANK]._lent)
    api.shutdown()
    return lent


def a_handler_while_another_rank_announces(folder: str, size: int) -> str:
    """Rank 0's thread is interrupted while it looks for announcements; rank 1's comes; the handler needs the runtime."""
    api.init()
    runtime = api.runtime()
    total, done = np.zeros(4), []
    if RANK == 1:
        threading.Timer(0.5, lambda: runtime.allreduce("in the handler", np.zeros(4), np.zeros(4), api.Sum)).start()
        time.sleep(1.0)
        threading.Timer(2.0, lambda: runtime.allreduce("again", np.zeros(4), np.zeros(4), api.Sum)).start()
    else:
        def handler(*_: Any) -> None:
            runtime.allreduce("in the handler", total, total, api.Sum).wait()
            time.sleep(1.5)
            handle = runtime.allreduce("again", total, total, api.Sum)
            begun = time.monotonic()
            while not handle.done() and time.monotonic() < begun + 6:
                time.sleep(0.01)
            done.append(handle.done())

        signal.signal(signal.SIGUSR1, handler)
        channel = runtime.connections.oob
        original = channel.wait

        def wait(is_over: Any, until: float) -> bool:
            def over() -> bool:
                if not done:
                    signal.raise_signal(signal.SIGUSR1)
                return is_over()
            return original(over, until)
        channel.wait = wait  # type: ignore[method-assign]
    group = api.open_group("group", [0, 1], 60.0)
    time.sleep(2.5)
    group.close()
    api.shutdown()
    return str(done)


def stress(folder: str, size: int, rounds: int) -> None:
    """Threads make, use and close overlapping groups."""
    api.init()
    parts = [list(each) for count in (2, 3) for each in itertools.permutations(range(size), count)]
    errors: list[str] = []

    def work(thread: int) -> None:
        choice, own = random.Random(thread), random.Random(100 * thread + RANK)
        for number in range(rounds):
            members = choice.choice(parts)
            length, big = choice.choice([1, 1000, 300_000]), choice.choice([1, 100, 100_000, 3_000_000])
            if RANK in members:
                try:
                    use(f"thread {thread}, {number}", members, length, big)
                except BaseException as error:
                    errors.append(f"{thread} {number} {members}: {error!r}")
                    return
                time.sleep(own.random() * 0.003)

    def use(name: str, members: list[int], length: int, big: int) -> None:
        group, index = api.open_group(name, members, 60.0), members.index(RANK)
        assert sums(group, float(RANK), length) == sum(members)
        others = [other for other in range(len(members)) if other != index]
        sent = [group.send(np.full(big, index, np.uint8), to, 1) for to in others]
        got = [(source, np.zeros(big, np.uint8)) for source in others]
        calls = [group.receive(values, source, 1) for source, values in got]
        for call in (*calls, group.start([barrier()]), *sent):
            result_of(call)
        for source, values in got:
            assert (values == source).all()
        group.close()

    workers = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
        assert not worker.is_alive(), errors
    assert not errors, errors
    runtime = api.runtime()
    total = np.zeros(1)
    for turn in range(2):  # rings come back when all have closed, and then what they were in
        runtime.allreduce(f"turn {turn}", total, total, api.Sum).wait()
        runtime.connections.heaps[RANK].take_back()
    assert not runtime._state.groups and not runtime.connections.heaps[RANK]._lent
    channel = runtime.connections.oob
    assert {*channel._listeners, *channel._announced} == {"announced.stop"}
    assert not any(channel._announced.values())
    api.shutdown()


def sends_at_exit(folder: str, size: int) -> str:
    """Python 3.12.0-3.12.x starts no threads in `atexit`; a flush that takes more than a second ends the worker."""
    api.init()
    group = api.open_group("group", [0, 1], 60.0)
    sums(group, 1.0)
    if RANK == 0:
        for tag in range(2):
            group.send(np.full(100_000_000, tag, np.uint8), 1, tag)
        return "sent"
    time.sleep(2.5)
    got = []
    for tag in range(2):
        values = np.zeros(100_000_000, np.uint8)
        call = group.receive(values, 0, tag)
        call.wait()
        got.append(f"{call.error!r} {values[-1]}")
    return str(got)


def no_more_threads(folder: str, size: int) -> str:
    """Two hosts. Rank 1 cannot start a thread any more (limits; `atexit` of Python 3.12); rank 0 leaves with a message."""
    api.init()
    group = api.open_group("group", [0, 1], 60.0)
    start = threading.Thread.start

    def start_not(self: threading.Thread) -> None:
        if self.name.startswith("hvdlite-group"):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(self)

    if RANK == 0:
        time.sleep(1)
        group.send(np.ones(8, np.uint8), 1, 0)
        group.drain(1.0)
        time.sleep(1)
    else:
        with mock.patch.object(threading.Thread, "start", start_not):
            time.sleep(3)
    failure = repr(api.runtime().failure)
    if failure == "None":
        group.close()
        api.shutdown()
    return failure


def received_and_closed(folder: str, size: int, count: int) -> str:
    """Two hosts: rank 1 closes each group as soon as it has received the message."""
    api.init()
    errors: list[str] = []
    for number in range(count):
        group = api.open_group(f"group {number}", [0, 1], 30.0)
        if RANK == 0:
            call = group.send(np.zeros(100_000, np.uint8), 1, 0)
            call.wait()
            if call.error is not None:
                errors.append(repr(call.error))
        else:
            result_of(group.receive(np.zeros(100_000, np.uint8), 0, 0))
        group.close()
    api.shutdown()
    return f"{len(errors)} of {count}: {errors[:1]}"


def breaking(folder: str, size: int, count: int) -> None:
    """Ranks close at random places; the others' calls must end soon."""
    api.init()
    runtime, total = api.runtime(), np.zeros(1)
    for number in range(count):
        end = random.Random(1000 * number + RANK).randrange(6)
        group, begun = api.open_group(f"group {number}", list(range(size)), 20.0), time.monotonic()
        for step in range(end):
            sent = group.send(np.zeros(3_000_000, np.uint8), (RANK + 1) % size, step)
            got = group.receive(np.zeros(3_000_000, np.uint8), (RANK - 1) % size, step)
            later = group.start([barrier()])
            for call in (got, later, sent):
                call.wait()
            if later.error is not None:
                break
        assert time.monotonic() - begun < 10, (number, end)
        group.close()
        runtime.allreduce(f"step {number}", total, total, api.Sum).wait()
    api.shutdown()
