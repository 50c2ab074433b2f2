"""Told calls: whatever the schedule, all ranks request the same barriers, each one once. A model, without threads."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.ordered.told_calls import PATIENCE_SECONDS, ToldCalls

SECOND = 10**9


@dataclasses.dataclass
class _Barrier:
    size: int
    ranks: set[int] = dataclasses.field(default_factory=set)

    def done(self) -> bool:
        return len(self.ranks) == self.size

    def wait(self, timeout: float | None = None) -> None:
        assert self.done()


class _Rank:
    def __init__(self, rank: int, size: int, barriers: dict[tuple[int, str], _Barrier]) -> None:
        self.rank, self.told = rank, ToldCalls(self._request, PATIENCE_SECONDS)
        self._size, self._barriers = size, barriers

    def _request(self, sequence: int, text: str) -> _Barrier:
        barrier = self._barriers.setdefault((sequence, text), _Barrier(self._size))
        assert self.rank not in barrier.ranks, "requested twice"
        barrier.ranks.add(self.rank)
        return barrier


def _play_call(ranks: list[_Rank], sequence: int, texts: list[str], begun: list[int], written: list[int]) -> None:
    """Play one call: ranks say when they begin, and are seen `written` nanoseconds after that."""
    seen = [each + after for each, after in zip(begun, written, strict=True)]
    owed = [rank.told.owed for rank in ranks]
    complete = max(seen)
    for rank, start, text in zip(ranks, begun, texts, strict=True):
        for look in range(start + int(PATIENCE_SECONDS * SECOND), complete, SECOND):
            assert look < complete
            rank.told.waits(sequence, text)
    different = list(dict.fromkeys(texts))
    for rank in ranks:
        rank.told.made(sequence, different, max(begun) - min(begun), max(owed))


# docs/protocol.md#told-calls
@settings(max_examples=300, deadline=None)
@given(st.integers(2, 5), st.integers(0, 2**32))
def test_every_barrier_is_requested_by_all_ranks(size: int, seed: int) -> None:
    choice = random.Random(seed)
    barriers: dict[tuple[int, str], _Barrier] = {}
    ranks = [_Rank(rank, size, barriers) for rank in range(size)]
    now, calls = 0, choice.randint(1, 12)
    for sequence in range(1, calls + 1):
        begun = [now + choice.choice([0, SECOND, 3 * SECOND, 10 * SECOND]) for _ in ranks]
        written = [choice.choice([0, 0, 0, 0, 30 * SECOND]) for _ in ranks]  # a rank is stopped before others can see it
        texts = ["sum"] * size if choice.random() < 0.8 else [choice.choice(["sum", "gather"]) for _ in ranks]
        _play_call(ranks, sequence, texts, begun, written)
        now = max(map(sum, zip(begun, written, strict=True)))
        late = [each for (number, _), each in barriers.items() if number < sequence and not each.done()]
        assert not late, "pending although all ranks have made the next call, too"
    _play_call(ranks, calls + 1, ["sum"] * size, [now] * size, [0] * size)
    assert all(barrier.done() for barrier in barriers.values())


def test_the_ordinary_case_requests_nothing() -> None:
    barriers: dict[tuple[int, str], _Barrier] = {}
    ranks = [_Rank(rank, 3, barriers) for rank in range(3)]
    for sequence in range(1, 50):
        _play_call(ranks, sequence, ["sum"] * 3, [sequence * SECOND + rank * SECOND // 2 for rank in range(3)], [0] * 3)
    assert not barriers and ranks[0].told.owed == 0


def test_a_call_that_one_rank_makes_late_is_told_while_the_others_wait() -> None:
    barriers: dict[tuple[int, str], _Barrier] = {}
    ranks = [_Rank(rank, 3, barriers) for rank in range(3)]
    for rank in ranks[:2]:
        rank.told.waits(1, "sum")
        rank.told.waits(1, "sum")
        assert rank.told.owed == 1
    assert barriers[1, "sum"].ranks == {0, 1}
    for rank in ranks:
        rank.told.made(1, ["sum"], 9 * SECOND, 1)
    assert barriers[1, "sum"].done() and [rank.told.owed for rank in ranks] == [0, 0, 0]
