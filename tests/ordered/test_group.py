"""One group of ranks that are threads, over real shared memory, and over several "hosts" with the reference plane."""

from __future__ import annotations

import gc
import itertools
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

from hvdlite.core.errors import HorovodInternalError, MismatchError, OperationTimeoutError, PeerLeftError
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.memory import futex
from hvdlite.memory.futex import PolledWord
from hvdlite.memory.group_area import GroupArea, area_bytes
from hvdlite.ordered import waiter
from hvdlite.ordered.call import Call
from hvdlite.ordered.group_end import GroupEnd
from hvdlite.ordered.operations import Operation
from tests.ordered.worlds import HANGS_SECONDS, Reports, allgather, allreduce, barrier, groups, play, result_of, sums

HOSTS = pytest.mark.parametrize("one_host", [True, False], ids=["one host", "several hosts"])


def move(collective: Collective, elements: int, *, source: Any = (), output: Any = (), **more: Any) -> Operation:
    return Operation(collective=collective, agreed=f"{collective.name}({elements})", dtype="int64",
                     sources=source, outputs=output, **more)


@HOSTS
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("elements", [0, 1, 40, 30_000])
def test_collectives(size: int, elements: int, one_host: bool) -> None:
    def step(group: GroupEnd) -> None:
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

    def step(group: GroupEnd) -> None:
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
    def step(group: GroupEnd) -> list[str]:
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
        reports = group._reporter
        assert isinstance(reports, Reports) and reports.began_calls == reports.ended_calls
        return reports.began_calls

    one, other = play(groups(2, one_host=one_host), step)
    assert one == other and len(one) == 40


# docs/protocol.md#ordered-groups
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

    def step(group: GroupEnd) -> list[str]:
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
    def step(group: GroupEnd) -> str:
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
    def step(group: GroupEnd) -> None:
        long = Operation(collective=Collective.BARRIER, agreed="x" * 3000, dtype="uint8")
        result_of(group.start([long], blocking=True))
        other = Operation(collective=Collective.BARRIER, agreed="x" * 3000 + "ab"[group.rank], dtype="uint8")
        with pytest.raises(MismatchError):
            result_of(group.start([other], blocking=True))
        named = Operation(collective=Collective.BARRIER, agreed="rank \u00e4"[:-group.rank or None], dtype="uint8")
        with pytest.raises(MismatchError, match="rank \u00e4 on rank 0"):
            result_of(group.start([named], blocking=True))

    play(groups(2, one_host=one_host), step)


def test_a_call_that_takes_too_long_names_who_has_not_come() -> None:
    arrived = threading.Event()

    def step(group: GroupEnd) -> Any:
        sums(group, 1.0)
        if group.rank == 1:
            assert arrived.wait(HANGS_SECONDS)
            return None
        call = group.start([barrier()], blocking=True, timeout=0.2)
        later = group.start([barrier()], blocking=True)
        arrived.set()
        assert call.error is later.error, "the group cannot be used any more"
        return call.error

    error, _ = play(groups(2), step)
    assert isinstance(error, OperationTimeoutError) and isinstance(error, TimeoutError) and error.ranks == (1,)
    assert "barrier() has not ended within its timeout of 0.2 s: rank 1 did not make this call" in str(error)
    assert "rank 1 last called call 1: all_reduce(SUM, float32[4])" in str(error)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_that_leaves_ends_the_waits_of_the_others_at_once(blocking: bool) -> None:
    def step(group: GroupEnd) -> None:
        sums(group, 1.0)
        if group.rank != 1:
            with pytest.raises(PeerLeftError, match=r"call 2: barrier\(\) needs rank 1, which left") as raised:
                result_of(group.start([barrier()], blocking=blocking))
            assert raised.value.rank == 1

    ends = groups(3)
    with mock.patch.object(waiter, "LOOK_SECONDS", HANGS_SECONDS):  # nobody finds it by chance
        play(ends, step)


@pytest.mark.parametrize("how", ["timeout", "interrupt", "close", "abort"])
def test_a_rank_that_gives_up_inside_a_call_ends_the_waits_of_the_others(how: str) -> None:
    """It has begun the call: so it is not missing, but will never complete it."""
    gone, over = threading.Event(), threading.Event()

    def step(group: GroupEnd) -> None:
        sums(group, 1.0)
        large = allreduce(np.zeros(40_000, np.int64))  # takes several barriers
        if group.rank == 1:
            assert gone.wait(HANGS_SECONDS)
            with pytest.raises(PeerLeftError, match=r"call 2: .* needs rank 0, which left .* in the middle") as raised:
                result_of(group.start([large], blocking=True))
            over.set()
            assert raised.value.rank == 0
            return
        interrupted = mock.Mock(side_effect=KeyboardInterrupt if how == "interrupt" else None)
        with mock.patch.object(group._waiter, "_impatient", interrupted):
            if how == "timeout":
                assert isinstance(group.start([large], blocking=True, timeout=0.1).error, OperationTimeoutError)
            elif how == "interrupt":
                with pytest.raises(KeyboardInterrupt):
                    group.start([large], blocking=True)
            else:
                call = group.start([large])
                while not interrupted.called:
                    time.sleep(0.001)
                group.close() if how == "close" else group.abort("the test wants it")
                assert call.wait(HANGS_SECONDS)
        gone.set()
        assert over.wait(HANGS_SECONDS)  # it closes the group later

    play(groups(2, timeout=5, patience=0.02), step)


def test_a_rank_that_gives_up_does_not_hide_who_has_not_come() -> None:
    given_up, over = threading.Event(), threading.Event()

    def step(group: GroupEnd) -> Any:
        if group.rank == 2:
            assert over.wait(HANGS_SECONDS)
            return None
        call = group.start([barrier()], blocking=True, timeout=[0.1, 0.5][group.rank])
        if group.rank == 0:
            given_up.set()
            assert over.wait(HANGS_SECONDS)
        else:
            assert given_up.is_set()
            over.set()
        return call.error

    for error in play(groups(3), step)[:2]:
        assert isinstance(error, OperationTimeoutError) and error.ranks == (2,)


def test_a_call_of_a_signal_handler_inside_a_call_is_refused() -> None:
    """The interrupted thread is the one that would have to carry it out."""
    refused = threading.Event()

    def step(group: GroupEnd) -> None:
        def handler() -> None:
            inner = group.start([barrier()], blocking=True)
            assert isinstance(inner.error, HorovodInternalError) and "signal handler" in str(inner.error)
            refused.set()

        if group.rank == 1:
            assert refused.wait(HANGS_SECONDS)
            result_of(group.start([barrier()], blocking=True))
        else:
            with mock.patch.object(group._waiter, "_impatient", handler):  # on the thread that waits, as a handler
                result_of(group.start([barrier()], blocking=True))
        assert sums(group, 1.0) == 2

    play(groups(2, patience=0.02), step)


@HOSTS
def test_a_callback_may_wait_for_a_call_that_is_queued(one_host: bool) -> None:
    def step(group: GroupEnd) -> list[float]:
        attached = threading.Event()
        values = [np.full(3, 10.0 ** number, np.float32) for number in range(4)]
        first = group.start([allreduce(values[0])], lambda: [attached.wait(HANGS_SECONDS)])  # type: ignore[arg-type,return-value]
        second = group.start([allreduce(values[1])])
        third = group.start([allreduce(values[2])])
        seen: list[float] = []

        def callback(call: Call) -> None:
            assert second.wait(HANGS_SECONDS) and not third.is_done
            seen.append(float(values[1][0]))
            result_of(group.start([allreduce(values[3])], blocking=True))

        first.when_done(callback)
        attached.set()
        result_of(third)
        return seen + [float(each[0]) for each in values]

    assert play(groups(2, one_host=one_host, timeout=5), step) == [[20, 2, 20, 200, 2000]] * 2


def test_the_worker_thread_keeps_no_tensors() -> None:
    def step(group: GroupEnd) -> None:
        values = np.ones(3, np.float32)
        kept = weakref.ref(values)
        result_of(group.start([allreduce(values)]))
        while group.is_waiting:
            time.sleep(0.001)
        del values
        gc.collect()
        assert kept() is None

    play(groups(2), step)


def test_each_ring_changes_the_word() -> None:
    memory = bytearray(area_bytes(2))
    seen = [0]
    for area in [GroupArea(memory, rank, 2, None) for rank in range(2)]:
        for _ in range(3):
            area.ring()
            seen.append(area.word.value)
    assert len(set(seen)) == 7


def test_what_all_have_begun_is_finished_although_a_rank_leaves() -> None:
    def step(group: GroupEnd) -> None:
        for number in range(50):
            values = np.full(20_000, number + group.rank, np.int64)
            result_of(group.start([allreduce(values)], blocking=True))
            assert (values == number * 2 + 1).all()

    for _ in range(5):
        play(groups(2), step)


def test_abort_ends_what_is_under_way_and_all_that_is_queued() -> None:
    ends = groups(2)
    calls = [ends[0].start([barrier()]) for _ in range(3)]
    ends[0].abort("the test wants it")
    for call in (*calls, ends[0].start([barrier()]), ends[0].start([barrier()], blocking=True)):
        assert call.wait(HANGS_SECONDS)
        assert isinstance(call.error, HorovodInternalError) and "aborted on this rank: the test wants it" in str(call.error)
    for end in ends:
        end.close()
        end.close()


def test_drain_lets_what_is_queued_be_done() -> None:
    came = threading.Event()

    def step(group: GroupEnd) -> None:
        values = [np.full(1000, group.rank + 1.0) for _ in range(3)]
        if group.rank == 0:
            assert came.wait(HANGS_SECONDS)
        calls = [group.start([allreduce(each)]) for each in values]
        calls[0].when_done(lambda call: group.drain(HANGS_SECONDS))  # nothing to wait for: it would wait for itself
        if group.rank == 1:
            group.drain(0.01)  # too short
            assert not calls[0].is_done
            came.set()
        group.drain(HANGS_SECONDS)
        group.close()
        assert all(call.is_done and call.error is None for call in calls) and all((each == 3).all() for each in values)

    play(groups(2), step)


def test_close_ends_the_thread_and_the_calls() -> None:
    ends = groups(2)
    ended: list[Call] = []
    waiting = threading.Thread(target=lambda: ended.append(ends[0].start([barrier()], blocking=True)))
    waiting.start()
    while not ends[0].is_waiting:
        pass
    queued = ends[0].start([barrier()])
    ends[0].close()
    ends[1].close()
    waiting.join(HANGS_SECONDS)
    for call in (*ended, queued):
        assert "destroyed on this rank" in str(call.error)
    assert len(ended) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvdlite-group-")]


def test_an_exception_of_finish_is_the_calls_alone() -> None:
    def step(group: GroupEnd) -> None:
        def finish() -> None:
            raise ZeroDivisionError("in finish")

        if group.rank == 0:
            call = group.start([barrier()], finish, blocking=True)
            assert isinstance(call.error, ZeroDivisionError)
        else:
            result_of(group.start([barrier()], blocking=True))
        assert sums(group, 1.0) == 2

    play(groups(2), step)


@pytest.mark.parametrize("blocking", [True, False])
def test_an_error_of_one_rank_is_told_to_the_others(blocking: bool) -> None:
    group, other = groups(2)
    with mock.patch.object(group._plane, "execute", side_effect=MemoryError("no memory for 7 bytes")):
        call = group.start([barrier()], blocking=blocking)
        assert call.wait(HANGS_SECONDS)
    reports = group._reporter
    assert isinstance(reports, Reports) and reports.failures == [call.error]
    assert isinstance(call.error, MemoryError) and group.start([barrier()]).error is call.error
    group.close()
    other.close()


def test_an_interrupt_in_a_blocking_call_aborts_the_group() -> None:
    over = threading.Event()

    def step(group: GroupEnd) -> None:
        if group.rank == 1:
            assert over.wait(HANGS_SECONDS)
            return
        with (mock.patch.object(group._waiter, "_impatient", mock.Mock(side_effect=KeyboardInterrupt)),
              pytest.raises(KeyboardInterrupt)):
            group.start([barrier()], blocking=True)
        assert "a thread was interrupted" in str(group.start([barrier()], blocking=True).error)
        over.set()

    play(groups(2, patience=0.05), step)


def test_callbacks_and_finish_come_before_the_call_is_over() -> None:
    def step(group: GroupEnd) -> None:
        events: list[str] = []
        call = group.start([barrier()], lambda: events.append("finish"))
        call.when_done(lambda call: events.append(f"done {call.error}"))
        result_of(call)
        call.when_done(lambda call: events.append("late"))
        while len(events) < 3:
            pass
        assert events[0] == "finish" and set(events) == {"finish", "done None", "late"}

    play(groups(2), step)


@HOSTS
def test_a_long_wait_is_told_and_all_ranks_request_the_barrier(one_host: bool) -> None:
    told = threading.Event()

    def step(group: GroupEnd) -> None:
        sums(group, 1.0)
        if group.rank == 2:
            assert told.wait(HANGS_SECONDS)
        sums(group, 1.0)

    class Watched(dict[str, set[int]]):
        def setdefault(self, key: str, default: set[int] | None = None) -> set[int]:  # type: ignore[override]
            told.set()
            return super().setdefault(key, set() if default is None else default)

    barriers = Watched()
    ends = groups(3, one_host=one_host, barriers=barriers, patience=0.3)
    play(ends, step)
    assert [end._told.owed for end in ends] == [0, 0, 0]
    assert dict(barriers) == {"group of tests, call 2: all_reduce(SUM, float32[4])": {0, 1, 2}}


def test_a_partner_that_stops_in_the_middle_is_suspected() -> None:
    gone_on = threading.Event()

    def step(group: GroupEnd) -> int:
        values = np.zeros(60_000, np.int64)
        if group.rank == 1:
            original = group._wait_until
            waits = itertools.count()

            def slow(predicate: Any, *, poll_interval: float = 0.0) -> None:
                original(predicate, poll_interval=poll_interval)
                if next(waits) == 0:
                    assert gone_on.wait(HANGS_SECONDS)

            group._wait_until = slow  # type: ignore[method-assign]
        else:
            reports = group._reporter
            assert isinstance(reports, Reports)
            suspect = reports.suspect
            reports.suspect = lambda: (suspect(), gone_on.set())  # type: ignore[func-returns-value,assignment,method-assign]
        result_of(group.start([allreduce(values)], blocking=True))
        reports = group._reporter
        assert isinstance(reports, Reports)
        return reports.suspected

    assert play(groups(2, patience=0.1), step)[0] >= 1


@pytest.mark.parametrize("blocking", [True, False])
def test_callbacks_may_make_calls_and_wait_for_them(blocking: bool) -> None:
    """As communication hooks of DDP do; on every rank they come right after the call, whatever else is queued by then."""
    def step(group: GroupEnd) -> list[float]:
        seen: list[float] = []

        def again(call: Call) -> None:
            values = np.full(3, float(group.rank), np.float32)
            inner = group.start([allreduce(values)], lambda: seen.append(2.0))
            result_of(inner)
            seen.append(sums(group, 1.0))

        def bad(call: Call) -> None:
            raise ZeroDivisionError("in a callback")

        for _ in range(5):
            outer = group.start([allreduce(np.ones(40_000, np.float32))], lambda: seen.append(1.0))
            outer.when_done(again)
            outer.when_done(bad)
            time.sleep(random.random() / 100)
            result_of(group.start([barrier()], blocking=blocking))
        while len(seen) < 15:
            pass
        return seen

    assert play(groups(2), step) == [[1.0, 2.0, 2.0] * 5] * 2


@pytest.mark.parametrize("blocking", [True, False])
def test_waits_of_the_script_count_in_its_progress(blocking: bool) -> None:
    """Once each; those of the worker thread do not."""
    def step(group: GroupEnd) -> list[str]:
        waiting, names = threading.Event(), []

        def block() -> float:
            names.append(threading.current_thread().name)
            waiting.set()
            return 7.0

        progress = mock.Mock(block=mock.Mock(side_effect=block))
        group._reporter.progress = progress  # type: ignore[misc]
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
    def step(group: GroupEnd) -> None:
        for number in range(20):
            assert sums(group, float(number), 20_000) == 3 * number

    with mock.patch.object(futex, "AVAILABLE", False):
        ends = groups(3, fenced=fenced)
        assert isinstance(ends[0]._area.word, PolledWord)
        play(ends, step)
