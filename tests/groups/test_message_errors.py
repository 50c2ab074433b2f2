"""Sends and receives that are wrong, take too long, or are ended: by a loss, a failure, an interrupt or a fork."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from hvdlite.core.errors import ForkedProcessError, HorovodInternalError, OperationTimeoutError, PeerLostError
from tests.groups.message_worlds import CARRIERS, RING, World, pending
from tests.groups.message_worlds import long_sleeps as long_sleeps
from tests.groups.message_worlds import ranks as ranks
from tests.groups.schedules import done, driven, failure, received, text
from tests.worlds import HANGS_SECONDS, descriptors


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
def test_a_call_that_begins_when_the_memory_is_closed_fails_with_what_closed_it(ranks: Callable[..., World]) -> None:
    """Another rank may fail between the look at the group's error and the first look into a ring."""
    world = ranks(2, True)
    world.ranks[1].is_stopped = True
    done(world.ends[0].send(text(1), 1, 4))
    world.ranks[1].messages.state.fail(PeerLostError("rank 0 died", 0))
    world.hosts[0].memories[1].close()
    for _ in range(2):
        assert failure(world.ends[1].receive(np.empty(16, np.uint8), 0, 4)) == "PeerLostError: rank 0 died"


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
