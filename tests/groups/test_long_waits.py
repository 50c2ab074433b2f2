"""What a rank tells of the calls in which it has waited for long: for whom it waits, and which threads are blocked."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hvdlite.core.errors import DeadlockError, HorovodInternalError
from hvdlite.groups.call import UNCOUNTED, Call
from hvdlite.groups.group_end import GroupEnd
from hvdlite.groups.long_waits import LongWaits
from hvdlite.groups.matching import ANY
from hvdlite.groups.transfer import Transfer
from hvdlite.negotiation.messages import GroupCalls
from hvdlite.runtime.group_reports import ReportedGroup
from tests.groups.worlds import HANGS_SECONDS, Reports, barrier, groups, play, result_of, sums

HOSTS = pytest.mark.parametrize("one_host", [True, False], ids=["one host", "several hosts"])


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + HANGS_SECONDS
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def told(end: GroupEnd) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    return [(wait.name, wait.sequence, tuple(wait.ranks), tuple(wait.missing)) for wait in end.long_waits()]


# docs/protocol.md#long-waits
@HOSTS
@pytest.mark.parametrize("blocking", [True, False])
def test_a_long_wait_is_told_with_those_who_have_not_come(blocking: bool, one_host: bool) -> None:
    ends = groups(3, one_host=one_host, patience=0.1)
    name = "group of tests, call 2: barrier()"

    def step(group: GroupEnd) -> None:
        sums(group, 1.0)
        if group.rank == 2:
            until(lambda: told(ends[0]) == told(ends[1]) == [(name, 2, (0, 1, 2), (2,))])
            assert told(group) == [] and group.blocked_threads() == frozenset()
            if not blocking:
                until(lambda: all(own <= (end.blocked_threads() or frozenset())
                                  for own, end in zip(owns, ends, strict=False)))
        else:
            owns[group.rank] = frozenset([threading.get_ident()])
        call = group.start([barrier()], blocking=blocking)
        result_of_waiting(call)
        sums(group, 1.0)

    owns: list[frozenset[int]] = [frozenset(), frozenset()]
    play(ends, step, closes=False)
    for end in ends:
        until(lambda end=end: not end.is_waiting)
        assert told(end) == [] and end.blocked_threads() == frozenset()
        reports: Any = end._reporter
        assert isinstance(reports, Reports) and reports.changes != 1, "the end of a long wait is told, too"
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

    def step(group: GroupEnd) -> None:
        if group.rank == 1:
            assert asked.wait(HANGS_SECONDS)  # else the callback may run at once
        call = group.start([barrier()])
        if group.rank == 0:
            call.when_done(stay)
            asked.set()
            assert entered.wait(HANGS_SECONDS)
            assert group.blocked_threads() is None
            leave.set()
        result_of(call)

    play(groups(2), step)


def test_a_group_is_not_idle_while_a_call_leaves_the_queue() -> None:
    seen = []

    class Watched(deque[Call]):
        def popleft(self) -> Call:
            call = super().popleft()
            seen.append(ends[0].blocked_threads())
            return call

    ends = groups(2)
    ends[0]._queue = Watched()
    play(ends, lambda group: result_of(group.start([barrier()])))
    assert seen == [None]


def test_a_thread_that_was_interrupted_is_not_blocked() -> None:
    first, second = groups(2, patience=0.05)
    call = first.start([barrier()])
    until(first.long_waits)
    with pytest.raises(KeyboardInterrupt):
        event = call._event = threading.Event()
        event.wait = lambda timeout=None: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[assignment,method-assign]
        call.wait()
    assert call.waiting == () and threading.get_ident() not in (first.blocked_threads() or ())
    for end in (first, second):
        end.close()


class Idle:
    """Stands for `Messages`; carries out nothing."""

    progress = UNCOUNTED

    def __init__(self, long_waits: LongWaits) -> None:
        self.long_waits, self.texts = long_waits, self

    def wait(self, call: Transfer, timeout: float | None) -> bool:
        return call.wait_idly(timeout)

    def described(self, call: Transfer) -> tuple[str, int, Sequence[int]]:
        return "a receive", 1, [0, 2]


def test_sends_and_receives_for_which_a_thread_waits() -> None:
    changes: list[int] = []
    waits = LongWaits(lambda: changes.append(len(waits.of_transfers("group"))), 0.02)
    idle: Any = Idle(waits)
    call = Transfer(idle, np.empty(3, np.uint8), ANY, 7, HANGS_SECONDS, is_send=False)
    assert not call.wait(0.01) and changes == [], "that was not long"
    waiting = threading.Thread(target=call.wait)
    waiting.start()
    until(lambda: changes)
    (wait,) = waits.of_transfers("group")
    assert wait[:4] == ("group: a receive", 0, (1, 0, 2), [0, 2]) and wait.seconds >= 0.02
    call.end()
    waiting.join(HANGS_SECONDS)
    assert changes == [1, 0]


def test_a_callback_of_a_receive_may_make_any_call() -> None:
    """So no circle through this rank is certain before it has returned. A receive without one changes nothing."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        assert leave.wait(HANGS_SECONDS)

    first, second = groups(2, messages=True)
    unasked, asked = (first.receive(np.empty(1, np.uint8), 1, tag) for tag in (8, 7))
    assert first.blocked_threads() == frozenset()
    first.when_over([asked], stay)
    assert first.blocked_threads() is None and second.blocked_threads() == frozenset()
    second.send(np.ones(1, np.uint8), 0, 7)
    assert entered.wait(HANGS_SECONDS) and asked.is_done and first.blocked_threads() is None
    leave.set()
    until(lambda: first.blocked_threads() == frozenset())
    assert not unasked.is_done
    for end in (first, second):
        end.close()


def test_a_report_has_the_ranks_of_the_job() -> None:
    first, second = groups(2, patience=0.02)
    group = ReportedGroup(first, "id", [7, 3])
    assert group.calls() == GroupCalls("id", 0)
    first.start([barrier()])
    until(lambda: group.calls().waits)
    (wait,) = group.calls().waits
    assert (wait.name, wait.sequence, wait.ranks, wait.missing) == ("group of tests, call 1: barrier()", 1, (7, 3), (3,))
    assert group.is_waiting and group.blocked_threads() == first.blocked_threads()
    for end in (first, second):
        end.close()


def test_a_rank_whose_runtime_has_failed_does_not_leave_its_groups() -> None:
    """Its script may go on before the runtime has let all of them fail."""
    first, second = groups(2)
    call = second.start([barrier()])
    ReportedGroup(first, "id", [0, 1], lambda: DeadlockError("a circle")).silence()
    first.close()
    assert not call.wait(0.1), "that the other rank has left is not the reason"
    ReportedGroup(second, "id", [0, 1]).fail(DeadlockError("a circle"))
    assert call.wait(HANGS_SECONDS) and isinstance(call.error, DeadlockError)
    second.close()


def test_a_group_beside_a_runtime_fails_with_it_but_does_not_end_with_it() -> None:
    failure: list[Exception | None] = [None]
    first, second = groups(2)
    group = ReportedGroup(first, "id", [0, 1], lambda: failure[0])
    group.fail(HorovodInternalError("it has ended as it should"))
    assert play([first, second], lambda end: sums(end, 1.0), closes=False) == [2, 2]
    failure[0] = DeadlockError("a circle")
    group.fail(failure[0])
    assert first.start([barrier()]).error is failure[0]
    for end in (first, second):
        end.close()
