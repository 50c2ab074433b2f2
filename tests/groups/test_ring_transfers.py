"""Sends and receives between ranks as threads, on real shared memory."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hvdlite.core.array import Array
from hvdlite.core.errors import ForkedProcessError, HorovodInternalError, OperationTimeoutError, PeerLeftError, PeerLostError
from hvdlite.groups import ring_transfers as module
from hvdlite.groups.call import Call
from hvdlite.groups.ring_transfers import RingTransfers
from hvdlite.memory import message_area
from hvdlite.memory.fence import Fence, fence_file
from hvdlite.memory.futex import PolledWord
from hvdlite.memory.shared import SharedMemory, anonymous_file
from tests.groups.schedules import Schedule, done, failure, received, text
from tests.worlds import HANGS_SECONDS, descriptors

RING = 1 << 16


class Ranks:
    """The ranks of a group, one `RingTransfers` each."""

    def __init__(self, count: int, *, fence: bool = False) -> None:
        self.file = anonymous_file()
        event = fence_file()
        self.memories = [SharedMemory(os.dup(self.file), rank, Fence(os.dup(event)) if fence else None)
                         for rank in range(count)]
        areas = [memory.message_area(range(count), RING) for memory in self.memories]
        self.ends = [RingTransfers(area, "group dp") for area in areas if area is not None]

    def run(self, step: Callable[[int, RingTransfers], None]) -> None:
        """Run a function on all ranks; raise the first error."""
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                step(rank, self.ends[rank])
            except BaseException as error:
                errors.append(error)
                for end in self.ends:
                    end.fail(RuntimeError(f"rank {rank} failed: {error!r}"))

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(self.ends))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_SECONDS)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), [end.pending() for end in self.ends]


@pytest.fixture
def ranks() -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(count: int, **options: object) -> Ranks:
        made.append(Ranks(count, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        for end in each.ends:
            end.close()
        for memory in each.memories:
            memory.close()
        os.close(each.file)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvdlite-transfers")]


@pytest.fixture(autouse=True)
def long_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is not woken sleeps on."""
    monkeypatch.setattr(module, "SLEEP_SECONDS", 10 * HANGS_SECONDS)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["futex", "no futex, fence"])
def test_random_schedules(ranks: Callable[..., Ranks], seed: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "futex":
        monkeypatch.setattr(message_area, "shared_word", PolledWord)
    schedule = Schedule(seed, sizes=(0, 1, 64, 1000, RING // 32, 2 * RING, 3 * RING))
    ranks(schedule.ranks, fence=kind != "futex").run(lambda rank, end: schedule.run(rank, end, blocking_sends=0.1))


# docs/protocol.md#message-rings
@pytest.mark.parametrize("count", [2, 3, 4])
def test_ranks_that_all_send_first_do_not_wait_for_each_other(ranks: Callable[..., Ranks], count: int) -> None:
    """Much more than a ring holds, in a circle."""
    def step(rank: int, end: RingTransfers) -> None:
        for turn in range(3):
            done(end.send(text(rank, turn, size=10 * RING), (rank + 1) % count, turn))
        for turn in (2, 0, 1):
            values, source = received(end, 10 * RING, (rank - 1) % count, turn)
            assert (values == text(source, turn, size=10 * RING)).all()

    ranks(count).run(step)


def test_a_batch_in_any_order_on_four_ranks(ranks: Callable[..., Ranks]) -> None:
    def step(rank: int, end: RingTransfers) -> None:
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

    ranks(4).run(step)


def test_a_long_send_to_a_rank_that_does_not_receive_takes_the_memory_of_one_ring(ranks: Callable[..., Ranks]) -> None:
    world = ranks(2)
    empty = os.fstat(world.file).st_blocks * 512
    call = world.ends[0].send(text(1, size=100 * RING), 1, 5)
    assert not call.is_done and not call.wait(0.0)
    assert os.fstat(world.file).st_blocks * 512 <= empty + RING
    assert world.ends[0].pending() == [f"send from rank 0 to rank 1 (tag 5, {100 * RING} bytes)"]
    values, _ = received(world.ends[1], 100 * RING, 0, 5)
    assert (values == text(1, size=100 * RING)).all()
    done(call)
    for _ in range(200):  # a ring has fewer bytes
        done(world.ends[0].send(text(2, size=1000), 1, 5))
        assert (received(world.ends[1], 1000, 0, 5)[0] == text(2, size=1000)).all()
    assert os.fstat(world.file).st_blocks * 512 <= empty + RING


def test_calls_for_which_nobody_waits_are_carried_out(ranks: Callable[..., Ranks]) -> None:
    """Both: a receive before its message comes, and a send for which there is no room yet."""
    world, ended = ranks(2), threading.Event()
    values = np.empty(5 * RING, np.uint8)
    receive = world.ends[1].receive(values, None, 3)
    receive.when_done(lambda call: ended.set())
    send = world.ends[0].send(text(7, size=5 * RING), 1, 3)
    assert ended.wait(HANGS_SECONDS)
    assert receive.error is None and receive.source == 0 and (values == text(7, size=5 * RING)).all()
    done(send)


def driven(world: Ranks, rank: int, source: int) -> Call:
    """Return a receive of tag 100 that the thread of `rank` carries out: it has just carried out another one."""
    ended = threading.Event()
    world.ends[rank].receive(np.empty(1, np.uint8), source, 99).when_done(lambda call: ended.set())
    call = world.ends[rank].receive(np.empty(1, np.uint8), source, 100)
    done(world.ends[source].send(text(1, size=1), rank, 99))
    assert ended.wait(HANGS_SECONDS)
    return call


def test_a_thread_that_begins_to_wait_lets_the_thread_of_the_group_look_at_full_rings(ranks: Callable[..., Ranks]) -> None:
    world = ranks(3)
    send = world.ends[0].send(text(1, size=5 * RING), 1, 0)
    call = driven(world, 1, 2)
    waiter = threading.Thread(target=call.wait, daemon=True)
    waiter.start()
    done(send)
    done(world.ends[2].send(text(1, size=1), 1, 100))
    done(call)
    waiter.join(HANGS_SECONDS)


def test_a_rank_that_leaves_wakes_those_that_wait_for_it(ranks: Callable[..., Ranks]) -> None:
    world, ended = ranks(2), threading.Event()
    call = driven(world, 1, 0)
    call.when_done(lambda call: ended.set())
    world.ends[0].close()
    assert ended.wait(HANGS_SECONDS) and isinstance(call.error, PeerLeftError)


def test_a_callback_may_communicate(ranks: Callable[..., Ranks]) -> None:
    """On the thread of the group, which then waits itself."""
    world, answers = ranks(2), [threading.Event(), threading.Event()]

    def answer(rank: int) -> Callable[[Call], None]:
        def act(call: Call) -> None:
            done(world.ends[rank].send(text(rank, size=3 * RING), 1 - rank, 1))
            values, _ = received(world.ends[rank], 3 * RING, 1 - rank, 1)
            assert (values == text(1 - rank, size=3 * RING)).all()
            answers[rank].set()
        return act

    for rank in range(2):
        world.ends[rank].receive(np.empty(1, np.uint8), 1 - rank, 0).when_done(answer(rank))
    for rank in range(2):
        world.ends[rank].send(text(0, size=1), 1 - rank, 0)
    assert all(each.wait(HANGS_SECONDS) for each in answers)


def test_the_thread_ends_when_there_is_nothing_to_do(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_ROUNDS", 2)
    world = ranks(2)
    for _ in range(3):
        call = world.ends[0].receive(np.empty(1, np.uint8), 1, 0)
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "hvdlite-transfers-group dp"]
        done(world.ends[1].send(text(1, size=1), 0, 0))
        done(call)
        thread.join(HANGS_SECONDS)
        assert not thread.is_alive()


def test_several_threads_wait_for_calls_of_one_rank(ranks: Callable[..., Ranks]) -> None:
    world = ranks(2)
    results: dict[int, Array] = {}

    def wait(tag: int) -> None:
        results[tag] = received(world.ends[0], 5000, 1, tag)[0]

    threads = [threading.Thread(target=wait, args=(tag,), daemon=True) for tag in range(6)]
    for thread in threads:
        thread.start()
    for tag in reversed(range(6)):
        done(world.ends[1].send(text(tag, size=5000), 0, tag))
    for thread in threads:
        thread.join(HANGS_SECONDS)
    assert all((results[tag] == text(tag, size=5000)).all() for tag in range(6))


@pytest.mark.parametrize("sent", [0, 15, 17, 5 * RING])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_other_lengths_are_an_error_with_both_numbers(ranks: Callable[..., Ranks], sent: int, first: str) -> None:
    """The next receive gets the next message."""
    sender, receiver = ranks(2).ends
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


def test_bad_ranks_are_value_errors(ranks: Callable[..., Ranks]) -> None:
    end = ranks(2).ends[1]
    for rank in (1, 2, -1):
        with pytest.raises(ValueError, match=f"rank 1 of group dp cannot send to rank {rank}"):
            end.send(text(1), rank, 0)
        with pytest.raises(ValueError, match=f"cannot receive from rank {rank}: the group has ranks 0 to 1"):
            end.receive(text(1), rank, 0)


def test_a_receive_times_out_and_the_group_goes_on(ranks: Callable[..., Ranks]) -> None:
    sender, receiver = ranks(2).ends
    done(sender.send(text(1, size=7), 1, 8))
    late = receiver.receive(np.empty(16, np.uint8), 0, 9, timeout=0.05)
    assert failure(late) == (
        "OperationTimeoutError: group dp: the receive on rank 1 from rank 0 (tag 9, 16 bytes) has not ended within the "
        "timeout of 0.05 s: no such message has come, but others that nobody receives: 7 bytes from rank 0 with tag 8")
    assert isinstance(late.error, OperationTimeoutError) and late.error.ranks == (0,)
    done(sender.send(text(3), 1, 9))
    assert (received(receiver, 16, 0, 9)[0] == text(3)).all()
    assert (received(receiver, 7, 0, 8)[0] == text(1, size=7)).all()


def test_a_receive_that_times_out_in_the_middle_of_a_message(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch,
                                                             ) -> None:
    """The rest of the message is taken out of the ring by later calls."""
    sender, receiver = ranks(2).ends
    monkeypatch.setattr(sender, "_run", lambda: None)  # as if its process were stopped
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


def test_a_send_that_times_out_in_the_middle_ends_the_group_on_this_rank(ranks: Callable[..., Ranks]) -> None:
    """Otherwise the receiver would take the next message for the rest of this one."""
    sender, receiver = ranks(2).ends
    late, other = sender.send(text(1, size=3 * RING), 1, 2, timeout=0.05), sender.receive(np.empty(3, np.uint8), 1, 0)
    message = failure(late)
    assert "(tag 2, 196608 bytes) has not ended within the timeout of 0.05 s: rank 1 does not receive it" in message
    assert failure(other) == failure(sender.send(text(1), 1, 2)) == message
    receive = receiver.receive(np.empty(3 * RING, np.uint8), 0, 2)
    sender.close()
    failure(receive)
    assert isinstance(receive.error, OperationTimeoutError | PeerLeftError)


def test_what_a_rank_has_sent_before_it_left_can_be_received(ranks: Callable[..., Ranks]) -> None:
    first, second, third = ranks(3).ends
    blocked = second.receive(np.empty(9, np.uint8), 0, 5)
    for tag in (1, 2):
        done(first.send(text(tag), 1, tag))
    first.close()
    first.close()
    assert failure(blocked) == (
        "PeerLeftError: group dp: the receive on rank 1 from rank 0 (tag 5, 9 bytes) needs rank 0, which left the group "
        "(its process ended, or destroyed the group)")
    assert (received(second, 16, 0, 2)[0] == text(2)).all()
    assert (received(second, 16, None, 1)[0] == text(1)).all()
    assert "needs rank 0, which left the group" in failure(second.receive(np.empty(1, np.uint8), 0, 1))
    assert "the send from rank 1 to rank 0 (tag 0, 16 bytes) needs rank 0, which left" in failure(second.send(text(0), 0, 0))
    anyone = second.receive(np.empty(2, np.uint8), None, 1)
    done(third.send(text(4, size=2), 1, 1))
    assert done(anyone).source == 2
    last = second.receive(np.empty(2, np.uint8), None, 1)
    third.close()
    assert "the receive on rank 1 from any rank (tag 1, 2 bytes) needs ranks 0, 2, which left" in failure(last)


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_message_that_comes_just_before_its_sender_leaves(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch,
                                                            earlier: int) -> None:
    """After the receiver has looked at the ring, and before it looks whether the sender has left."""
    sender, receiver = ranks(2).ends
    for _ in range(earlier):
        done(sender.send(text(0), 1, 0))
        received(receiver, 16, 0)
    call = receiver.receive(values := np.empty(16, np.uint8), 0, 0)
    has_left = receiver._area.has_left

    def leave_first(rank: int) -> bool:
        monkeypatch.undo()
        done(sender.send(text(1), 1, 0))
        sender.close()
        return has_left(rank)

    monkeypatch.setattr(receiver._area, "has_left", leave_first)
    done(call)
    assert (values == text(1)).all()


def test_a_rank_that_leaves_ends_sends_to_it(ranks: Callable[..., Ranks]) -> None:
    first, second = ranks(2).ends
    call = first.send(text(1, size=5 * RING), 1, 0)
    second.close()
    assert "the send from rank 0 to rank 1 (tag 0, 327680 bytes) needs rank 1, which left" in failure(call)


def test_a_failed_group_ends_every_call(ranks: Callable[..., Ranks]) -> None:
    first, second = ranks(2).ends
    calls = [first.receive(np.empty(1, np.uint8), None, 0), first.send(text(1, size=5 * RING), 1, 0)]
    waiter = threading.Thread(target=calls[0].wait, daemon=True)
    waiter.start()
    error = PeerLostError("rank 1 died", 1)
    first.fail(error)
    waiter.join(HANGS_SECONDS)
    assert not waiter.is_alive() and [call.error for call in calls] == [error, error] and first.pending() == []
    assert first.send(text(1), 1, 0).error is error and first.receive(text(1), 1, 0).error is error
    first.close()
    assert "was destroyed on this rank" not in failure(first.send(text(1), 1, 0))
    second.close()
    assert "HorovodInternalError: group dp was destroyed on this rank before" in failure(second.send(text(1), 0, 0))


def test_an_interrupt_in_the_middle_of_a_copy_ends_the_group_on_this_rank(
        ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not one while the thread sleeps."""
    end = ranks(2).ends[0]
    call = end.receive(np.empty(1, np.uint8), 1, 0)

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(end._area, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call.wait()
    assert call.error is None
    monkeypatch.setattr(end, "_take_pieces", interrupt)
    with pytest.raises(KeyboardInterrupt):
        call.wait()
    assert isinstance(call.error, HorovodInternalError) and "a thread was interrupted" in str(call.error)
    assert end.send(text(0), 1, 0).error is call.error


def test_no_memory_is_an_error_of_one_send(ranks: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    world = ranks(2)

    def refuse(start: int, length: int) -> None:
        raise MemoryError(f"no memory for {length} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(world.memories[0], "allocate", refuse)
        assert "MemoryError: no memory for" in failure(world.ends[0].send(text(1), 1, 0))
    done(world.ends[0].send(text(2), 1, 0))
    assert (received(world.ends[1], 16, 0)[0] == text(2)).all()


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors")
def test_a_closed_end_has_no_descriptors(ranks: Callable[..., Ranks]) -> None:
    """Its calls and the caller may still refer to it."""
    def owned() -> int:
        return len(descriptors("memfd", "eventfd"))

    world = ranks(2)
    gc.collect()  # what other tests have left
    open_ends = owned()
    calls = [world.ends[0].receive(np.empty(1, np.uint8), 1, 0), world.ends[0].send(text(1, size=5 * RING), 1, 0)]
    received(world.ends[1], 5 * RING, 0)
    assert owned() == open_ends + 2
    for end in world.ends:
        end.close()
    assert owned() == open_ends - 2 and failure(calls[0])


def test_a_forked_child_changes_nothing(ranks: Callable[..., Ranks]) -> None:
    world = ranks(2)
    done(world.ends[0].send(text(1), 1, 0))
    with world.ends[1]._lock:  # as if another thread carried a call out
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        world.ends[1]._lock.acquire()
        world.ends[0].close()
        world.ends[0].close_in_child()
        refused = isinstance(world.ends[1].send(text(2), 0, 0).error, ForkedProcessError)
        os._exit(not refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (received(world.ends[1], 16, 0)[0] == text(1)).all()
