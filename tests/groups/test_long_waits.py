"""What a rank tells of the calls in which it has waited for long: for whom it waits, and which threads are blocked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from hvdlite.core.errors import DeadlockError
from hvdlite.groups.call import Call
from hvdlite.groups.group import Group
from hvdlite.handoff.job_state import JobState
from hvdlite.negotiation.messages import GroupCalls
from tests.groups.worlds import HANGS_SECONDS, barrier, groups, play, reports_of, result_of, sums

HOSTS = pytest.mark.parametrize("one_host", [True, False], ids=["one host", "several hosts"])


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + HANGS_SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def told(end: Group) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    return [(wait.name, wait.sequence, wait.ranks, wait.missing) for wait in end.state.calls().waits]


# docs/protocol.md#long-waits
@HOSTS
@pytest.mark.parametrize("blocking", [True, False])
def test_a_long_wait_is_told_with_those_who_have_not_come(blocking: bool, one_host: bool) -> None:
    ends = groups(3, one_host=one_host, patience=0.1)
    name = "group of tests, call 2: barrier()"

    def step(group: Group) -> None:
        sums(group, 1.0)
        if group.rank == 2:
            until(lambda: told(ends[0]) == told(ends[1]) == [(name, 2, (0, 1, 2), (2,))])
            assert told(group) == [] and group.state.blocked_threads() == frozenset()
            if not blocking:
                until(lambda: all(own <= (end.state.blocked_threads() or frozenset())
                                  for own, end in zip(owns, ends, strict=False)))
        else:
            owns[group.rank] = frozenset([threading.get_ident()])
        call = group.start([barrier()], blocking=blocking)
        result_of_waiting(call)
        sums(group, 1.0)

    owns: list[frozenset[int]] = [frozenset(), frozenset()]
    play(ends, step, closes=False)
    for end in ends:
        until(lambda end=end: not end.state.runner)
        assert told(end) == [] and end.state.blocked_threads() == frozenset()
        assert reports_of(end).changes != 1, "the end of a long wait is told, too"
        end.close()


def result_of_waiting(call: Call) -> None:
    call.wait()
    assert call.error is None


def test_who_carries_out_other_calls_is_not_blocked() -> None:
    """A callback may take any time; so may the rest of a call that all ranks have begun."""
    asked, entered, leave = threading.Event(), threading.Event(), threading.Event()

    def stay(call: Call) -> None:
        entered.set()
        assert leave.wait(HANGS_SECONDS)

    def step(group: Group) -> None:
        if group.rank == 1:
            assert asked.wait(HANGS_SECONDS)  # else the callback may run at once
        call = group.start([barrier()])
        if group.rank == 0:
            call.when_done(stay)
            asked.set()
            assert entered.wait(HANGS_SECONDS)
            assert group.state.blocked_threads() is None
            leave.set()
        result_of(call)

    play(groups(2), step)


def test_a_group_is_not_idle_while_a_call_leaves_the_queue() -> None:
    seen = []

    class Watched(deque[Call]):
        def popleft(self) -> Call:
            call = super().popleft()
            seen.append(ends[0].state.blocked_threads())
            return call

    ends = groups(2)
    ends[0]._queue = Watched()
    ends[0].state.queue = ends[0]._queue  # type: ignore[assignment]
    play(ends, lambda group: result_of(group.start([barrier()])))
    assert seen == [None]


def test_a_thread_that_was_interrupted_is_not_blocked() -> None:
    first, second = groups(2, patience=0.05)
    call = first.start([barrier()])
    until(lambda: first.state.collective)
    with pytest.raises(KeyboardInterrupt):
        event = call._event = threading.Event()
        event.wait = lambda timeout=None: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[assignment,method-assign]
        call.wait()
    assert not first.state.waiting and threading.get_ident() not in (first.state.blocked_threads() or ())
    for end in (first, second):
        end.close()


def test_sends_and_receives_for_which_a_thread_waits() -> None:
    first, second = groups(2, messages=True, patience=0.02)
    changes = reports_of(first)
    call = first.receive(np.empty(3, np.uint8), None, 7)
    assert not call.wait(0.01) and not changes.changes, "that was not long"
    waiting = threading.Thread(target=call.wait)
    waiting.start()
    until(lambda: changes.changes)
    (wait,) = first.state.calls().waits
    assert (wait.sequence, wait.ranks, wait.missing) == (0, (0, 1), (1,)) and wait.seconds >= 0.02
    assert wait.name == "group of tests: message from rank 1 to rank 0 (tag 7, 3 bytes)"
    second.send(np.ones(3, np.uint8), 0, 7)
    waiting.join(HANGS_SECONDS)
    assert changes.changes == 2 and not first.state.calls().waits
    for end in (first, second):
        end.close()


def test_a_callback_of_a_receive_may_make_any_call() -> None:
    """So no circle through this rank is certain before it has returned. A receive without one changes nothing."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        assert leave.wait(HANGS_SECONDS)

    first, second = groups(2, messages=True)
    unasked, asked = (first.receive(np.empty(1, np.uint8), 1, tag) for tag in (8, 7))
    assert first.state.blocked_threads() == frozenset()
    first.when_over([asked], stay)
    assert first.state.blocked_threads() is None and second.state.blocked_threads() == frozenset()
    second.send(np.ones(1, np.uint8), 0, 7)
    assert entered.wait(HANGS_SECONDS) and asked.is_done and first.state.blocked_threads() is None
    leave.set()
    until(lambda: first.state.blocked_threads() == frozenset())
    assert not unasked.is_done
    for end in (first, second):
        end.close()


def test_a_report_has_the_ranks_of_the_job() -> None:
    first, second = groups(2, patience=0.02)
    first.state.ranks = (7, 3)
    assert first.state.calls() == GroupCalls("id", 0)
    first.start([barrier()])
    until(lambda: first.state.calls().waits)
    (wait,) = first.state.calls().waits
    assert (wait.name, wait.sequence, wait.ranks, wait.missing) == ("group of tests, call 1: barrier()", 1, (7, 3), (3,))
    for end in (first, second):
        end.close()


def test_a_rank_whose_runtime_has_failed_does_not_leave_its_groups() -> None:
    """Its script may go on before the runtime has let all of them fail."""
    first, second = groups(2)
    call = second.start([barrier()])
    first.state.has_runtime = False
    first.close()
    assert not call.wait(0.1), "that the other rank has left is not the reason"
    job = JobState(2)
    job.groups.append(second.state)
    job.fail_groups(DeadlockError("a circle"))
    assert call.wait(HANGS_SECONDS) and isinstance(call.error, DeadlockError)
    second.close()


def test_a_runtime_that_ends_fails_calls_on_threads_of_the_group() -> None:
    """The background thread must not run what a script asked for, nor wait for a lock that the script has."""
    first, second = groups(2, messages=True)
    calls = [first.start([barrier()]), first.start([barrier()]), first.receive(np.empty(1, np.uint8), 1, 0)]
    threads: list[str] = []
    for call in calls:
        call.when_done(lambda _: threads.append(threading.current_thread().name))
    job = JobState(2)
    job.groups.append(first.state)
    with first._lock:
        job.fail_groups(DeadlockError("a circle"))
    for call in calls:
        assert call.wait(HANGS_SECONDS) and isinstance(call.error, DeadlockError)
    assert set(threads) <= {"hvdlite-group-group of tests", "MainThread"} and len(threads) == 3
    for end in (first, second):
        end.close()
