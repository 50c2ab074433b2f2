"""Random sends and receives, and what tests of them have in common."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdlite.core.array import Array
from hvdlite.groups.call import Call
from hvdlite.groups.transfers import Transfers
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


def received(end: Transfers, size: int, source: int | None, tag: int = 0) -> tuple[Array, int]:
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
    """Messages between 2 to 4 ranks, and receives of all of them in another order.

    Some tags are received from any source. Then only the order of the messages of each source is known.

    Args:
        sizes: of messages in bytes.
    """

    def __init__(self, seed: int, sizes: Sequence[int], messages: int = 400) -> None:
        rng = random.Random(seed)
        self._seed, self.ranks = seed, rng.choice((2, 3, 4))
        self._any = {(to, tag): rng.choice(sizes) for to in range(self.ranks) for tag in range(4) if rng.random() < 0.3}
        self._sends: list[list[Planned]] = [[] for _ in range(self.ranks)]
        received: list[list[Planned]] = [[] for _ in range(self.ranks)]
        numbers: dict[tuple[int, int, int], int] = defaultdict(int)
        for _ in range(messages):
            source, to = rng.sample(range(self.ranks), 2)
            tag = rng.randrange(4)
            size = self._any.get((to, tag), rng.choice(sizes))
            planned = Planned(source, to, tag, numbers[source, to, tag], size)
            numbers[source, to, tag] += 1
            self._sends[source].append(planned)
            received[to].append(planned)
        self._receives = [self._shuffled(each, rng) for each in received]

    @staticmethod
    def _shuffled(receives: list[Planned], rng: random.Random) -> list[Planned]:
        """Return receives in another order, but those of one source and tag in theirs."""
        order = rng.sample(receives, len(receives))
        queues: dict[tuple[int, int], list[Planned]] = defaultdict(list)
        for each in receives:
            queues[each.source, each.tag].append(each)
        return [queues[each.source, each.tag].pop(0) for each in order]

    def run(self, rank: int, end: Transfers, *, blocking_sends: float) -> None:
        """Make a rank's calls, and compare what it has received.

        Args:
            blocking_sends: how many sends it waits for at once.
        """
        rng, sends, receives = random.Random(self._seed * 10 + rank), list(self._sends[rank]), list(self._receives[rank])
        sent: list[Call] = []
        calls: list[tuple[Call, Planned, Array]] = []
        while sends or receives:
            if sends and rng.random() < 0.5:
                each = sends.pop(0)
                sent.append(end.send(text(*each[:4], size=each.size), each.to, each.tag, HANGS_SECONDS))
                if rng.random() < blocking_sends:
                    done(sent[-1])
            elif receives:
                each = receives.pop(0)
                values = np.full(each.size, 0xCC, np.uint8)
                source = None if (rank, each.tag) in self._any else each.source
                calls.append((end.receive(values, source, each.tag, HANGS_SECONDS), each, values))
        for call in [*sent, *(call for call, _, _ in calls)]:
            done(call)
        seen: dict[tuple[int, int], int] = defaultdict(int)
        for call, each, values in calls:
            number = each.number
            if (rank, each.tag) in self._any:
                number = seen[call.source, each.tag]
                seen[call.source, each.tag] += 1
            else:
                assert call.source == each.source
            assert (values == text(call.source, rank, each.tag, number, size=each.size)).all()
