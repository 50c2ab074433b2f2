"""What the ranks of a host write of their calls for each other: the memory of a mailbox, or of a group.

    rank 0: line | even calls: head, text | odd calls: head, text      rank 1: ...
    then, if calls bring their values: rank 0: even, odd | rank 1: ...

A line has the word on which the rank sleeps, and whether the rank has left. A head has the number of a call, the length of
its text, the text's digest, how many rows its values have, and the number in the name of a call that has one; the call's own
number is written after the rest. A rank writes only its own line, heads, texts and values; but any rank changes a word, and
none relies on its value.

Rules (docs/protocol.md#areas)
- A rank writes call s + 2 only when all ranks have begun call s + 1. Then all have read what it wrote of call s.
- Numbers of calls only grow, so that a head never looks like one of an earlier call.
- No pages are freed before all ranks have let go of the area: a slower rank may still read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np

from hvdlite.core.array import Array
from hvdlite.memory.futex import shared_word

LINE: Final = 64
"""Bytes of a line and of a head."""
TEXT: Final = 960
"""Bytes of the longest text."""
NUMBER, LENGTH, DIGEST, ROWS, NAME_NUMBER = range(5)
"""The words of a head."""
LEFT, LET_GO, REDUCED = range(3)
"""The words of a rank's line. `LEFT`: once it has left, one more than the last call that it has completed; negative if the
others learn the reason in another way. `LET_GO`: `UNUSED` when it uses what the ranks share no more, `DONE` when it never
looks again whether the others do. `REDUCED`: the last call in which it has reduced its part of what all ranks share."""
UNUSED, DONE = 1, 2
_RANK: Final = LINE + 2 * (LINE + TEXT)
_LEFT_AT: Final = 16


def area_bytes(ranks: int, capacity: int = 0) -> int:
    """Return the size of an area in bytes.

    Args:
        capacity: bytes of a call's values.
    """
    return _padded(ranks * _RANK) + 2 * ranks * _padded(capacity)


class Area:
    """One rank's view of an area.

    Attributes:
        index: this rank's, among those of the area.
        size: number of ranks.
        word: on which this rank sleeps.
        lines: of each rank: `LEFT`, `LET_GO`, `REDUCED`.
        heads: of each rank and parity of the call: `NUMBER`, `LENGTH`, `DIGEST`, `ROWS`, `NAME_NUMBER`.
        texts: likewise, bytes.
        values: likewise, arrays of `capacity` bytes.

    Args:
        memory: `area_bytes` of zeros at first, shared between the ranks.
    """

    def __init__(self, memory: Any, index: int, ranks: int, capacity: int = 0) -> None:
        self.index, self.size, self.capacity = index, ranks, capacity
        whole, everything = memoryview(memory).cast("B"), np.frombuffer(memory, np.uint8)
        starts = [rank * _RANK for rank in range(ranks)]
        self.lines = [whole[start + _LEFT_AT:start + _LEFT_AT + 24].cast("q") for start in starts]
        heads = [[start + LINE + parity * (LINE + TEXT) for parity in range(2)] for start in starts]
        self.heads = [[whole[head:head + 40].cast("q") for head in both] for both in heads]
        self.texts = [[whole[head + LINE:head + LINE + TEXT] for head in both] for both in heads]
        first, each = _padded(ranks * _RANK), _padded(capacity)
        self.values: list[list[Array]] = [
            [everything[start:start + capacity] for start in (first + 2 * rank * each, first + (2 * rank + 1) * each)]
            for rank in range(ranks)]
        self._words = [shared_word(memory, start) for start in starts]
        self.word = self._words[index]
        self._everybody = range(ranks)
        self._changes = itertools.count(1)  # words are 0 at first

    def wake(self, ranks: Iterable[int] | None = None) -> None:
        """Let ranks look again that sleep, by default all; callable from any thread."""
        value = (next(self._changes) * self.size + self.index) & 0xFFFFFFFF  # that no word has had lately
        for rank in self._everybody if ranks is None else ranks:
            word = self._words[rank]
            word.value = value
            word.wake()

    def all_let_go(self, least: int) -> Callable[[], bool]:
        """Return whether all ranks have let go according to their lines, as a function that lasts longer than `release`."""
        lines = self.lines
        return lambda: all(line[LET_GO] >= least for line in lines)

    def end_looking(self) -> Callable[[], None]:
        """Return a function that records, after `release`, that this rank never looks at the lines again."""
        line = self.lines[self.index]

        def done() -> None:
            line[LET_GO] = DONE
        return done

    def has_left(self, rank: int) -> bool:
        """Return whether a rank makes no calls any more; of an area that was released, True."""
        return not self.lines or self.lines[rank][LEFT] != 0

    def leave(self, completed: int, *, is_reason: bool = True) -> None:
        """This rank makes no calls any more; those that wait see it. Again is fine.

        Args:
            completed: the number of the last call that it has completed; 0 for none.
            is_reason: whether this ends the others' calls; else they learn the reason in another way.
        """
        lines = self.lines
        if lines and lines[self.index][LEFT] <= 0:  # else a thread of this rank is late: the others have seen it
            lines[self.index][LEFT] = 1 + completed if is_reason else -1 - completed
            self.wake()

    def release(self, let_go: int = DONE) -> None:
        """Use the memory no more. What is written now goes nowhere.

        Args:
            let_go: what this rank's line has then; 0 if a thread may still use what the ranks share: nobody else gets that
                before the job ends.
        """
        lines, self.lines, self.heads, self.texts, self.values = self.lines, [], [], [], []
        self._words = [shared_word(bytearray(4), 0)] * self.size
        self.word = self._words[self.index]
        if lines:
            lines[self.index][LET_GO] = let_go


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
