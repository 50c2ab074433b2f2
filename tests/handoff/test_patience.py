"""Polling before sleeping: it goes on where it helps, and stops where it does not."""

from __future__ import annotations

import random

from hvdlite.memory.patience import LONGEST, PROOF, SHORTEST, VAIN, Patience


class Clock:
    """A clock that goes on by a microsecond, or by a turn of another process, whenever somebody looks."""

    def __init__(self) -> None:
        self.now, self.turn = 0.0, 0.0

    def __call__(self) -> float:
        self.now += 1e-6 + self.turn
        return self.now


def looks(patience: Patience, waits: int, *, comes: bool) -> int:
    """Return for how many of some waits the thread polls."""
    polled = 0
    for _ in range(waits):
        asked: list[int] = []
        patience.look(lambda asked=asked: asked.append(1) or comes)  # type: ignore[misc]
        polled += bool(asked)
    return polled


def test_what_comes_in_time_is_polled_for_again() -> None:
    assert looks(Patience(50e-6, Clock()), 1000, comes=True) == 1000
    assert looks(Patience(0.0, Clock()), 10, comes=True) == 0


def test_polling_in_vain_becomes_rare_and_comes_back() -> None:
    patience = Patience(50e-6, Clock())
    assert looks(patience, VAIN + SHORTEST, comes=False) == VAIN, "then the first pause"
    assert looks(patience, 100_000, comes=False) < 100
    while not looks(patience, 1, comes=True):
        pass
    assert looks(patience, 20 * PROOF, comes=True) == 20 * PROOF
    assert looks(patience, VAIN + SHORTEST, comes=False) == VAIN, "the pauses are short again"


def test_who_loses_its_core_while_it_polls_rests_longer() -> None:
    clock = Clock()
    patience = Patience(50e-6, clock)
    clock.turn = 4e-3
    assert looks(patience, 1 + SHORTEST, comes=False) == 1
    assert looks(patience, 4 * SHORTEST, comes=False) == 1
    assert looks(patience, 4 * LONGEST, comes=False) < 10


def test_most_waits_are_polled_for_where_most_come_in_time() -> None:
    chance, patience, polled = random.Random(1), Patience(50e-6, Clock()), 0
    for _ in range(10_000):
        polled += looks(patience, 1, comes=chance.random() < 0.9)
    assert polled > 9_000
