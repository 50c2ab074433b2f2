"""Rings of messages: what is written is read, in order, in memory that is used again and may run out."""

from __future__ import annotations

import os
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.core.array import Array
from hvdlite.memory.message_area import LINE, PIECES, MessageArea, RingReader, RingWriter
from hvdlite.memory.shared import SharedMemory, anonymous_file

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
    file = anonymous_file()
    memories = [SharedMemory(os.dup(file), rank) for rank in range(2)]
    areas = [memory.message_area((0, 1), 1 << 20) for memory in memories]
    assert areas[0] is not None and areas[1] is not None
    writer, reader = areas[0].writer(1), areas[1].reader(0)
    allocate = memories[0].allocate
    limit = [os.fstat(file).st_blocks * 512 + (1 << 16)]

    def scarce(start: int, length: int) -> None:
        if os.fstat(file).st_blocks * 512 + length > limit[0]:
            raise MemoryError
        allocate(start, length)

    memories[0].allocate = scarce  # type: ignore[method-assign]
    values = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    received, sent = bytearray(), 0
    while sent < values.size:
        count = writer.append(7, values.size, values[sent:])
        if count < 0:
            assert writer.is_short
            while piece := reader.peek():
                received += piece.values.tobytes()
                reader.advance(piece)
        sent += max(count, 0)
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


def areas_of(count: int, members: tuple[int, ...]) -> tuple[int, list[MessageArea | None]]:
    file = anonymous_file()
    return file, [SharedMemory(os.dup(file), rank).message_area(members, RING) for rank in range(count)]


def allocated(file: int) -> int:
    return os.fstat(file).st_blocks * 512


def test_every_pair_has_a_ring_of_its_own_and_others_have_none() -> None:
    _, areas = areas_of(4, (0, 2, 3))
    assert areas[1] is None
    members = [area for area in areas if area is not None]
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    for a, b in pairs:
        assert not members[b].has_written(a)
        members[a].writer(b).append(10 * a + b, 1, np.array([16 * a + b], np.uint8))
    for a, b in pairs:
        piece = members[b].reader(a).peek()
        assert members[b].has_written(a) and piece is not None
        assert piece.tag == 10 * a + b and piece.values.tolist() == [16 * a + b]


def test_pages_go_back_when_both_ranks_have_left_or_all_is_read() -> None:
    for order in ((0, 1), (1, 0)):
        file, (first, second) = areas_of(2, (0, 1))
        assert first is not None and second is not None
        empty, ends = allocated(file), (first, second)
        first.writer(1).append(0, 5, np.zeros(5, np.uint8))
        second.writer(0).append(0, 5, np.zeros(5, np.uint8))
        piece = (reader := second.reader(0)).peek()  # the other ring's message is never read
        assert piece is not None and allocated(file) >= empty + (2 << 16)
        reader.advance(piece)
        del piece, reader
        ends[order[0]].close()
        assert ends[order[1]].has_left(order[0])
        ends[order[1]].close()
        assert allocated(file) == empty


def test_a_message_outlives_its_sender() -> None:
    _, (first, second) = areas_of(2, (0, 1))
    assert first is not None and second is not None
    first.writer(1).append(0, 3, np.array([1, 2, 3], np.uint8))
    first.close()
    piece = second.reader(0).peek()
    assert second.has_left(0) and piece is not None and piece.values.tolist() == [1, 2, 3]
