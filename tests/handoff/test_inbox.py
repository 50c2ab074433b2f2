"""The inbox by itself: when it wakes the background thread, which calls it refuses, and what it fails in the end."""

from __future__ import annotations

import re

import numpy as np
import pytest

from hvdlite.core.errors import DuplicateNameError, NotInitializedError, PeerLostError
from hvdlite.core.types import Collective
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.handoff import Handoff
from hvdlite.handoff.inbox import Task
from hvdlite.negotiation.messages import Request


class Rank:
    """What the threads of rank 0 of 2 share; `woken` counts the wake-ups of a background thread that does not exist."""

    def __init__(self, *, spins: bool = False, is_elastic: bool = False) -> None:
        self.woken = 0
        handoff = Handoff.create(0, 2, self._wake, spins=spins, is_elastic=is_elastic)
        self.inbox, self.waiters, self.state = handoff.inbox, handoff.waiters, handoff.state

    def _wake(self) -> None:
        self.woken += 1

    def entry(self, name: str) -> Entry:
        array = np.ones(1, np.float32)
        request = Request(name, Collective.BROADCAST, "float32", (1,), root_rank=0)
        return Entry(request, [array], [array], array, self.waiters)


def test_the_background_thread_is_woken_only_when_it_sleeps_and_has_to_begin() -> None:
    rank = Rank()
    rank.inbox.enqueue(rank.entry("a"))
    assert rank.woken == 0, "an awake thread looks into the inbox before it sleeps"
    rank.inbox.awake = False
    rank.inbox.enqueue(rank.entry("b"), at_once=False)
    assert rank.woken == 0, "b may travel with the next call"
    rank.inbox.hurry()
    assert rank.woken == 1, "a thread is about to wait for it"
    rank.inbox.items.clear()
    rank.inbox.hurry()
    assert rank.woken == 1
    rank.inbox.post(Task(lambda: None))
    assert rank.woken == 2 and len(rank.inbox.items) == 1


def test_a_name_is_in_use_until_it_is_released() -> None:
    rank = Rank()
    entry = rank.entry("x")
    rank.inbox.enqueue(entry)
    with pytest.raises(DuplicateNameError, match="'x' is still being processed on rank 0"):
        rank.inbox.enqueue(rank.entry("x"))
    rank.inbox.release(entry.key)
    rank.inbox.enqueue(rank.entry("x"))


def test_after_the_end_calls_are_refused_and_what_came_too_late_fails() -> None:
    rank = Rank()
    error = PeerLostError("rank 1 was lost", 1)
    late, abandoned = rank.entry("late"), []
    rank.inbox.check_usable("x")
    rank.state.ended.set()  # the background thread ends between a caller's check and its append
    rank.inbox.put(late)
    with pytest.raises(Exception, match="shut down on this rank before the collective was complete"):
        late.handle.wait()
    rank.state.failure = error
    rank.inbox.put(Task(lambda: pytest.fail("no thread runs it"), abandoned.append))
    rank.inbox.post(Task(lambda: pytest.fail("no thread runs it"), abandoned.append))
    assert abandoned == [error] and not rank.inbox.items, "a post after the end is dropped"
    with pytest.raises(PeerLostError):
        rank.inbox.enqueue(rank.entry("x"))
    rank.state.failure, rank.inbox.closed = None, True
    with pytest.raises(NotInitializedError, match="has been shut down"):
        rank.inbox.enqueue(rank.entry("x"))


@pytest.mark.parametrize("is_elastic", [True, False])
def test_a_script_that_goes_on_calling_in_an_ended_world_is_warned_and_then_stopped(
        is_elastic: bool, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(is_elastic=is_elastic)
    rank.state.failure = PeerLostError("rank 1 was lost", 1)
    raised: list[BaseException] = []
    for _ in range(11):
        try:
            rank.inbox.check_usable("x")
        except BaseException as error:
            raised.append(error)
        assert len(caplog.records) == (is_elastic and len(raised) >= 3)
    assert raised[:9] == [rank.state.failure] * 9
    assert [isinstance(error, Exception) for error in raised[9:]] == [not is_elastic] * 2
    if is_elastic:
        assert re.search(r"the first in test_a_script_\w+\(\), test_inbox.py:\d+: ", caplog.text), caplog.text
        assert str(raised[9]).startswith("rank 1 was lost\nThe script has caught this error 9 times, first in test_a_script")
