"""Sends and receives that are negotiated, over a network of threads in this process."""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError, OperationTimeoutError, PeerLostError
from hvdlite.groups.call import Call
from hvdlite.groups.negotiated_transfers import Done, NegotiatedTransfers
from tests.groups.schedules import Schedule, done, failure, received, text
from tests.worlds import HANGS_SECONDS


class Network:
    """Carries announcements, in order between two ranks, and transfers, in any order; on a thread of its own."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._texts: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._halves: dict[str, tuple[Array, Done]] = {}
        self._pairs: list[tuple[tuple[Array, Done], tuple[Array, Done]]] = []
        self.listeners: dict[int, Callable[[int, bytes], None]] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def announce(self, source: int, to: Sequence[int], message: bytes) -> None:
        with self._changed:
            for each in to:
                self._texts[source, each].append(message)
            self._changed.notify_all()

    def add(self, name: str, values: Array, done: Done, *, sends: bool) -> None:
        with self._changed:
            if name in self._halves:
                pair = (self._halves.pop(name), (values, done))
                assert pair[0][0].size == values.size, name
                self._pairs.append(pair if not sends else (pair[1], pair[0]))
            else:
                self._halves[name] = values, done
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                deliverable = [way for way, texts in self._texts.items() if texts and way[1] in self.listeners]
                if not deliverable and not self._pairs:
                    if self._is_closed:
                        return
                    self._changed.wait()
                    continue
                if deliverable and (not self._pairs or self._rng.random() < 0.5):
                    source, to = self._rng.choice(deliverable)
                    act = self._heard(self.listeners[to], source, self._texts[source, to].popleft())
                else:
                    act = self._moved(*self._pairs.pop(self._rng.randrange(len(self._pairs))))
            act()

    @staticmethod
    def _heard(listener: Callable[[int, bytes], None], source: int, message: bytes) -> Callable[[], None]:
        return lambda: listener(source, message)

    @staticmethod
    def _moved(sent: tuple[Array, Done], received: tuple[Array, Done]) -> Callable[[], None]:
        def act() -> None:
            received[0][...] = sent[0]
            for _, tell in (sent, received):
                tell(None)
                tell(HorovodInternalError("told again"))  # as at the end of a runtime

        return act


class LocalLink:
    """Implements `Link`."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def announce(self, to: Sequence[int], text: bytes) -> None:
        self._network.announce(self._rank, to, text)

    def hear(self, hear: Callable[[int, bytes], None]) -> None:
        self._network.listeners[self._rank] = hear

    def send(self, name: str, values: Array, to: int, done: Done) -> None:
        self._network.add(name, values, done, sends=True)

    def receive(self, name: str, values: Array, source: int, done: Done) -> None:
        self._network.add(name, values, done, sends=False)

    def close(self) -> None:
        self._network.listeners[self._rank] = lambda source, text: None


Make = Callable[[int], list[NegotiatedTransfers]]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[NegotiatedTransfers] = []
    network = Network(len(request.node.name))

    def make(count: int) -> list[NegotiatedTransfers]:
        made.extend(NegotiatedTransfers(LocalLink(network, rank), "group dp", rank, count) for rank in range(count))
        return made

    yield make
    for end in made:
        end.close()
    network.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvdlite-transfers")]


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules(ranks: Make, seed: int) -> None:
    schedule = Schedule(seed, sizes=(0, 1, 1000))
    ends, errors = ranks(schedule.ranks), []

    def body(rank: int) -> None:
        try:
            schedule.run(rank, ends[rank], blocking_sends=0.0)
        except BaseException as error:
            errors.append(error)
            for end in ends:
                end.fail(RuntimeError(f"rank {rank} failed"))

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(schedule.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_SECONDS)
    assert not errors, errors[0]
    assert not any(thread.is_alive() for thread in threads), [end.pending() for end in ends]


def test_other_lengths_are_an_error_of_the_receiver(ranks: Make) -> None:
    """The next receive gets the next message."""
    sender, receiver = ranks(2)
    sends = [sender.send(text(1, size=7), 1, 4), sender.send(text(2), 1, 4)]
    assert failure(receiver.receive(np.empty(16, np.uint8), None, 4)) == (
        "MismatchError: group dp: the receive on rank 1 from any rank (tag 4, 16 bytes) gets a message of 7 bytes from "
        "rank 0: the tensors sent and received must have the same number of bytes")
    assert (received(receiver, 16, 0, 4)[0] == text(2)).all()
    for send in sends:
        done(send)


def test_a_receive_times_out_and_the_group_goes_on(ranks: Make) -> None:
    sender, receiver = ranks(2)
    late = receiver.receive(np.empty(16, np.uint8), 0, 9, timeout=0.05)
    assert "has not ended within the timeout of 0.05 s: no such message has come" in failure(late)
    send = sender.send(text(3), 1, 9)
    assert (received(receiver, 16, 0, 9)[0] == text(3)).all()
    done(send)


def test_a_send_that_times_out_ends_the_group_on_this_rank(ranks: Make) -> None:
    """A later send must not be taken for it."""
    sender, _ = ranks(2)
    late = sender.send(text(1), 1, 2, timeout=0.05)
    assert "(tag 2, 16 bytes) has not ended within the timeout of 0.05 s: rank 1 does not receive it" in failure(late)
    assert isinstance(late.error, OperationTimeoutError) and late.error.ranks == (1,)
    assert sender.receive(text(1), 1, 0).error is late.error


def test_a_rank_that_leaves_ends_the_calls_that_need_it(ranks: Make) -> None:
    first, second, third = ranks(3)
    calls = [second.receive(np.empty(9, np.uint8), 0, 5), second.send(text(1), 0, 6)]
    anyone = second.receive(np.empty(16, np.uint8), None, 7)
    first.close()
    first.close()
    assert failure(calls[0]) == (
        "PeerLeftError: group dp: the receive on rank 1 from rank 0 (tag 5, 9 bytes) needs rank 0, which left the group "
        "(its process ended, or destroyed the group)")
    assert "the send from rank 1 to rank 0 (tag 6, 16 bytes) needs rank 0" in failure(calls[1])
    assert "needs rank 0" in failure(second.send(text(1), 0, 6))
    done(third.send(text(4), 1, 7))
    assert done(anyone).source == 2
    last = second.receive(np.empty(16, np.uint8), None, 7)
    third.close()
    assert "needs ranks 0, 2, which left" in failure(last)


def test_a_failed_group_ends_every_call(ranks: Make) -> None:
    first, second = ranks(2)
    calls = [first.receive(np.empty(1, np.uint8), None, 0), first.send(text(1), 1, 0)]
    error = PeerLostError("rank 1 died", 1)
    first.fail(error)
    assert [call.error for call in calls] == [error, error] and first.pending() == []
    assert first.send(text(1), 1, 0).error is error
    second.close()
    assert "group dp was destroyed on this rank" in failure(second.send(text(1), 0, 0))


def test_a_callback_may_communicate(ranks: Make) -> None:
    """On the thread of the group, which then waits itself."""
    ends, answered = ranks(2), [threading.Event(), threading.Event()]

    def answers(call: Call) -> None:
        rank = 1 - call.source
        sent = ends[rank].send(text(rank), 1 - rank, 1)
        assert (received(ends[rank], 16, 1 - rank, 1)[0] == text(1 - rank)).all()
        done(sent)
        answered[rank].set()

    for rank in range(2):
        ends[rank].receive(np.empty(16, np.uint8), 1 - rank, 0).when_done(answers)
    for rank in range(2):
        ends[rank].send(text(0), 1 - rank, 0)
    assert all(each.wait(HANGS_SECONDS) for each in answered)


def test_bad_ranks_are_value_errors(ranks: Make) -> None:
    end = ranks(2)[1]
    for rank in (1, 2, -1):
        with pytest.raises(ValueError, match=f"rank 1 of group dp cannot send to rank {rank}"):
            end.send(text(1), rank, 0)
        with pytest.raises(ValueError, match=f"cannot receive from rank {rank}"):
            end.receive(text(1), rank, 0)
