"""The memory of messages between two ranks of a host: a ring of bytes for each pair, and a word on which each rank sleeps.

    area: a line for each rank | two lines for each pair (sender 0, receiver 0), (0, 1), ... | the rings of the pairs

A message is one piece or several: header | values, padded to a line. The sender appends pieces and stores the number of
bytes that it has ever written; the receiver takes them in order and stores the number that it has read. So each number has
one writer. A piece does not cross the end of the ring.

Rules (docs/protocol.md#message-rings)
- A sender that finds its ring empty may begin again at the ring's first byte (`base`), where memory is warm and has pages.
  No receiver uses an old `base`: it looks for a position only after it has seen that something was written later.
- Pages of a ring are allocated by its sender before it writes them. If there are none, it uses those that it has.
- A rank's word changes when it is to look at its rings. Every writer writes values that no other rank writes. So a rank that
  has read the word before it looked never sleeps on what it has missed.
- A receiver wakes the sender when the number that it has read crosses a multiple of an eighth of the ring; a sender sleeps
  only if there is more than that in the ring.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from hvdlite.core.array import Array
from hvdlite.memory.futex import shared_word

if TYPE_CHECKING:
    from hvdlite.memory.shared import SharedMemory

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
_WRITTEN, _BASE, _READ = 0, 1, LINE // 8
_LEFT: Final = 1  # of the words of 8 bytes in a rank's line


def control_bytes(ranks: int) -> int:
    """Return the size of the lines of ranks and pairs in bytes."""
    return -(-(ranks + 2 * ranks * ranks) * LINE // PAGE) * PAGE


def area_bytes(ranks: int, ring: int = RING_BYTES) -> int:
    """Return the length of an area in bytes; most of its pages are never allocated."""
    return control_bytes(ranks) + ranks * ranks * ring


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


class MessageArea:
    """One rank's view of an area. Rings are mapped when they are first used.

    Attributes:
        index: this rank's, among the ranks of the area.
        ranks: number of ranks.

    Args:
        start: where the area begins in the file.
        ring: bytes of a ring, a multiple of `PAGE`.

    Raises:
        MemoryError: if the system has no memory left.
    """

    def __init__(self, memory: SharedMemory, start: int, index: int, ranks: int, ring: int) -> None:
        self.index, self.ranks = index, ranks
        self._memory, self._start, self._ring = memory, start, ring
        length = control_bytes(ranks)
        memory.allocate(start, length)
        self._control = mmap.mmap(memory.descriptor, length, offset=start)
        self._words = memoryview(self._control).cast("q")
        self._sleepers = tuple(shared_word(self._control, rank * LINE) for rank in range(ranks))  # none once it is closed
        self._wakes = 0
        self._maps: dict[int, mmap.mmap] = {}
        self._writers: dict[int, RingWriter] = {}

    # --- sleeping --------------------------------------------------------------------------------------------------------

    def seen(self) -> int:
        """Return this rank's word; to be read before it looks at its rings."""
        sleepers = self._sleepers
        return sleepers[self.index].value if sleepers else 0

    def sleep(self, seen: int, seconds: float) -> None:
        """Sleep until another rank has woken this one since it has read its word as `seen`; may return early."""
        sleepers = self._sleepers
        if sleepers:
            sleepers[self.index].wait(seen, seconds)

    def wake(self, rank: int) -> None:
        """Let a rank, this one too, look at its rings."""
        sleepers = self._sleepers
        if not sleepers:
            return
        self._wakes += 1
        word = sleepers[rank]
        word.value = (self.index + 1 & 0xFFF) << 20 | self._wakes & 0xFFFFF
        word.wake()

    # --- rings -----------------------------------------------------------------------------------------------------------

    def writer(self, to: int) -> RingWriter:
        """Return this rank's end of the ring to another rank; there is one."""
        if to not in self._writers:
            pair, ring, start = self._pair(self.index, to)

            def allocate(begin: int, length: int) -> None:
                self._memory.allocate(start + begin, length)

            self._writers[to] = RingWriter(ring, pair, allocate, self._memory.fence)
        return self._writers[to]

    def reader(self, source: int) -> RingReader:
        """Return this rank's end of the ring from another rank; to be called once."""
        pair, ring, _ = self._pair(source, self.index)
        return RingReader(ring, pair, self._memory.fence)

    def has_written(self, source: int) -> bool:
        """Return whether a rank has ever sent something to this one."""
        return bool(self._words[(self.ranks + 2 * (source * self.ranks + self.index)) * LINE // 8 + _WRITTEN])

    def _pair(self, source: int, to: int) -> tuple[memoryview, Array, int]:
        number = source * self.ranks + to
        start = self._start + control_bytes(self.ranks) + number * self._ring
        self._maps[number] = mapping = mmap.mmap(self._memory.descriptor, self._ring, offset=start)
        line = (self.ranks + 2 * number) * LINE // 8
        return self._words[line:line + 2 * LINE // 8], np.frombuffer(mapping, np.uint8), start

    # --- the end ---------------------------------------------------------------------------------------------------------

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has closed its area: it sends nothing any more, but what it has sent can be read."""
        return bool(self._words[rank * LINE // 8 + _LEFT])

    def close(self) -> None:
        """Leave, wake the others, and unmap the area. Rings that nobody reads or writes any more lose their pages.

        A forked child calls `unmap` only.
        """
        self._words[self.index * LINE // 8 + _LEFT] = 1
        self._memory.flush()  # of two ranks that leave together, one sees that the other has left
        for rank in range(self.ranks):
            if rank != self.index:
                self.wake(rank)
        for source in range(self.ranks):
            if self.has_left(source) and self.has_written(source):
                self._pair(source, self.index)  # it may never have been mapped
        for number, mapping in self._maps.items():
            source, to = divmod(number, self.ranks)
            if self.has_left(source) and (self.has_left(to) or self._writers[to].is_empty):
                self._memory.free(mapping, 0, self._ring)
        self.unmap()

    def unmap(self) -> None:
        """Unmap everything that nobody has a view of. Nothing but `seen`, `sleep` and `wake` may be called any more."""
        self._writers.clear()
        self._maps.clear()
        self._sleepers = ()
        del self._words, self._control


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
