"""The memory of a mailbox: two buffers for each rank, used in turn, and a word on which ranks sleep.

    rank 0, even rounds: head | text | values      rank 0, odd rounds: ...      rank 1, even rounds: ...

A head holds the number of the round and the length of the text. It is written after the rest. A rank writes only its own
buffers; any rank changes the word, and none relies on its value.

Rules (docs/protocol.md#mailboxes)
- A rank writes round r + 1 only when round r is complete. Then every rank has finished round r - 1, whose buffer it uses.
- Numbers of rounds only grow, so that a head never looks like one of an earlier round.
- No pages are freed before the end of the world: a slower rank may still read them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hvdlite.core.array import Array
from hvdlite.memory.futex import Futex

HEAD: Final = 64
"""Bytes of a head; of the first one, the second half has the word."""
TEXT: Final = 960
"""Bytes of the longest text."""
_WORD: Final = 32


def area_bytes(capacity: int, ranks: int) -> int:
    """Return the size of an area in bytes.

    Args:
        capacity: bytes of the largest tensor.
    """
    return 2 * _buffer_bytes(capacity) * ranks


def _buffer_bytes(capacity: int) -> int:
    return HEAD + TEXT + -(-capacity // HEAD) * HEAD


class MailboxArea:
    """One rank's view of an area.

    Attributes:
        index: this rank's, in the process set.
        others: the indices of the other ranks.
        heads: of each rank and parity of the round: the round and the length of the text.
        texts: likewise, bytes.
        values: likewise, arrays of bytes.
        word: changes when a rank that sleeps on it is to look.

    Args:
        memory: `area_bytes` of zeros at first, shared between the ranks.
    """

    def __init__(self, memory: Any, index: int, ranks: int, capacity: int) -> None:
        self.index, self.capacity = index, capacity
        self.others = [other for other in range(ranks) if other != index]
        whole, size = memoryview(memory), _buffer_bytes(capacity)
        everything = np.frombuffer(memory, np.uint8)
        starts = [[(2 * rank + parity) * size for parity in range(2)] for rank in range(ranks)]
        self.heads = [[whole[start:start + 16].cast("q") for start in both] for both in starts]
        self.texts = [[whole[start + HEAD:start + HEAD + TEXT] for start in both] for both in starts]
        self.values: list[list[Array]] = [
            [everything[start + HEAD + TEXT:start + size] for start in both] for both in starts]
        self.word = Futex(memory, _WORD)
