"""Sends and receives between ranks as threads: on one host through real shared memory, between hosts, and both at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from hvdlite.core.array import Array
from hvdlite.core.errors import PeerLeftError
from hvdlite.groups.call import Call
from hvdlite.groups.messages import Messages
from hvdlite.memory import area as area_module
from hvdlite.memory.futex import PolledWord
from hvdlite.memory.rings import LINE, PIECES
from tests.groups.message_worlds import CARRIERS, RING, World, pending
from tests.groups.message_worlds import long_sleeps as long_sleeps
from tests.groups.message_worlds import ranks as ranks
from tests.groups.schedules import Schedule, done, driven, failure, received, text
from tests.worlds import HANGS_SECONDS


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("kind", ["futex", "no futex, fence"])
def test_random_schedules(ranks: Callable[..., World], seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "futex":
        monkeypatch.setattr(area_module, "shared_word", PolledWord)
    schedule = Schedule(seed, (0, 1, 64, 1000, RING // 32, 2 * RING, 3 * RING), (0, 1, 1000))
    world = ranks(hosts=schedule.hosts, fenced=kind != "futex")
    world.run(lambda rank, end: schedule.run(rank, end, world.ranks[rank].collective))


# docs/protocol.md#message-rings
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_that_all_send_first_do_not_wait_for_each_other(ranks: Callable[..., World], count: int) -> None:
    """Much more than a ring holds, in a circle."""
    def step(rank: int, end: Messages) -> None:
        for turn in range(3):
            done(end.send(text(rank, turn, size=10 * RING), (rank + 1) % count, turn))
        for turn in (2, 0, 1):
            values, source = received(end, 10 * RING, (rank - 1) % count, turn)
            assert (values == text(source, turn, size=10 * RING)).all()

    ranks(count).run(step)


def test_ranks_whose_sends_are_unfinished_take_messages_that_nobody_receives_yet(ranks: Callable[..., World]) -> None:
    """Although no thread waits."""
    world, one_ended = ranks(2), threading.Event()
    sends = [world.ends[rank].send(text(rank, size=10 * RING), 1 - rank, 0) for rank in range(2)]
    for send in sends:
        send.when_done(lambda call: one_ended.set())
    assert one_ended.wait(HANGS_SECONDS)
    for rank in range(2):  # whoever has finished first has nothing to do then
        assert (received(world.ends[rank], 10 * RING, 1 - rank)[0] == text(1 - rank, size=10 * RING)).all()
    for send in sends:
        done(send)


@pytest.mark.parametrize("hosts", [(4,), (2, 2), (1, 1, 1, 1)])
def test_a_batch_in_any_order_on_four_ranks(ranks: Callable[..., World], hosts: tuple[int, ...]) -> None:
    def step(rank: int, end: Messages) -> None:
        order, others = random.Random(rank), [other for other in range(4) if other != rank]
        for turn in range(20):
            plans = [(other, is_send) for other in others for is_send in (True, False)]
            order.shuffle(plans)
            size = (turn % 5) * 30_000
            buffers = {other: np.empty(size, np.uint8) for other in others}
            calls = [end.send(text(rank, other, turn, size=size), other, 0) if is_send else
                     end.receive(buffers[other], other, 0) for other, is_send in plans]
            order.shuffle(calls)
            for call in calls:
                done(call)
            assert all((buffers[other] == text(other, rank, turn, size=size)).all() for other in others)

    ranks(hosts=hosts).run(step)


def test_a_receive_from_any_rank_gets_the_first_message_of_both_carriers(ranks: Callable[..., World]) -> None:
    """Rank 1 is on the same host, ranks 2 and 3 are on another one."""
    world = ranks(hosts=(2, 2))
    receiver, (_, near, far, other) = world.ends[0], world.ends
    for source, end in ((2, far), (1, near), (3, other)):
        call = receiver.receive(values := np.empty(3 * RING, np.uint8), None, 1)
        sent = end.send(text(source, size=3 * RING), 0, 1)
        assert done(call).source == source and (values == text(source, size=3 * RING)).all()
        done(sent)
    early = [end.send(text(source), 0, 2) for source, end in ((1, near), (2, far), (3, other))]
    assert {received(receiver, 16, None, 2)[1] for _ in range(3)} == {1, 2, 3}
    for call in early:
        done(call)
    last = receiver.receive(np.empty(1, np.uint8), None, 1)
    for rank in (2, 1, 3):
        assert not last.is_done
        world.ranks[rank].close()
    assert "from any rank (tag 1, 1 bytes) needs ranks 1, 2, 3, which left" in failure(last)


def test_a_long_send_to_a_rank_that_does_not_receive_takes_the_memory_of_one_ring(ranks: Callable[..., World]) -> None:
    world = ranks(2)
    (host,), (first, second) = world.hosts, world.ends
    empty = host.allocated
    call = first.send(text(1, size=100 * RING), 1, 5)
    assert not call.is_done and not call.wait(0.0)
    assert host.allocated <= empty + RING
    assert pending(first) == [f"send from rank 0 to rank 1 (tag 5, {100 * RING} bytes)"]
    values, _ = received(second, 100 * RING, 0, 5)
    assert (values == text(1, size=100 * RING)).all()
    done(call)
    for _ in range(200):  # a ring has fewer bytes
        done(first.send(text(2, size=1000), 1, 5))
        assert (received(second, 1000, 0, 5)[0] == text(2, size=1000)).all()
    assert host.allocated <= empty + RING


# --- who carries calls out -----------------------------------------------------------------------------------------------


@CARRIERS
def test_calls_for_which_nobody_waits_are_carried_out(ranks: Callable[..., World], one_host: bool) -> None:
    """Both: a receive before its message comes, and a send for which there is no room yet. Not by the background thread."""
    world, ended, threads = ranks(2, one_host), threading.Event(), []

    def over(call: Call) -> None:
        threads.append(threading.current_thread())
        ended.set()

    values = np.empty(5 * RING, np.uint8)
    for _ in range(2):  # again, after the worker has found nothing to do
        ended.clear()
        receive = world.ends[1].receive(values, None, 3)
        receive.when_done(over)
        send = world.ends[0].send(text(7, size=5 * RING), 1, 3)
        assert ended.wait(HANGS_SECONDS)
        assert receive.error is None and receive.source == 0 and (values == text(7, size=5 * RING)).all()
        done(send)
    assert world.network.thread not in threads
    assert not any(pending(end) or end.next_deadline < np.inf or (one_host and end.is_active) for end in world.ends)


def test_a_worker_that_is_to_stop_does(ranks: Callable[..., World]) -> None:
    world = ranks(2)
    world.ranks[0].is_stopped, stops = True, threading.Event()
    end, area = world.ends[0], world.ranks[0].area
    end.receive(np.empty(1, np.uint8), 1, 0, timeout=1000.0)
    assert end.is_active and 0.0 < end.next_deadline - time.monotonic() <= 1000.0
    worker = threading.Thread(target=end.drive, args=(stops.is_set,), daemon=True)
    worker.start()
    stops.set()
    area.wake((area.index,))
    worker.join(HANGS_SECONDS)
    assert not worker.is_alive()


def test_a_thread_in_a_collective_takes_messages_out_of_full_rings(ranks: Callable[..., World]) -> None:
    world, meets = ranks(2), threading.Event()
    world.ranks[1].is_stopped = True  # the worker waits in the collective
    pending = world.ends[1].receive(np.empty(1, np.uint8), 0, 9)
    thread = threading.Thread(target=world.ranks[1].collective, args=(meets.is_set,), daemon=True)
    thread.start()
    done(world.ends[0].send(text(1, size=10 * RING), 1, 0))
    done(world.ends[0].send(text(1, size=1), 1, 9))
    meets.set()
    thread.join(HANGS_SECONDS)
    assert not thread.is_alive()
    done(pending)
    assert (received(world.ends[1], 10 * RING, 0)[0] == text(1, size=10 * RING)).all()


def test_a_thread_that_begins_to_wait_looks_at_full_rings(ranks: Callable[..., World]) -> None:
    """The worker has not, because no thread was blocked."""
    world = ranks(3)
    send = world.ends[0].send(text(1, size=5 * RING), 1, 0)
    call = driven(world, 1, 2)
    waiter = threading.Thread(target=call.wait, daemon=True)
    waiter.start()
    done(send)
    done(world.ends[2].send(text(1, size=1), 1, 100))
    done(call)
    waiter.join(HANGS_SECONDS)


@CARRIERS
def test_a_rank_that_leaves_wakes_those_that_wait_for_it(ranks: Callable[..., World], one_host: bool) -> None:
    world, ended = ranks(2, one_host), threading.Event()
    call = driven(world, 1, 0)
    call.when_done(lambda call: ended.set())
    world.ranks[0].close()
    assert ended.wait(HANGS_SECONDS) and isinstance(call.error, PeerLeftError)


@CARRIERS
def test_a_callback_may_communicate(ranks: Callable[..., World], one_host: bool) -> None:
    """On the worker, which then waits itself."""
    world, answers = ranks(2, one_host), [threading.Event(), threading.Event()]

    def answer(rank: int) -> Callable[[Call], None]:
        def act(call: Call) -> None:
            sent = world.ends[rank].send(text(rank, size=3 * RING), 1 - rank, 1)
            values, _ = received(world.ends[rank], 3 * RING, 1 - rank, 1)
            done(sent)
            assert (values == text(1 - rank, size=3 * RING)).all()
            answers[rank].set()
        return act

    for rank in range(2):
        world.ends[rank].receive(np.empty(1, np.uint8), 1 - rank, 0).when_done(answer(rank))
    for rank in range(2):
        world.ends[rank].send(text(0, size=1), 1 - rank, 0)
    assert all(each.wait(HANGS_SECONDS) for each in answers)


@CARRIERS
def test_several_threads_wait_for_calls_of_one_rank(ranks: Callable[..., World], one_host: bool) -> None:
    """One of them gives up, and the others do not need it."""
    world = ranks(2, one_host)
    results: dict[int, Array] = {}

    def wait(tag: int) -> None:
        results[tag] = received(world.ends[0], 5000, 1, tag)[0]

    given_up = world.ends[0].receive(np.empty(1, np.uint8), 1, 7)
    threads = [threading.Thread(target=wait, args=(tag,), daemon=True) for tag in range(6)]
    threads.append(threading.Thread(target=given_up.wait, args=(0.01,), daemon=True))
    for thread in threads:
        thread.start()
    threads[-1].join(HANGS_SECONDS)
    for tag in reversed(range(6)):
        done(world.ends[1].send(text(tag, size=5000), 0, tag))
    for thread in threads:
        thread.join(HANGS_SECONDS)
    assert all((results[tag] == text(tag, size=5000)).all() for tag in range(6)) and not given_up.is_done


def test_a_thread_whose_call_another_thread_finishes_is_woken(ranks: Callable[..., World], monkeypatch: pytest.MonkeyPatch,
                                                              ) -> None:
    """A receiver does not tell of every byte that it has read. So nobody has woken the sender when there is room."""
    world, sleeps = ranks(2), threading.Event()
    for rank in world.ranks:
        rank.is_stopped = True
    sender, receiver = world.ends
    word = type(world.ranks[0].area.word)
    wait = word.wait

    def tells(self: object, seen: int, seconds: float) -> None:
        sleeps.set()
        wait(self, seen, seconds)  # type: ignore[arg-type]

    pieces = RING // (RING // PIECES + LINE)
    call = sender.send(text(1, size=pieces * RING // PIECES + 1000), 1, 0)  # but for the last piece
    monkeypatch.setattr(word, "wait", tells)
    thread = threading.Thread(target=call.wait, daemon=True)
    thread.start()
    assert sleeps.wait(HANGS_SECONDS) and not call._is_over
    last = receiver.receive(np.empty(call.values.size, np.uint8), 0, 0)  # takes a piece
    after = sender.send(text(1), 1, 1)
    thread.join(HANGS_SECONDS)
    assert not thread.is_alive() and call.error is None
    done(after)
    done(last)


@CARRIERS
def test_a_thread_that_gives_up_leaves_its_call_to_the_worker(ranks: Callable[..., World], one_host: bool) -> None:
    world, ended = ranks(2, one_host), threading.Event()
    call = world.ends[1].receive(np.empty(16, np.uint8), 0, 0)
    call.when_done(lambda call: ended.set())
    assert not call.wait(0.05), "longer than the worker lingers"
    sent = world.ends[0].send(text(1), 1, 0)
    assert ended.wait(HANGS_SECONDS)
    done(sent)
