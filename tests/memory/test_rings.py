"""Rings of messages: what is written is read, in order, in memory that is used again and may run out."""

from __future__ import annotations

import os
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.core.array import Array
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.memory.rings import LINE, PIECES, RingReader, Rings, RingWriter, pair_bytes
from hvdlite.memory.shared import SharedMemory

RING = 1 << 16


class Pages:
    """Allocates pages as long as there are some, and knows which bytes have them."""

    def __init__(self, available: int) -> None:
        self.available, self.allocated = available, 0

    def __call__(self, begin: int, length: int) -> None:
        assert begin == self.allocated
        if begin + length > self.available:
            raise MemoryError
        self.allocated += length


def ring(available: int = RING) -> tuple[RingWriter, RingReader, Array, Pages]:
    pair, memory, pages = memoryview(bytearray(2 * LINE)).cast("q"), np.zeros(RING, np.uint8), Pages(available)
    return RingWriter(memory, pair, pages, None), RingReader(memory, pair, None), memory, pages


# docs/protocol.md#message-rings
@settings(deadline=None, max_examples=300)
@given(sizes=st.lists(st.one_of(st.integers(0, 200), st.integers(0, 3 * RING // PIECES)), min_size=1, max_size=60),
       schedule=st.randoms(use_true_random=False), eager=st.floats(0.1, 0.9))
def test_what_is_written_is_read(sizes: list[int], schedule: object, eager: float) -> None:
    """Against a queue of bytes; the memory of a piece that has been read is overwritten at once."""
    received: list[tuple[int, bytes]] = []
    writer, reader, _, pages = ring()
    random = schedule.random  # type: ignore[attr-defined]
    numbers = np.random.default_rng(len(sizes))
    to_send = deque((tag, numbers.integers(0, 256, size, np.uint8)) for tag, size in enumerate(sizes))
    expected = list(to_send)
    sent, came = 0, bytearray()
    while len(received) < len(sizes):
        if to_send and random() < eager:
            tag, values = to_send[0]
            count = writer.append(tag, values.size, values[sent:])
            assert count >= 0 or not writer.is_empty
            sent += max(count, 0)
            if count >= 0 and sent == values.size:
                to_send.popleft()
                sent = 0
        piece = reader.peek() if random() < 0.5 else None
        if piece is not None:
            came += piece.values.tobytes()
            piece.values[...] = 0xEE
            if len(came) == piece.total:
                received.append((piece.tag, bytes(came)))
                came.clear()
            reader.advance(piece)
    assert received == [(tag, values.tobytes()) for tag, values in expected]
    assert writer.is_empty and reader.used == 0 and pages.allocated <= RING


def test_a_sender_that_finds_no_room_is_woken_before_the_ring_is_empty() -> None:
    writer, reader, _, _ = ring()
    values = np.zeros(10 * RING, np.uint8)
    for length in (1, 63, 1000, RING // PIECES, 5 * RING):
        for _ in range(100):
            while writer.append(0, length, values[:length]) >= 0:
                pass
            wakes = 0
            while piece := reader.peek():
                wakes += reader.advance(piece)
            assert wakes and writer.is_empty


def test_a_ring_that_is_read_at_once_takes_few_pages() -> None:
    writer, reader, _, pages = ring()
    for _ in range(1000):
        assert writer.append(0, 1000, np.zeros(1000, np.uint8)) == 1000
        piece = reader.peek()
        assert piece is not None
        reader.advance(piece)
    assert pages.allocated <= RING


def test_a_ring_without_more_memory_uses_what_it_has() -> None:
    host = Host(2, 1 << 20)
    file, memories = host.file, host.memories
    allocate = memories[0].allocate
    limit = [os.fstat(file).st_blocks * 512 + (1 << 16)]

    def scarce(start: int, length: int) -> None:
        if os.fstat(file).st_blocks * 512 + length > limit[0]:
            raise MemoryError
        allocate(start, length)

    memories[0].allocate = scarce  # type: ignore[method-assign]
    writer = host.rings[0].writer(1)
    values = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    reader: RingReader | None = None
    received, sent = bytearray(), 0
    while sent < values.size:
        count = writer.append(7, values.size, values[sent:])
        if count < 0:
            assert writer.is_short
            reader = reader or host.reader(0, 1)
            while piece := reader.peek():
                received += piece.values.tobytes()
                reader.advance(piece)
        sent += max(count, 0)
    assert reader is not None
    while piece := reader.peek():
        received += piece.values.tobytes()
        reader.advance(piece)
    assert bytes(received) == values.tobytes()
    assert os.fstat(file).st_blocks * 512 <= limit[0]
    limit[0] = 1 << 30
    assert writer.append(7, 1 << 19, np.zeros(1 << 19, np.uint8)) >= 0


def test_a_ring_without_any_memory_is_no_memory() -> None:
    writer, reader, _, pages = ring(available=0)
    with pytest.raises(MemoryError):
        writer.append(0, 1, np.zeros(1, np.uint8))
    assert reader.peek() is None
    pages.available = RING
    assert writer.append(0, 1, np.ones(1, np.uint8)) == 1
    piece = reader.peek()
    assert piece is not None and piece.values.tolist() == [1]


class Host:
    """Rings between the ranks of a host.

    Attributes:
        left: the ranks that have closed their rings.
    """

    def __init__(self, ranks: int, ring: int = RING) -> None:
        self.file, self._pairs = anonymous_file(), memoryview(bytearray(pair_bytes(ranks)))
        self.memories = [SharedMemory(os.dup(self.file), rank) for rank in range(ranks)]
        self.heaps = [memory.heaps(ranks) for memory in self.memories]
        self.rings = [Rings(self._pairs, rank, self.heaps[rank], ring) for rank in range(ranks)]
        self.left: set[int] = set()

    def reader(self, source: int, to: int) -> RingReader:
        reader = self.rings[to].reader(source)
        assert reader is not None
        return reader

    def close(self, rank: int) -> None:
        self.left.add(rank)
        rings = self.rings[rank].close(self.left.__contains__)
        self.heaps[rank][rank].lend(rings, lambda: len(self.left) == len(self.rings))

    @property
    def allocated(self) -> int:
        return os.fstat(self.file).st_blocks * 512


def test_every_pair_has_a_ring_of_its_own() -> None:
    host = Host(3)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    for a, b in pairs:
        assert host.rings[b].reader(a) is None
        host.rings[a].writer(b).append(10 * a + b, 1, np.array([16 * a + b], np.uint8))
    for a, b in pairs:
        piece = host.reader(a, b).peek()
        assert piece is not None and piece.tag == 10 * a + b and piece.values.tolist() == [16 * a + b]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pages_go_back_when_both_ranks_have_left_or_all_is_read(order: tuple[int, int]) -> None:
    host = Host(2)
    empty = host.allocated
    for rank in range(2):
        host.rings[rank].writer(1 - rank).append(0, 5, np.zeros(5, np.uint8))
    piece = (reader := host.reader(0, 1)).peek()  # the other ring's message is never read
    assert piece is not None and host.allocated >= empty + (2 << 16)
    reader.advance(piece)
    del piece, reader
    for rank in order:
        host.close(rank)
    assert host.allocated == empty


def test_a_message_outlives_its_sender() -> None:
    host = Host(2)
    host.rings[0].writer(1).append(0, 3, np.array([1, 2, 3], np.uint8))
    host.close(0)
    host.heaps[0][0].take_back()
    piece = host.reader(0, 1).peek()
    assert piece is not None and piece.values.tolist() == [1, 2, 3]


def test_a_ring_comes_back_to_its_heap_when_all_ranks_have_let_go() -> None:
    """Not only those that have used it: they all have the lines of its pair."""
    host = Host(3)
    heap = host.heaps[0][0]
    host.rings[0].writer(1).append(0, 3, np.ones(3, np.uint8))
    first = heap.take(RING).start
    for rank in (1, 0):
        host.close(rank)
    assert heap.take(RING).start == first + RING
    host.close(2)
    assert heap.take(RING).start == first - RING
