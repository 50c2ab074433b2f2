"""Callbacks of calls: what they may do, and where their own calls stand in the order; ranks are threads."""

from __future__ import annotations

import random
import threading
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.core.errors import HorovodInternalError
from hvdlite.groups.call import Call
from hvdlite.groups.group import Group
from tests.groups.worlds import HANGS_SECONDS, HOSTS, allreduce, barrier, groups, play, result_of, sums


def test_callbacks_and_finish_come_before_the_call_is_over() -> None:
    def step(group: Group) -> None:
        events: list[str] = []
        call = group.start([barrier()], lambda: events.append("finish"))
        call.when_done(lambda call: events.append(f"done {call.error}"))
        result_of(call)
        call.when_done(lambda call: events.append("late"))
        while len(events) < 3:
            pass
        assert events[0] == "finish" and set(events) == {"finish", "done None", "late"}

    play(groups(2), step)


def test_an_exception_of_finish_is_the_calls_alone() -> None:
    def step(group: Group) -> None:
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
def test_callbacks_may_make_calls_and_wait_for_them(blocking: bool) -> None:
    """As communication hooks of DDP do; on every rank they come right after the call, whatever else is queued by then."""
    def step(group: Group) -> list[float]:
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


@HOSTS
def test_a_callback_may_wait_for_a_call_that_is_queued(one_host: bool) -> None:
    def step(group: Group) -> list[float]:
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

    assert play(groups(2, one_host=one_host, timeout=HANGS_SECONDS), step) == [[20, 2, 20, 200, 2000]] * 2


def test_a_call_of_a_signal_handler_inside_a_call_is_refused() -> None:
    """The interrupted thread is the one that would have to carry it out."""
    refused = threading.Event()

    def step(group: Group) -> None:
        def handler() -> None:
            inner = group.start([barrier()], blocking=True)
            assert isinstance(inner.error, HorovodInternalError) and "signal handler" in str(inner.error)
            refused.set()

        if group.rank == 1:
            assert refused.wait(HANGS_SECONDS)
            result_of(group.start([barrier()], blocking=True))
        else:
            with mock.patch.object(group._execution, "_impatient", handler):  # on the thread that waits, as a handler
                result_of(group.start([barrier()], blocking=True))
        assert sums(group, 1.0) == 2

    play(groups(2, patience=0.02), step)


@HOSTS
def test_a_callback_has_its_place_although_its_call_is_over_on_some_ranks_only(one_host: bool) -> None:
    """All calls look alike: in another order they would give wrong sums, and no error."""
    asked = threading.Event()

    def step(group: Group) -> list[float]:
        values = [np.full(4, 10.0 ** number, np.float32) for number in range(3)]
        inner: list[float] = []
        first = group.start([allreduce(values[0])], lambda: [asked.wait(HANGS_SECONDS)] if group.rank else None)  # type: ignore[arg-type,return-value]
        second = group.start([allreduce(values[1])])
        if group.rank == 0:
            result_of(first)
        assert first.is_done == (group.rank == 0) and (not second.is_done or group.rank == 0)
        group.when_over([first], lambda: inner.append(sums(group, 7.0)))
        last = group.start([allreduce(values[2])])
        if group.rank == 1:
            asked.set()
        result_of(last)
        return [float(each[0]) for each in values] + inner

    assert play(groups(2, one_host=one_host, timeout=HANGS_SECONDS), step) == [[2.0, 20.0, 200.0, 14.0]] * 2


@HOSTS
def test_callbacks_of_several_calls_come_in_the_order_of_asking(one_host: bool) -> None:
    """Whether the first of the calls is over when a rank asks makes no difference."""
    asked = [threading.Event() for _ in range(2)]

    def step(group: Group) -> list[float]:
        inner: list[float] = []
        first = group.start([barrier()], lambda: [asked[1].wait(HANGS_SECONDS)] if group.rank else None)  # type: ignore[arg-type,return-value]
        second = group.start([barrier()], lambda: [asked[group.rank].wait(HANGS_SECONDS)])  # type: ignore[arg-type,return-value]
        if group.rank == 0:
            result_of(first)
        group.when_over([first, second], lambda: inner.append(sums(group, 7.0)))
        group.when_over([second], lambda: inner.append(sums(group, 70.0)))
        assert first.is_done == (group.rank == 0) and not second.is_done
        asked[group.rank].set()
        assert sums(group, 700.0) == 1400
        return inner

    assert play(groups(2, one_host=one_host, timeout=HANGS_SECONDS), step) == [[14.0, 140.0]] * 2


class Program:
    """One rank's part of a random program: calls, and callbacks that make calls; equal on all ranks but for its delays.

    Each call sums another number, so that calls which meet others have wrong sums.
    """

    def __init__(self, group: Group, seed: int) -> None:
        self.group, self.seed = group, seed
        self.delays = random.Random(f"{seed} {group.rank}")
        self.begun: dict[str, tuple[Call, np.ndarray]] = {}
        self.awaited = 0  # callbacks that have not returned
        self.lock = threading.Lock()

    def run(self) -> None:
        self.steps("", 12)
        until = time.monotonic() + HANGS_SECONDS
        while self.awaited:
            assert time.monotonic() < until, f"{self.awaited} callbacks are missing"
            time.sleep(0.001)
        for name, (call, values) in self.begun.items():
            result_of(call)
            assert (values == 3 * self.number(name)).all(), name

    def number(self, name: str) -> int:
        return random.Random(f"{self.seed} {name}").randrange(1, 1 << 20)

    def steps(self, of: str, count: int) -> None:
        """Make calls, and ask for callbacks of those that this part has made."""
        choice, mine = random.Random(f"{self.seed} steps {of}"), []
        for index in range(count):
            name = f"{of}/{index}"
            if mine and choice.random() < 0.5:
                asked = [self.begun[each][0] for each in choice.sample(mine, min(len(mine), choice.choice([1, 1, 2])))]
                with self.lock:
                    self.awaited += 1
                self.group.when_over(asked, lambda name=name: self.callback(name))  # type: ignore[misc]
            else:
                values = np.full(3, self.number(name) * (self.group.rank + 1), np.int64)
                self.pause()
                call = self.group.start([allreduce(values)], self.pause, blocking=choice.random() < 0.2)
                self.begun[name] = call, values
                mine.append(name)
            self.pause()

    def callback(self, name: str) -> None:
        try:
            self.steps(name, 3 if name.count("/") < 3 else 0)
        finally:
            with self.lock:
                self.awaited -= 1

    def pause(self) -> None:
        if self.delays.random() < 0.3:
            time.sleep(self.delays.random() / 500)


@HOSTS
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_calls_of_callbacks_have_the_same_order_on_all_ranks(one_host: bool, seed: int) -> None:
    def step(group: Group) -> list[str]:
        program = Program(group, seed)
        program.run()
        return sorted(program.begun)

    one, other = play(groups(2, one_host=one_host, timeout=HANGS_SECONDS), step)
    assert one == other


@pytest.mark.parametrize("how", ["abort", "close"])
def test_a_callback_is_called_although_the_group_ends_before_its_place(how: str) -> None:
    group, other = groups(2)
    first, second = (group.start([barrier()]) for _ in range(2))
    seen: list[tuple[bool, bool]] = []
    group.when_over([first], lambda: seen.append((first.is_done, second.is_done)))
    group.when_over([second], lambda: group.when_over([first], lambda: seen.append((True, True))))
    assert not seen
    group.abort("the test wants it") if how == "abort" else group.close()
    assert first.wait(HANGS_SECONDS) and isinstance(first.error, HorovodInternalError)
    while len(seen) < 2:
        time.sleep(0.001)
    assert seen == [(True, True)] * 2
    group.when_over([first, second], lambda: seen.append((True, True)))
    assert len(seen) == 3
    group.close()
    other.close()


def test_a_callback_of_messages_waits_for_no_collective() -> None:
    """They have no place in the order."""
    def step(group: Group) -> None:
        received, over = np.empty(1, np.uint8), threading.Event()
        call = group.receive(received, 1, 0) if group.rank == 0 else group.send(np.ones(1, np.uint8), 0, 0)
        queued = [group.start([barrier()]) for _ in range(2)] if group.rank == 0 else []
        group.when_over([call], over.set)
        assert over.wait(HANGS_SECONDS) and not any(each.is_done for each in queued)
        if group.rank == 1:
            assert messages_done.wait(HANGS_SECONDS)
            queued = [group.start([barrier()]) for _ in range(2)]
        else:
            messages_done.set()
        for each in queued:
            result_of(each)

    messages_done = threading.Event()
    play(groups(2, messages=True), step)
