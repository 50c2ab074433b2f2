"""Random sends and receives, and what tests of them have in common."""

from __future__ import annotations

import functools
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.core.array import Array
from hvdlite.groups.call import Call
from hvdlite.groups.messages import Messages
from tests.groups.message_worlds import World
from tests.worlds import HANGS_SECONDS


def text(*numbers: int, size: int = 16) -> Array:
    """Return `size` bytes that tell the numbers."""
    return np.random.default_rng(numbers).integers(0, 256, size, np.uint8)


def done(call: Call) -> Call:
    assert call.wait(HANGS_SECONDS) and call.is_done
    if call.error is not None:
        raise call.error
    return call


def failure(call: Call) -> str:
    assert call.wait(HANGS_SECONDS)
    assert call.error is not None
    return f"{type(call.error).__name__}: {call.error}"


def received(end: Messages, size: int, source: int | None, tag: int = 0) -> tuple[Array, int]:
    values = np.empty(size, np.uint8)
    call = done(end.receive(values, source, tag, HANGS_SECONDS))
    return values, call.source


class Planned(NamedTuple):
    """A send or a receive: the `number`th message of this size from `source` to `to` with this tag."""

    source: int
    to: int
    tag: int
    number: int
    size: int


class Schedule:
    """Messages between 2 to 4 ranks on 1 to 4 hosts, and receives of all of them in another order.

    Some tags are received from any source. Then only the order of the messages of each source is known. Some waits are given
    up, some receives time out because nobody sends to them, and several threads wait for the rest, one of them as in a
    collective.

    Args:
        sizes: of messages in bytes; `far_sizes` between hosts.

    Attributes:
        hosts: how many ranks each host has.
    """

    def __init__(self, seed: int, sizes: Sequence[int], far_sizes: Sequence[int], messages: int = 300) -> None:
        rng = random.Random(seed)
        self._seed, ranks = seed, rng.choice((2, 3, 4))
        self.hosts = rng.choice({2: [(2,), (1, 1)], 3: [(3,), (2, 1), (1, 1, 1)],
                                 4: [(4,), (2, 2), (1, 2, 1), (1, 1, 1, 1)]}[ranks])
        self._host = [host for host, count in enumerate(self.hosts) for _ in range(count)]
        self._any = {(to, tag): rng.choice(far_sizes) for to in range(ranks) for tag in range(4) if rng.random() < 0.3}
        self._sends: list[list[Planned]] = [[] for _ in range(ranks)]
        received: list[list[Planned]] = [[] for _ in range(ranks)]
        numbers: dict[tuple[int, int, int], int] = defaultdict(int)
        for _ in range(messages):
            source, to = rng.sample(range(ranks), 2)
            tag = rng.randrange(4)
            size = self._any.get((to, tag), rng.choice(sizes if self._are_near(source, to) else far_sizes))
            planned = Planned(source, to, tag, numbers[source, to, tag], size)
            numbers[source, to, tag] += 1
            self._sends[source].append(planned)
            received[to].append(planned)
        self._receives = [self._shuffled(each, rng) for each in received]

    def _are_near(self, source: int, to: int) -> bool:
        return self._host[source] == self._host[to]

    @staticmethod
    def _shuffled(receives: list[Planned], rng: random.Random) -> list[Planned]:
        """Return receives in another order, but those of one source and tag in theirs."""
        order = rng.sample(receives, len(receives))
        queues: dict[tuple[int, int], list[Planned]] = defaultdict(list)
        for each in receives:
            queues[each.source, each.tag].append(each)
        return [queues[each.source, each.tag].pop(0) for each in order]

    def run(self, rank: int, end: Messages, collective: Callable[[Callable[[], bool]], None]) -> None:
        """Make a rank's calls, and compare what it has received.

        Args:
            collective: waits, as a thread in a collective does, until a function returns True.
        """
        rng, sends, receives = random.Random(self._seed * 10 + rank), list(self._sends[rank]), list(self._receives[rank])
        sent: list[Call] = []
        late: list[Call] = []
        calls: list[tuple[Call, Planned, Array]] = []
        while sends or receives:
            if sends and rng.random() < 0.5:
                each = sends.pop(0)
                sent.append(end.send(text(*each[:4], size=each.size), each.to, each.tag, HANGS_SECONDS))
                if self._are_near(rank, each.to) and rng.random() < 0.1:
                    done(sent[-1])
            elif receives:
                each = receives.pop(0)
                values = np.full(each.size, 0xCC, np.uint8)
                source = None if (rank, each.tag) in self._any else each.source
                calls.append((end.receive(values, source, each.tag, HANGS_SECONDS), each, values))
            if rng.random() < 0.03:
                late.append(end.receive(np.empty(1, np.uint8), None, 5, rng.choice((0.001, 0.05))))
            if rng.random() < 0.05:
                rng.choice([*sent, *late, *(call for call, _, _ in calls)] or [Call(())]).wait(0.002)
        everything = [*sent, *(call for call, _, _ in calls)]
        self._wait(everything, late, collective, rng)
        seen: dict[tuple[int, int], int] = defaultdict(int)
        for call, each, values in calls:
            number = each.number
            if (rank, each.tag) in self._any:
                number = seen[call.source, each.tag]
                seen[call.source, each.tag] += 1
            else:
                assert call.source == each.source
            assert (values == text(call.source, rank, each.tag, number, size=each.size)).all()

    @staticmethod
    def _wait(calls: list[Call], late: list[Call], collective: Callable[[Callable[[], bool]], None],
              rng: random.Random) -> None:
        """Wait for calls in several threads; those that are `late` fail."""
        errors: list[BaseException] = []

        def guarded(step: Callable[[], object]) -> None:
            try:
                step()
            except BaseException as error:
                errors.append(error)

        def wait(own: list[Call]) -> None:
            for call in own:
                done(call)

        orders = [rng.sample(calls, len(calls)) for _ in range(rng.choice((0, 1, 2)))]
        steps: list[Callable[[], object]] = [functools.partial(wait, own) for own in orders]
        if rng.random() < 0.5:
            steps.append(lambda: collective(lambda: all(call._is_over for call in calls)))
        threads = [threading.Thread(target=guarded, args=(step,), daemon=True) for step in steps]
        for thread in threads:
            thread.start()
        wait(calls)
        for thread in threads:
            thread.join(HANGS_SECONDS)
        assert not errors, errors[0]
        assert not any(thread.is_alive() for thread in threads)
        assert all("OperationTimeoutError" in failure(call) for call in late)


def driven(world: World, rank: int, source: int) -> Call:
    """Return a receive of tag 100 that the worker of `rank` carries out: it has just carried out another one."""
    ended = threading.Event()
    world.ends[rank].receive(np.empty(1, np.uint8), source, 99).when_done(lambda call: ended.set())
    call = world.ends[rank].receive(np.empty(1, np.uint8), source, 100)
    done(world.ends[source].send(text(1, size=1), rank, 99))
    assert ended.wait(HANGS_SECONDS)
    return call
