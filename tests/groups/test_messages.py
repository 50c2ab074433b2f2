"""Sends and receives between ranks as threads: on one host through real shared memory, between hosts, and both at once."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hvdlite.core.array import Array
from hvdlite.core.errors import ForkedProcessError, HorovodInternalError, OperationTimeoutError, PeerLeftError, PeerLostError
from hvdlite.groups import messages as module
from hvdlite.groups.call import Call
from hvdlite.groups.messages import Messages
from hvdlite.memory import area as area_module
from hvdlite.memory.futex import PolledWord
from hvdlite.memory.rings import LINE, PIECES
from tests.groups.message_worlds import RING, World, pending
from tests.groups.schedules import Schedule, done, failure, received, text
from tests.worlds import HANGS_SECONDS, descriptors

CARRIERS = pytest.mark.parametrize("one_host", [True, False], ids=["rings", "remote"])


@pytest.fixture
def ranks() -> Iterator[Callable[..., World]]:
    """Makes a world of so many ranks, on one host or on one each, or on the `hosts`."""
    made: list[World] = []

    def make(count: int = 0, one_host: bool = True, *, hosts: tuple[int, ...] = (), fenced: bool = False) -> World:
        made.append(World(hosts or ((count,) if one_host else (1,) * count), fenced=fenced))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdlite-worker"]


@pytest.fixture(autouse=True)
def long_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is not woken sleeps on."""
    monkeypatch.setattr(module, "SLEEP_SECONDS", 10 * HANGS_SECONDS)


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


def driven(world: World, rank: int, source: int) -> Call:
    """Return a receive of tag 100 that the worker of `rank` carries out: it has just carried out another one."""
    ended = threading.Event()
    world.ends[rank].receive(np.empty(1, np.uint8), source, 99).when_done(lambda call: ended.set())
    call = world.ends[rank].receive(np.empty(1, np.uint8), source, 100)
    done(world.ends[source].send(text(1, size=1), rank, 99))
    assert ended.wait(HANGS_SECONDS)
    return call


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


# --- mistakes, and what takes too long -----------------------------------------------------------------------------------


@CARRIERS
@pytest.mark.parametrize("sent", [0, 15, 17, 5 * RING])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_other_lengths_are_an_error_with_both_numbers(ranks: Callable[..., World], sent: int, first: str, one_host: bool,
                                                      ) -> None:
    """The next receive gets the next message."""
    sender, receiver = ranks(2, one_host).ends
    if first == "receive":
        receive = receiver.receive(np.empty(16, np.uint8), 0, 4)
    begun = sender.send(text(1, size=sent), 1, 4)
    if first == "send":
        receive = receiver.receive(np.empty(16, np.uint8), 0, 4)
    assert failure(receive) == (
        f"MismatchError: group dp: the receive on rank 1 from rank 0 (tag 4, 16 bytes) gets a message of {sent} bytes from "
        "rank 0: the tensors sent and received must have the same number of bytes")
    following = sender.send(text(2), 1, 4)
    assert (received(receiver, 16, 0, 4)[0] == text(2)).all()
    done(begun)
    done(following)


@CARRIERS
def test_bad_ranks_are_value_errors(ranks: Callable[..., World], one_host: bool) -> None:
    end = ranks(2, one_host).ends[1]
    for rank in (1, 2, -1):
        with pytest.raises(ValueError, match=f"rank 1 of group dp cannot send to rank {rank}"):
            end.send(text(1), rank, 0)
        with pytest.raises(ValueError, match=f"cannot receive from rank {rank}: the group has ranks 0 to 1"):
            end.receive(text(1), rank, 0)


@CARRIERS
def test_a_receive_times_out_and_the_group_goes_on(ranks: Callable[..., World], one_host: bool) -> None:
    sender, receiver = ranks(2, one_host).ends
    early, patient = sender.send(text(1, size=7), 1, 8), receiver.receive(np.empty(1, np.uint8), 0, 7, timeout=1000.0)
    late = receiver.receive(np.empty(16, np.uint8), 0, 9, timeout=0.05)
    assert failure(late) == (
        "OperationTimeoutError: group dp: the receive on rank 1 from rank 0 (tag 9, 16 bytes) has not ended within the "
        "timeout of 0.05 s: no such message has come, but others that nobody receives: 7 bytes from rank 0 with tag 8")
    assert isinstance(late.error, OperationTimeoutError) and late.error.ranks == (0,)
    assert failure(receiver.receive(np.empty(16, np.uint8), None, 9, timeout=0.0)).startswith("OperationTimeoutError")
    second = sender.send(text(3), 1, 9)
    assert (received(receiver, 16, 0, 9)[0] == text(3)).all()
    assert (received(receiver, 7, 0, 8)[0] == text(1, size=7)).all()
    done(early)
    done(second)
    assert not patient.is_done


@CARRIERS
def test_a_call_that_fails_early_is_seen_by_a_worker_that_sleeps(ranks: Callable[..., World], one_host: bool) -> None:
    world, ended = ranks(2, one_host), threading.Event()
    driven(world, 1, 0)
    world.ends[1].receive(np.empty(1, np.uint8), 0, 5, timeout=0.01).when_done(lambda call: ended.set())
    assert ended.wait(HANGS_SECONDS)


def test_a_receive_that_times_out_in_the_middle_of_a_message(ranks: Callable[..., World]) -> None:
    """The rest of the message is taken out of the ring by later calls."""
    world = ranks(2)
    sender, receiver = world.ends
    world.ranks[0].is_stopped = True
    begun = sender.send(text(1, size=3 * RING), 1, 0)
    values = np.zeros(3 * RING, np.uint8)
    late = receiver.receive(values, None, 0, timeout=0.05)
    assert failure(late).startswith("OperationTimeoutError")
    values[...] = 0xCC

    def receive() -> None:
        assert (received(receiver, 16, 0, 0)[0] == text(2)).all()

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    done(begun)
    done(sender.send(text(2), 1, 0))
    thread.join(HANGS_SECONDS)
    assert not thread.is_alive() and (values == 0xCC).all()


@CARRIERS
def test_a_send_that_times_out_when_it_is_on_its_way_ends_the_group_on_this_rank(ranks: Callable[..., World], one_host: bool,
                                                                                 ) -> None:
    """Otherwise the receiver would take the next message for the rest of this one."""
    world = ranks(2, one_host)
    sender, receiver = world.ends
    late, other = sender.send(text(1, size=3 * RING), 1, 2, timeout=0.05), sender.receive(np.empty(3, np.uint8), 1, 0)
    message = failure(late)
    assert "(tag 2, 196608 bytes) has not ended within the timeout of 0.05 s: rank 1 does not receive it" in message
    assert isinstance(late.error, OperationTimeoutError) and late.error.ranks == (1,)
    assert failure(other) == failure(sender.send(text(1), 1, 2)) == message
    if one_host:
        receive = receiver.receive(np.empty(3 * RING, np.uint8), 0, 2)
        world.ranks[0].close()
        assert failure(receive).startswith("PeerLeftError")


# --- ranks that leave ----------------------------------------------------------------------------------------------------


@CARRIERS
def test_a_rank_that_leaves_ends_the_calls_that_need_it(ranks: Callable[..., World], one_host: bool) -> None:
    world = ranks(3, one_host)
    _, second, third = world.ends
    blocked, sent = second.receive(np.empty(9, np.uint8), 0, 5), second.send(text(0, size=5 * RING), 0, 6)
    anyone = second.receive(np.empty(16, np.uint8), None, 7)
    world.ranks[0].close()
    assert failure(blocked) == (
        "PeerLeftError: group dp: the receive on rank 1 from rank 0 (tag 5, 9 bytes) needs rank 0, which left the group "
        "(its process ended, or destroyed the group)")
    assert "the send from rank 1 to rank 0 (tag 6, 327680 bytes) needs rank 0, which left" in failure(sent)
    assert "the send from rank 1 to rank 0 (tag 0, 16 bytes) needs rank 0, which left" in failure(second.send(text(0), 0, 0))
    done(third.send(text(4), 1, 7))
    assert done(anyone).source == 2
    last = second.receive(np.empty(2, np.uint8), None, 1)
    world.ranks[2].close()
    assert "the receive on rank 1 from any rank (tag 1, 2 bytes) needs ranks 0, 2, which left" in failure(last)


@CARRIERS
def test_what_a_rank_has_sent_before_it_left_can_be_received(ranks: Callable[..., World], one_host: bool) -> None:
    """It has waited until all was in the ring, or taken by the receiver, which has made no call yet."""
    world = ranks(2, one_host)
    first, second = world.ends
    sends = [first.send(text(tag, size=5000), 1, tag) for tag in (1, 2, 3)]
    first.flush(time.monotonic() + HANGS_SECONDS)
    assert all(call.is_done and call.error is None for call in sends)
    world.ranks[0].close()
    assert "needs rank 0, which left the group" in failure(second.receive(np.empty(9, np.uint8), 0, 5))
    assert (received(second, 5000, 0, 2)[0] == text(2, size=5000)).all()
    assert (received(second, 5000, None, 1)[0] == text(1, size=5000)).all()
    assert "gets a message of 5000 bytes" in failure(second.receive(np.empty(1, np.uint8), 0, 3))
    assert "needs rank 0, which left the group" in failure(second.receive(np.empty(1, np.uint8), 0, 1))


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_message_that_comes_just_before_its_sender_leaves(ranks: Callable[..., World], monkeypatch: pytest.MonkeyPatch,
                                                            earlier: int) -> None:
    """After the receiver has looked at the ring, and before it looks whether the sender has left."""
    world = ranks(2)
    sender, receiver = world.ends
    for _ in range(earlier):
        done(sender.send(text(0), 1, 0))
        received(receiver, 16, 0)
    call = receiver.receive(values := np.empty(16, np.uint8), 0, 0)
    area = world.ranks[1].area
    has_left = area.has_left

    def leave_first(rank: int) -> bool:
        monkeypatch.undo()
        done(sender.send(text(1), 1, 0))
        world.ranks[0].close()
        return has_left(rank)

    monkeypatch.setattr(area, "has_left", leave_first)
    done(call)
    assert (values == text(1)).all()


@CARRIERS
def test_a_failed_group_ends_every_call(ranks: Callable[..., World], one_host: bool) -> None:
    world = ranks(2, one_host)
    first, second = world.ends
    calls = [first.receive(np.empty(1, np.uint8), None, 0), first.send(text(1, size=5 * RING), 1, 0)]
    waiter = threading.Thread(target=calls[0].wait, daemon=True)
    waiter.start()
    error = PeerLostError("rank 1 died", 1)
    first.fail(error)
    waiter.join(HANGS_SECONDS)
    assert not waiter.is_alive() and [call.error for call in calls] == [error, error] and pending(first) == []
    assert first.send(text(1), 1, 0).error is error and first.receive(text(1), 1, 0).error is error
    world.ranks[0].close()
    assert first.send(text(1), 1, 0).error is error
    world.ranks[1].close()
    assert "HorovodInternalError: group dp was destroyed on this rank before" in failure(second.send(text(1), 0, 0))
    second.note(lambda: None)  # the runtime still tells of what is over
    assert not second.is_active


@CARRIERS
def test_a_message_for_a_call_that_has_failed_is_not_written_to_its_memory(ranks: Callable[..., World], one_host: bool,
                                                                           ) -> None:
    sender, receiver = ranks(2, one_host).ends
    values = np.zeros(16, np.uint8)
    call = receiver.receive(values, 0, 0)
    receiver.fail(PeerLostError("rank 2 died", 2))
    assert call.error is not None
    sender.send(text(1), 1, 0).wait(0.05)
    receiver.advance(blocked=True)
    assert not values.any()


# --- interrupts, memory, forks -------------------------------------------------------------------------------------------


@CARRIERS
def test_an_interrupt_in_the_middle_of_a_copy_ends_the_group_on_this_rank(
        ranks: Callable[..., World], monkeypatch: pytest.MonkeyPatch, one_host: bool) -> None:
    """And not one while the thread sleeps."""
    world = ranks(2, one_host)
    world.ranks[0].is_stopped, end = True, world.ends[0]
    call = end.receive(np.empty(1, np.uint8), 1, 0)

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(world.ranks[0].area.word), "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call.wait()
    assert call.error is None
    with monkeypatch.context() as patch:
        patch.setattr(end._carriers[1], "advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call.wait()
    assert isinstance(call.error, HorovodInternalError) and "a thread was interrupted" in str(call.error)
    assert end.send(text(0), 1, 0).error is call.error


def test_no_memory_is_an_error_of_one_send(ranks: Callable[..., World], monkeypatch: pytest.MonkeyPatch) -> None:
    world = ranks(2)

    def refuse(start: int, length: int) -> None:
        raise MemoryError(f"no memory for {length} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(world.hosts[0].memories[0], "allocate", refuse)
        assert "MemoryError: no memory for" in failure(world.ends[0].send(text(1), 1, 0))
    done(world.ends[0].send(text(2), 1, 0))
    assert (received(world.ends[1], 16, 0)[0] == text(2)).all()


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
def test_messages_have_no_descriptors_of_their_own_and_give_their_pages_back(ranks: Callable[..., World]) -> None:
    """Although their calls and the caller still refer to them."""
    world = ranks(3)
    (host,) = world.hosts
    done(world.ends[0].send(text(1), 1, 0))  # maps the heap, which belongs to the host
    received(world.ends[1], 16, 0)
    before, empty = len(descriptors("memfd", "eventfd")), host.allocated
    calls = [world.ends[0].receive(np.empty(1, np.uint8), 1, 0), world.ends[0].send(text(1, size=5 * RING), 1, 0),
             world.ends[0].send(text(1, size=5 * RING), 2, 0)]
    received(world.ends[1], 5 * RING, 0)
    assert len(descriptors("memfd", "eventfd")) == before and host.allocated > empty
    for rank in world.ranks:
        rank.close()
    assert failure(calls[0]) and failure(calls[2])
    for heaps in host.heaps:
        for heap in heaps:
            heap.take_back()
    assert host.allocated < empty


@CARRIERS
def test_a_forked_child_changes_nothing(ranks: Callable[..., World], one_host: bool) -> None:
    world = ranks(2, one_host)
    sent = world.ends[0].send(text(1), 1, 0)
    with world.ends[1]._lock:  # as if another thread carried a call out
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        world.ends[1]._lock.acquire()
        world.ends[0].leave()
        world.ends[0].close()
        world.ends[1].close()
        refused = isinstance(world.ends[1].send(text(2), 0, 0).error, ForkedProcessError)
        os._exit(not refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (received(world.ends[1], 16, 0)[0] == text(1)).all()
    done(sent)
