"""What ranks of several hosts know of each other's calls. A model, without threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.groups.peers import CallProgress, RemotePeers


class Wire:
    """Carries what a rank announces when it is told to."""

    def __init__(self, rank: int, wires: dict[int, Wire]) -> None:
        self.rank, self.wires = rank, wires
        self.sent: list[tuple[int, bytes]] = []
        self.listener: Callable[[int, bytes], None] = lambda source, text: None
        wires[rank] = self

    def listen(self, listener: Callable[[int, bytes], None]) -> None:
        self.listener = listener

    def announce(self, to: Sequence[int], text: bytes) -> None:
        self.sent += [(rank, text) for rank in to]

    def deliver(self) -> None:
        sent, self.sent = self.sent, []
        for rank, text in sent:
            self.wires[rank].listener(self.rank, text)


class Executor:
    """What a rank announces, and how often it is woken."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def progress(self) -> CallProgress:
        return self._world.own[self._rank]

    def wake(self) -> None:
        self._world.rings[self._rank] += 1


class World:
    def __init__(self, *own: CallProgress) -> None:
        self.own, self.rings = list(own), [0] * len(own)
        wires: dict[int, Wire] = {}
        self.wires = [Wire(rank, wires) for rank in range(len(own))]
        self.ends = [self._peers(wire) for wire in self.wires]

    def _peers(self, wire: Any) -> RemotePeers:
        others = [rank for rank in range(len(self.own)) if rank != wire.rank]
        execution: Any = Executor(self, wire.rank)
        return RemotePeers(wire, others, execution)

    def deliver(self) -> None:
        for wire in self.wires:
            wire.deliver()


# docs/protocol.md#standings
def test_nothing_is_said_until_somebody_asks_or_leaves() -> None:
    world = World(CallProgress(3, 2, "barrier()"), CallProgress(2, 2, "all_reduce()"), CallProgress(3, 2, "barrier()"))
    first = world.ends[0]
    world.deliver()
    assert first.missing(1) == (1, 2) and first.left(1) == () and not any(wire.sent for wire in world.wires)
    now = time.monotonic()
    assert not first.ask(now) and not first.ask(now), "a question is not repeated"
    assert len(world.wires[0].sent) == 2
    for _ in range(2):
        world.deliver()
    assert first.ask(now) and first.missing(3) == (1,) and first.missing(2) == () and world.rings == [2, 0, 0]
    assert first.last_calls([1]) == [(1, "call 2: all_reduce()")]


def test_a_rank_that_does_not_answer_is_told_as_such() -> None:
    world = World(CallProgress(1), CallProgress(1, 1, "barrier()"), CallProgress())
    first = world.ends[0]
    first.ask(time.monotonic())
    world.wires[0].deliver()
    world.wires[1].deliver()  # rank 2 answers nothing
    assert not first.ask(0.0) and first.last_calls([1, 2]) == [
        (1, "call 1: barrier()"), (2, "nothing in this group, as far as is known: it does not answer")]


def test_who_leaves_says_how_far_it_was_once() -> None:
    world = World(CallProgress(5, 4), CallProgress(5, 4, "barrier()"), CallProgress(5, 5))
    first, second, third = world.ends
    for end, completed in ((second, 4), (second, 9), (third, 5)):
        end.leave(completed)
    world.deliver()
    assert first.left(5) == (1,) and first.left(6) == (1, 2) and first.left(4) == ()
    assert first.missing(5) == () and first.missing(6) == (1, 2)
    assert first.ask(time.monotonic()), "nobody is left to be asked"


def test_who_leaves_instead_of_an_answer_has_answered() -> None:
    world = World(CallProgress(2), CallProgress(1, 1))
    now = time.monotonic()
    world.ends[0].ask(now)
    world.ends[1].leave(1)
    world.deliver()
    world.deliver()
    assert world.ends[0].ask(now) and world.ends[0].left(2) == (1,)
