"""The memory of messages between two ranks of a host: a ring of bytes for each pair that has exchanged any.

    pairs: two lines for each pair: (sender 0, receiver 0), (0, 1), ...

A message is one piece or several: header | values, padded to a line. The sender appends pieces and stores the number of
bytes that it has ever written; the receiver takes them in order and stores the number that it has read. So each number has
one writer. A piece does not cross the end of the ring.

Rules (docs/protocol.md#message-rings)
- A sender that finds its ring empty may begin again at the ring's first byte (`base`), where memory is warm and has pages.
  No receiver uses an old `base`: it looks for a position only after it has seen that something was written later.
- Pages of a ring are allocated by its sender before it writes them. If there are none, it uses those that it has.
- The sender takes the ring from its own heap (`memory/shared.py`), and stores the place before anything else of the pair.
- A rank sleeps on its word (`memory/area.py`), which changes when it is to look at its rings.
- A receiver wakes the sender when the number that it has read crosses a multiple of an eighth of the ring; a sender sleeps
  only if there is more than that in the ring.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from hvdlite.core.array import Array
from hvdlite.memory.shared import Heap, Range

RING_BYTES: Final = 1 << 24
"""Bytes of a ring: what a rank sends to another one without waiting for it."""
PIECES: Final = 32
"""A piece has up to this part of the ring: a long message is copied in by one rank while another one copies it out."""
WAKES: Final = 8
"""How often a receiver wakes the sender while it reads as much as the ring holds."""
RESTARTS: Final = 16
"""A sender that has gone further than this part of the ring goes back to its beginning when the ring is empty."""
LINE: Final = 64
PAGE: Final = 1 << 16
_HEADER: Final = struct.Struct("=qqq")
_WRITTEN, _BASE, _PLACE, _READ = 0, 1, 2, LINE // 8


def pair_bytes(ranks: int) -> int:
    """Return the size of the lines of all pairs in bytes."""
    return 2 * ranks * ranks * LINE


class Piece(NamedTuple):
    """A piece of a message in a ring: the tag, the bytes of the whole message, and the values of this piece."""

    tag: int
    total: int
    values: Array


class RingWriter:
    """The sender's end of a ring.

    Attributes:
        is_short: whether it lacks pages; then a receiver wakes it less often.

    Args:
        ring: its bytes.
        pair: the lines of the pair, as words of 8 bytes.
        allocate: allocates pages for a range of the ring (begin, length), or raises `MemoryError`.
        fence: see `memory/fence.py`.
    """

    def __init__(self, ring: Array, pair: memoryview, allocate: Callable[[int, int], None],
                 fence: Callable[[], None] | None) -> None:
        self._ring, self._pair, self._allocate, self._fence = ring, pair, allocate, fence
        self._header = ring.data
        self._size, self._piece, self._restart = ring.size, ring.size // PIECES, ring.size // RESTARTS
        self._allocated = 0  # bytes from the ring's beginning that have pages
        self._written = self._base = 0
        self.is_short = False

    @property
    def is_empty(self) -> bool:
        """Whether the receiver has read everything."""
        return bool(self._pair[_READ] == self._written)

    def append(self, tag: int, total: int, rest: Array) -> int:
        """Append the next piece of a message; return how many of its values it has, -1 if there is no room now.

        Args:
            total: bytes of the message.
            rest: those that are still to be sent.

        Raises:
            MemoryError: if the ring has no pages at all, and there is no memory.
        """
        read = self._pair[_READ]
        if self._fence is not None:
            self._fence()
        position = (self._written - self._base) % self._size
        if read == self._written and position >= self._restart:
            self._pair[_BASE] = self._base = self._written
            position = 0
        count = min(rest.size, self._piece, self._size - position - LINE)
        if self._size - (self._written - read) < LINE + _padded(count):
            return -1
        if position + LINE + _padded(count) > self._allocated:
            count = self._with_pages(position, count)
            if count < 0:
                if read != self._written:
                    return -1
                self._pair[_BASE] = self._base = self._written
                position, count = 0, min(rest.size, self._piece, self._allocated - LINE)
        _HEADER.pack_into(self._header, position, tag, total, count)
        if count:
            self._ring[position + LINE:position + LINE + count] = rest[:count]
        self._written += LINE + _padded(count)
        if self._fence is not None:
            self._fence()
        self._pair[_WRITTEN] = self._written
        return count

    def _with_pages(self, position: int, count: int) -> int:
        """Return how many of `count` values have pages, -1 if there is no page for a header."""
        needed = position + LINE + _padded(count)
        wanted = min(self._size, max(2 * self._allocated, -(-needed // PAGE) * PAGE))
        try:
            self._allocate(self._allocated, wanted - self._allocated)
            self._allocated, self.is_short = wanted, False
        except MemoryError:
            if not self._allocated:
                raise
            self.is_short = True
        return min(count, self._allocated - position - LINE)


class RingReader:
    """The receiver's end of a ring. Arguments are those of `RingWriter`."""

    def __init__(self, ring: Array, pair: memoryview, fence: Callable[[], None] | None) -> None:
        self._ring, self._pair, self._fence = ring, pair, fence
        self._header = ring.data
        self._size, self._wake, self._read = ring.size, ring.size // WAKES, 0

    @property
    def used(self) -> int:
        """Bytes that the receiver has not read."""
        return int(self._pair[_WRITTEN]) - self._read

    @property
    def is_half_full(self) -> bool:
        """Whether the sender may soon have to wait."""
        return self.used > self._size // 2

    def peek(self) -> Piece | None:
        """Return the next piece, whose values are valid until `advance`; None if there is none."""
        if self._pair[_WRITTEN] == self._read:
            return None
        if self._fence is not None:
            self._fence()
        position = (self._read - self._pair[_BASE]) % self._size
        tag, total, count = _HEADER.unpack_from(self._header, position)
        return Piece(tag, total, self._ring[position + LINE:position + LINE + count])

    def advance(self, piece: Piece) -> bool:
        """Free the memory of the piece that `peek` has returned; return whether the sender is to be woken."""
        before = self._read
        self._read = before + LINE + _padded(piece.values.size)
        if self._fence is not None:
            self._fence()
        self._pair[_READ] = self._read
        return before // self._wake != self._read // self._wake


class Rings:
    """One rank's rings to and from the other ranks of its host. A rank makes those to others when it first uses them.

    Args:
        pairs: `pair_bytes` of zeros at first, shared between the ranks.
        index: this rank's, among those of the host.
        heaps: of each rank.
        ring: bytes of a ring, a multiple of `PAGE`.
    """

    def __init__(self, pairs: memoryview, index: int, heaps: Sequence[Heap], ring: int = RING_BYTES) -> None:
        self._index, self._heaps, self._ring = index, heaps, ring
        self._pairs = pairs.cast("q")
        self._writers: dict[int, RingWriter] = {}
        self._ranges: dict[tuple[int, int], Range] = {}  # by sender and receiver

    @property
    def heap(self) -> Heap:
        """This rank's."""
        return self._heaps[self._index]

    def writer(self, to: int) -> RingWriter:
        """Return this rank's end of the ring to another rank; there is one.

        Raises:
            MemoryError: if no range is left for it.
        """
        if to not in self._writers:
            taken = self._heaps[self._index].take(self._ring)
            self._ranges[self._index, to] = taken
            pair = self._pair(self._index, to)
            pair[_PLACE] = taken.start
            self._writers[to] = RingWriter(taken.bytes, pair, taken.allocate, taken.memory.fence)
        return self._writers[to]

    def reader(self, source: int) -> RingReader | None:
        """Return this rank's end of the ring from another rank, to be called once; None if nothing was ever sent."""
        pair = self._pair(source, self._index)
        if not pair[_WRITTEN]:
            return None
        fence = self._heaps[source].memory.fence
        if fence is not None:
            fence()
        ring = self._ranges[source, self._index] = self._heaps[source].mapped(pair[_PLACE], self._ring)
        return RingReader(ring.bytes, pair, fence)

    def close(self, has_left: Callable[[int], bool]) -> list[Range]:
        """Let go of all rings; return those of this rank's heap. What nobody reads or writes any more loses its pages.

        Args:
            has_left: whether a rank sends nothing any more; this one does not.
        """
        self._heaps[self._index].memory.flush()  # of two ranks that leave together, one sees that the other has left
        for source in range(len(self._heaps)):
            if source != self._index and has_left(source) and (source, self._index) not in self._ranges:
                with contextlib.suppress(MemoryError):  # the job has ended, and its memory with it
                    self.reader(source)  # what was sent is never read
        for (source, to), ring in self._ranges.items():
            if has_left(source) and (to == self._index or has_left(to) or self._writers[to].is_empty):
                ring.free(0, self._ring)
        own = [ring for (source, _), ring in self._ranges.items() if source == self._index]
        self._writers.clear()
        self._ranges.clear()
        return own

    def _pair(self, source: int, to: int) -> memoryview:
        line = 2 * (source * len(self._heaps) + to) * LINE // 8
        return self._pairs[line:line + 2 * LINE // 8]


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
