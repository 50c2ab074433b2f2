"""The memory of an ordered group on one host: the board where each rank says what it calls, and a word on which ranks sleep.

    word | rank 0: line | even calls: head, text | odd calls: head, text | rank 1: line | ...

A line says whether the rank has left, and after which call. A head holds the number of a call, a digest of its text and the
length of the text; the first one is written after the rest.
A rank writes only its own line, heads and texts; any rank changes the word, and none relies on its value.

Rules (docs/protocol.md#ordered-groups)
- A rank writes call s + 2 only when all ranks have begun call s + 1. Then all have read what it wrote of call s.
- No pages are freed before the end of the group: a slower rank may still read them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from hvdlite.memory.futex import shared_word

LINE: Final = 64
"""Bytes of the word's place, of a line, and of a head."""
TEXT: Final = 960
"""Bytes of the longest text; a longer one is cut."""
_RANK: Final = LINE + 2 * (LINE + TEXT)


def area_bytes(ranks: int) -> int:
    """Return the size of an area in bytes."""
    return LINE + ranks * _RANK


class GroupArea:
    """One rank's view of an area.

    Attributes:
        index: this rank's, among those of the host.
        size: number of ranks on the host.
        lines: of each rank: 0 while it is there; else one more than the number of the last call that it has completed.
        heads: of each rank and parity of the call: its number, and the text's digest and length.
        texts: likewise, bytes.
        word: changes when ranks that sleep on it are to look.

    Args:
        memory: `area_bytes` of zeros at first, shared between the ranks.
        fence: as for `SharedMemory`.
    """

    def __init__(self, memory: Any, index: int, ranks: int, fence: Callable[[], None] | None) -> None:
        self.index, self.size, self.fence = index, ranks, fence
        whole = memoryview(memory)
        starts = [LINE + rank * _RANK for rank in range(ranks)]
        self.lines = [whole[start:start + 8].cast("q") for start in starts]
        heads = [[start + LINE + parity * (LINE + TEXT) for parity in range(2)] for start in starts]
        self.heads = [[whole[head:head + 24].cast("q") for head in both] for both in heads]
        self.texts = [[whole[head + LINE:head + LINE + TEXT] for head in both] for both in heads]
        self.word = shared_word(memory, 0)
        self._rings = itertools.count(1)  # the word is 0 at first

    def release(self) -> None:
        """Use the memory no more; it is unmapped when no thread sleeps there any more. What is written now goes nowhere."""
        self.lines, self.heads, self.texts = [], [], []
        self.word = shared_word(bytearray(4), 0)

    def ring(self, ranks: Sequence[int] = ()) -> None:
        """Let all ranks of the host that sleep look again; callable from any thread.

        Args:
            ranks: for planes; all ranks share one word.
        """
        self.word.value = (next(self._rings) * self.size + self.index) & 0xFFFFFFFF  # a value that it has not had lately
        self.word.wake()
