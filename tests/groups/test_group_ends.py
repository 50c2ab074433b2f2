"""Calls of a group that do not end well, and the end of a group; ranks are threads."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hvdlite.core.errors import HorovodInternalError, OperationTimeoutError, PeerLeftError
from hvdlite.groups import execution as executions
from hvdlite.groups import group as group_module
from hvdlite.groups.call import Call
from hvdlite.groups.group import Group
from tests.groups.worlds import HANGS_SECONDS, HOSTS, Reports, allreduce, barrier, groups, play, result_of, sums


@HOSTS
def test_a_call_that_takes_too_long_names_who_has_not_come(one_host: bool) -> None:
    arrived = threading.Event()

    def step(group: Group) -> Any:
        sums(group, 1.0)
        if group.rank == 1:
            assert arrived.wait(HANGS_SECONDS)
            return None
        call = group.start([barrier()], blocking=True, timeout=0.2)
        later = group.start([barrier()], blocking=True)
        arrived.set()
        assert call.error is later.error, "the group cannot be used any more"
        return call.error

    error, _ = play(groups(2, one_host=one_host), step)
    assert isinstance(error, OperationTimeoutError) and isinstance(error, TimeoutError) and error.ranks == (1,)
    assert "barrier() has not ended within its timeout of 0.2 s: rank 1 did not make this call" in str(error)
    assert "rank 1 last called call 1: all_reduce(SUM, float32[4])" in str(error)


@HOSTS
@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_that_leaves_ends_the_waits_of_the_others_at_once(blocking: bool, one_host: bool) -> None:
    def step(group: Group) -> None:
        sums(group, 1.0)
        if group.rank != 1:
            with pytest.raises(PeerLeftError, match=r"call 2: barrier\(\) needs rank 1, which left") as raised:
                result_of(group.start([barrier()], blocking=blocking))
            assert raised.value.rank == 1

    ends = groups(3, one_host=one_host)
    with mock.patch.object(executions, "LOOK_SECONDS", HANGS_SECONDS):  # nobody finds it by chance
        play(ends, step)


@HOSTS
@pytest.mark.parametrize("how", ["timeout", "interrupt", "close", "abort"])
def test_a_rank_that_gives_up_inside_a_call_ends_the_waits_of_the_others(how: str, one_host: bool) -> None:
    """It has begun the call: so it is not missing, but will never complete it."""
    gone, over = threading.Event(), threading.Event()

    def step(group: Group) -> None:
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
        with mock.patch.object(group._execution, "_impatient", interrupted):
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

    play(groups(2, one_host=one_host, timeout=5, patience=0.02), step)


@HOSTS
def test_a_rank_that_gives_up_does_not_hide_who_has_not_come(one_host: bool) -> None:
    waits, over = threading.Event(), threading.Event()

    def step(group: Group) -> Any:
        if group.rank == 2:
            assert over.wait(HANGS_SECONDS)
        elif group.rank == 1:
            with mock.patch.object(group._execution, "_impatient", waits.set):
                call = group.start([barrier()], blocking=True, timeout=0.5)
            over.set()
            return call.error
        else:
            assert waits.wait(HANGS_SECONDS)
            call = group.start([barrier()], blocking=True, timeout=0.1)
            assert over.wait(HANGS_SECONDS)
            return call.error

    for error in play(groups(3, one_host=one_host, patience=0.02), step)[:2]:
        assert isinstance(error, OperationTimeoutError) and error.ranks == (2,)


def test_what_all_have_begun_is_finished_although_a_rank_leaves() -> None:
    def step(group: Group) -> None:
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

    def step(group: Group) -> None:
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
    while not ends[0].state.runner:
        pass
    queued = ends[0].start([barrier()])
    worker = ends[0]._worker
    assert worker is not None
    ends[0].close()
    ends[1].close()
    waiting.join(HANGS_SECONDS)
    for call in (*ended, queued):
        assert "destroyed on this rank" in str(call.error)
    worker.join(HANGS_SECONDS)
    assert not worker.is_alive() and len(ended) == 1


@pytest.mark.parametrize("blocking", [True, False])
def test_an_error_of_one_rank_is_told_to_the_others(blocking: bool) -> None:
    group, other = groups(2)
    with mock.patch.object(group._execution._plane, "execute", side_effect=MemoryError("no memory for 7 bytes")):
        call = group.start([barrier()], blocking=blocking)
        assert call.wait(HANGS_SECONDS)
    reports = group._reports
    assert isinstance(reports, Reports) and reports.failures == [call.error]
    assert isinstance(call.error, MemoryError) and group.start([barrier()]).error is call.error
    group.close()
    other.close()


def test_an_interrupt_in_a_blocking_call_aborts_the_group() -> None:
    over = threading.Event()

    def step(group: Group) -> None:
        if group.rank == 1:
            assert over.wait(HANGS_SECONDS)
            return
        with (mock.patch.object(group._execution, "_impatient", mock.Mock(side_effect=KeyboardInterrupt)),
              pytest.raises(KeyboardInterrupt)):
            group.start([barrier()], blocking=True)
        assert "a thread was interrupted" in str(group.start([barrier()], blocking=True).error)
        over.set()

    play(groups(2, patience=0.05), step)



def test_a_partner_that_stops_in_the_middle_is_suspected() -> None:
    gone_on = threading.Event()

    def step(group: Group) -> int:
        values = np.zeros(60_000, np.int64)
        if group.rank == 1:
            original = group._execution._wait_until
            waits = itertools.count()

            def slow(predicate: Any, *, poll_interval: float = 0.0) -> None:
                original(predicate, poll_interval=poll_interval)
                if next(waits) == 0:
                    assert gone_on.wait(HANGS_SECONDS)

            group._execution._wait_until = slow  # type: ignore[method-assign]
        else:
            reports = group._reports
            assert isinstance(reports, Reports)
            suspect = reports.suspect
            reports.suspect = lambda: (suspect(), gone_on.set())  # type: ignore[func-returns-value,assignment,method-assign]
        result_of(group.start([allreduce(values)], blocking=True))
        reports = group._reports
        assert isinstance(reports, Reports)
        return reports.suspected

    assert play(groups(2, patience=0.1), step)[0] >= 1


def test_a_thread_that_is_late_when_its_group_is_closed_gets_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine: its memory is gone by then."""
    monkeypatch.setattr(group_module, "JOIN_SECONDS", 0.0)
    ends, closed = groups(2), threading.Event()

    def perform(*_: object, **__: object) -> None:
        assert closed.wait(HANGS_SECONDS)
        raise HorovodInternalError("the call is given up")
    monkeypatch.setattr(ends[0]._execution, "perform", perform)
    ended: list[Call] = []
    late = threading.Thread(target=lambda: ended.append(ends[0].start([barrier()], blocking=True)))
    late.start()
    while not ends[0].state.runner:
        pass
    ends[0].close()
    ends[1].close()
    closed.set()
    late.join(HANGS_SECONDS)
    assert len(ended) == 1 and isinstance(ended[0].error, HorovodInternalError)
