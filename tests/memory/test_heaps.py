"""Heaps: the part of the host's file from which a rank takes ranges without asking anybody."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvdlite.core.kernel_files import anonymous_file
from hvdlite.memory import shared
from hvdlite.memory.shared import Heap, SharedMemory
from tests.worlds import descriptors

LENGTH = 1 << 16


class Host:
    """Some ranks; `heaps[a][b]` is rank b's heap as rank a sees it."""

    def __init__(self, ranks: int) -> None:
        self.file = anonymous_file()
        self.memories = [SharedMemory(os.dup(self.file), rank) for rank in range(ranks)]
        self.heaps = [memory.heaps(ranks) for memory in self.memories]

    def own(self, rank: int) -> Heap:
        return self.heaps[rank][rank]

    @property
    def allocated(self) -> int:
        return os.fstat(self.file).st_blocks * 512


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(3)
    yield made
    for memory in made.memories:
        memory.close()
    os.close(made.file)


# docs/protocol.md#heaps
def test_what_one_rank_takes_all_see_and_no_two_overlap(host: Host) -> None:
    taken = [(rank, host.own(rank).take(nbytes)) for nbytes in (1, LENGTH, 3 * LENGTH) for rank in (2, 0, 1)]
    for number, (_, mine) in enumerate(taken):
        assert mine.bytes.size % LENGTH == 0 and not mine.bytes.any()
        mine.allocate(0, mine.bytes.size)
        mine.bytes[...] = number + 1
    for number, (rank, mine) in enumerate(taken):
        for heaps in host.heaps:
            assert (heaps[rank].mapped(mine.start, mine.bytes.size).bytes == number + 1).all()
    window = host.memories[0].window(LENGTH, (0,))[0]
    assert not window.any(), "nor do they overlap with the rest of the file"


def test_a_range_comes_back_without_pages_when_all_have_let_go(host: Host) -> None:
    heap, before = host.own(0), host.allocated
    taken, let_go = heap.take(LENGTH), [False, False]
    start = taken.start
    taken.allocate(0, LENGTH)
    taken.bytes[...] = 7
    heap.lend([taken], lambda: all(let_go))
    for rank in range(2):
        assert heap.take(LENGTH).start != start and host.allocated >= before + LENGTH
        let_go[rank] = True
    heap.take_back()
    assert host.allocated == before
    other = heap.take(2 * LENGTH)
    again = heap.take(LENGTH)
    assert other.start != start == again.start and not again.bytes.any()


def test_a_whole_heap_has_one_mapping(host: Host) -> None:
    """A mapping has a descriptor of its own."""
    before = len(descriptors("memfd"))
    taken = [host.own(0).take(LENGTH) for _ in range(20)]
    assert len(descriptors("memfd")) == before + 1
    del taken


@pytest.mark.parametrize("mapped", [0, 2 * LENGTH])
def test_what_is_not_in_the_mapping_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch, mapped: int) -> None:
    monkeypatch.setattr(shared, "HEAP_MAPPED", mapped)
    gc.collect()  # what other tests have left
    host, before = Host(2), len(descriptors("memfd"))
    taken = [host.own(0).take(LENGTH) for _ in range(5)]
    assert len(descriptors("memfd")) == before + (4 if mapped else 5)
    for number, mine in enumerate(taken):
        mine.allocate(0, LENGTH)
        mine.bytes[...] = number
        assert (host.heaps[1][0].mapped(mine.start, LENGTH).bytes == number).all()
        host.own(0).lend([mine], lambda: True)
    del mine
    taken.clear()
    assert not host.own(0).take(LENGTH).bytes.any()


LIMITED = """
import os, resource
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.memory.shared import SharedMemory
file = anonymous_file()
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
heaps = [SharedMemory(os.dup(file), rank).heaps(2) for rank in range(2)]
taken = heaps[0][0].take(1 << 24)
taken.allocate(0, 5)
taken.bytes[:5] = 7
print(heaps[1][0].mapped(taken.start, 1 << 24).bytes[:6].tolist())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit addresses")
def test_a_process_with_few_addresses_maps_what_it_uses() -> None:
    ended = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[7, 7, 7, 7, 7, 0]"


def test_a_closed_file_is_no_memory(host: Host) -> None:
    """`mmap` would take descriptor -1 for memory that nobody shares."""
    memory = host.memories[0]
    early = host.own(0).take(LENGTH)
    early.allocate(0, LENGTH)
    memory.close()
    early.bytes[...] = 3
    assert (host.heaps[1][0].mapped(early.start, LENGTH).bytes == 3).all(), "what is mapped remains"
    with pytest.raises(MemoryError, match="closed: the job has ended"):
        host.heaps[0][1].mapped(host.own(1).take(LENGTH).start, LENGTH)
    for make in (lambda: memory.window(LENGTH, (0,)), lambda: memory.range(LENGTH, (0,)), lambda: memory.mapped(0, LENGTH)):
        with pytest.raises(MemoryError):
            make()


def test_a_heap_that_is_exhausted_is_no_memory() -> None:
    file = os.memfd_create("short")
    os.ftruncate(file, 32 << 20)
    memory = SharedMemory(file, 0)
    heaps = memory.heaps(2)
    mine = heaps[0].take(4 << 20)
    with pytest.raises(MemoryError, match=f"no range of {8 << 20} bytes is left in this rank's part"):
        heaps[0].take(8 << 20)
    heaps[0].lend([mine], lambda: True)
    assert heaps[0].take(4 << 20).bytes.size == 4 << 20
    assert heaps[1].take(8 << 20).start >= 8 << 20 and memory.window(4 << 20, (0,))


def test_a_forked_child_frees_no_pages(host: Host) -> None:
    heap = host.own(0)
    taken = heap.take(LENGTH)
    taken.allocate(0, LENGTH)
    taken.bytes[...] = 9
    heap.lend([taken], lambda: True)
    pid = os.fork()
    if pid == 0:
        heap.take_back()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (taken.bytes == 9).all()


def test_a_mapping_takes_no_memory(host: Host) -> None:
    before = host.allocated
    taken = host.own(1).take(1 << 30)
    assert host.allocated == before and taken.bytes.size == 1 << 30
