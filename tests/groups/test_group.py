"""One group of ranks that are threads, over real shared memory, and over several "hosts" with the reference plane."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.core.errors import MismatchError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.groups.group import Group
from hvdlite.groups.operation import Operation
from hvdlite.memory import futex
from hvdlite.memory.area import Area, area_bytes
from hvdlite.memory.futex import PolledWord
from tests.groups.worlds import HANGS_SECONDS, HOSTS, Reports, allgather, allreduce, barrier, groups, play, result_of, sums


def move(collective: Collective, elements: int, *, source: Any = (), output: Any = (), **more: Any) -> Operation:
    return Operation(collective=collective, agreed=f"{collective.name}({elements})", dtype="int64",
                     sources=source, outputs=output, **more)


@HOSTS
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("elements", [0, 1, 40, 30_000])
def test_collectives(size: int, elements: int, one_host: bool) -> None:
    def step(group: Group) -> None:
        rank, root, each = group.rank, size - 1, (elements,) * size

        def carry_out(operation: Operation, *, blocking: bool = True) -> None:
            result_of(group.start([operation], blocking=blocking))

        base = np.arange(elements)
        for op, want in ((ReduceOp.SUM, base * sum(range(1, size + 1))), (ReduceOp.MAX, base * size)):
            values, output = base * (rank + 1), np.empty_like(base)
            carry_out(allreduce(values, output, op))
            assert np.array_equal(output, want)
            carry_out(allreduce(values, op=op), blocking=False)
            assert np.array_equal(values, want)
        whole = np.empty(elements * size, np.int64)
        carry_out(allgather(base + rank, whole, size))
        gathered = np.concatenate([base + each for each in range(size)])
        assert np.array_equal(whole, gathered)
        mine = np.empty(elements, np.int64)
        carry_out(move(Collective.REDUCESCATTER, elements, source=[whole], output=[mine], rows=each))
        assert np.array_equal(mine, (base + rank) * size)
        copied = np.full(elements, rank)
        carry_out(move(Collective.BROADCAST, elements, source=[copied] if rank == root else [], output=[copied], root=root))
        assert (copied == root).all()
        at_root = np.zeros_like(base) if rank == root else None
        carry_out(move(Collective.REDUCE, elements, source=[base + rank], output=[at_root], root=root))
        assert at_root is None or np.array_equal(at_root, base * size + sum(range(size)))
        collected = np.zeros_like(whole) if rank == root else None
        carry_out(move(Collective.GATHER, elements, source=[base + rank], output=[collected], root=root, rows=each))
        assert collected is None or np.array_equal(collected, gathered)
        carry_out(move(Collective.SCATTER, elements, source=[gathered] if rank == root else [], output=[mine], root=root,
                       rows=each))
        assert np.array_equal(mine, base + rank)
        exchanged = np.empty(elements * size, np.int64)
        carry_out(move(Collective.ALLTOALL, elements, source=[np.repeat(np.arange(size), elements) * 10 + rank],
                       output=[exchanged], rows=each))
        assert np.array_equal(exchanged, np.repeat(np.arange(size), elements) + rank * 10)
        carry_out(barrier())

    play(groups(size, one_host=one_host), step)


@HOSTS
def test_an_alltoall_with_different_splits(one_host: bool) -> None:
    size = 3

    def step(group: Group) -> None:
        rank = group.rank
        sent = tuple((rank + 2 * to) % 4 * 1000 for to in range(size))
        received = tuple((source + 2 * rank) % 4 * 1000 for source in range(size))
        source = np.concatenate([np.full(count, 10 * rank + to) for to, count in enumerate(sent)])
        output = np.empty(sum(received), np.int64)
        result_of(group.start([move(Collective.ALLTOALL, 0, source=[source], output=[output], sent=sent,
                                    received=received)]))
        assert np.array_equal(output, np.concatenate([np.full(count, 10 * sender + rank) for sender, count
                                                      in enumerate(received)]))
        nothing = np.empty(0, np.int64)
        result_of(group.start([move(Collective.ALLTOALL, 0, source=[nothing], output=[nothing], sent=(0,) * size,
                                    received=(0,) * size)]))
        wrong = (7, 0, 0) if rank == 1 else (0, 0, 0)
        with pytest.raises(MismatchError, match="rank 0 sends 0 elements to rank 1, which expects 7"):
            result_of(group.start([move(Collective.ALLTOALL, 0, source=[nothing], output=[np.empty(7, np.int64)],
                                        sent=(0,) * size, received=wrong)], blocking=True))
        assert sums(group, 1.0) == size

    play(groups(size, one_host=one_host), step)


@HOSTS
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_calls_are_carried_out_in_their_order_whoever_does_it(one_host: bool, seed: int) -> None:
    def step(group: Group) -> list[str]:
        choice, done, calls = random.Random(seed * 3 + group.rank), [], []
        for number in range(40):
            values = np.full(3, number * 10 + group.rank, np.int64)
            call = group.start([allreduce(values)] * choice.choice([1, 1]), lambda number=number: done.append(number),
                               blocking=choice.random() < 0.4)
            calls.append((number, values, call))
        for number, values, call in calls:
            result_of(call)
            assert (values == number * 20 + 1).all()
        assert done == list(range(40))
        reports = group._reports
        assert isinstance(reports, Reports) and reports.began_calls == reports.ended_calls
        return reports.began_calls

    one, other = play(groups(2, one_host=one_host), step)
    assert one == other and len(one) == 40


# docs/protocol.md#groups
@HOSTS
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_ranks_that_differ_all_raise_and_go_on(one_host: bool, seed: int) -> None:
    """Any two calls may meet, with one barrier or many."""
    size = 3

    def operations(rank: int, choice: random.Random) -> Operation:
        elements = choice.choice([0, 1, 50, 40_000])
        values, whole = np.zeros(elements, np.int64), np.zeros(elements * size, np.int64)
        each = (elements,) * size
        return choice.choice([
            allreduce(values), allgather(values, whole, size), barrier(),
            move(Collective.REDUCESCATTER, elements, source=[whole], output=[values], rows=each),
            move(Collective.BROADCAST, elements, source=[values], output=[values], root=1),
            move(Collective.ALLTOALL, elements, source=[whole], output=[whole.copy()], rows=each),
            move(Collective.ALLTOALL, 0, source=[whole], output=[whole.copy()], sent=each, received=each)])

    def step(group: Group) -> list[str]:
        seen = []
        for number in range(15):
            choice = random.Random(seed * 100 + number)
            if choice.random() < 0.5:  # else all call the same
                choice = random.Random(seed * 100 + number * 10 + group.rank)
            call = group.start([operations(group.rank, choice)], blocking=random.random() < 0.5)
            assert call.wait(HANGS_SECONDS)
            assert call.error is None or isinstance(call.error, MismatchError), call.error
            seen.append(str(call.error))
            assert sums(group, group.rank) == 3
        return seen

    one, *others = play(groups(size, one_host=one_host), step)
    assert all(other == one for other in others)


def test_a_mismatch_names_the_ranks_and_what_they_call() -> None:
    def step(group: Group) -> str:
        values = np.zeros(4 + group.rank // 2, np.float32)
        call = group.start([allreduce(values), barrier()], blocking=True)
        assert isinstance(call.error, MismatchError)
        return str(call.error)

    texts = set(play(groups(3), step))
    assert texts == {"group of tests, call 1: the ranks do not call the same: all_reduce(SUM, float32[4]) on ranks 0, 1; "
                     "all_reduce(SUM, float32[5]) on rank 2. All ranks have to make the same calls in the same order"}


@HOSTS
def test_texts_of_any_length_are_compared(one_host: bool) -> None:
    """What does not fit on the board counts, too."""
    def step(group: Group) -> None:
        long = Operation(collective=Collective.BARRIER, agreed="x" * 3000, dtype="uint8")
        result_of(group.start([long], blocking=True))
        other = Operation(collective=Collective.BARRIER, agreed="x" * 3000 + "ab"[group.rank], dtype="uint8")
        with pytest.raises(MismatchError):
            result_of(group.start([other], blocking=True))
        named = Operation(collective=Collective.BARRIER, agreed="rank \u00e4"[:-group.rank or None], dtype="uint8")
        with pytest.raises(MismatchError, match="rank \u00e4 on rank 0"):
            result_of(group.start([named], blocking=True))

    play(groups(2, one_host=one_host), step)


def test_the_worker_thread_keeps_no_tensors() -> None:
    def step(group: Group) -> None:
        values = np.ones(3, np.float32)
        kept = weakref.ref(values)
        result_of(group.start([allreduce(values)]))
        while group.state.runner:
            time.sleep(0.001)
        del values
        gc.collect()
        assert kept() is None

    play(groups(2), step)


@HOSTS
@pytest.mark.parametrize("blocking", [True, False])
def test_only_threads_that_block_on_one_host_poll(blocking: bool, one_host: bool) -> None:
    """A worker thread that polls has the GIL, which the script's thread needs for its own work."""
    ends, polled = groups(2, one_host=one_host), []  # type: ignore[var-annotated]
    for end in ends:
        end._execution._polling = mock.Mock(look=lambda predicate: polled.append(predicate()))

    def step(group: Group) -> None:
        if group.rank:
            time.sleep(0.05)
        assert group.start([barrier()], blocking=blocking).wait()

    play(ends, step)
    assert polled == [False] * (blocking and one_host), "the rank that comes first, if any"


def test_each_wake_up_changes_the_word() -> None:
    memory = bytearray(area_bytes(2))
    seen, word = [0], Area(memory, 0, 2).word
    for area in [Area(memory, rank, 2) for rank in range(2)]:
        for _ in range(3):
            area.wake((0,))
            seen.append(word.value)
    assert len(set(seen)) == 7


@pytest.mark.parametrize("blocking", [True, False])
def test_waits_of_the_script_count_in_its_progress(blocking: bool) -> None:
    """Once each; those of the worker thread do not."""
    def step(group: Group) -> list[str]:
        waiting, names = threading.Event(), []

        def block() -> float:
            names.append(threading.current_thread().name)
            waiting.set()
            return 7.0

        progress = mock.Mock(block=mock.Mock(side_effect=block))
        group._progress = progress
        if group.rank == 1:
            assert first.wait(HANGS_SECONDS)
        elif blocking:
            threading.Thread(target=lambda: (waiting.wait(HANGS_SECONDS), first.set())).start()
        else:
            first.set()
        call = group.start([barrier()], blocking=blocking)
        result_of(call)
        assert progress.unblock.mock_calls == [mock.call(7.0)] * len(names)
        return names

    first = threading.Event()
    for names in play(groups(2), step):
        assert len(names) == 1 if blocking else len(names) <= 1  # it may be over before the script waits
        assert not any(name.startswith("hvdlite-group") for name in names)


@pytest.mark.parametrize("fenced", [True, False])
def test_groups_of_other_machines(fenced: bool) -> None:
    """Where there are no futexes, threads look again and again; where stores are reordered, they share the host's fence."""
    def step(group: Group) -> None:
        for number in range(20):
            assert sums(group, float(number), 20_000) == 3 * number

    with mock.patch.object(futex, "AVAILABLE", False):
        ends = groups(3, fenced=fenced)
        assert isinstance(ends[0].state.area.word, PolledWord)
        play(ends, step)
