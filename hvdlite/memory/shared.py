"""The shared memory file of a host: a segment for each process set, windows for fusion buffers, and ranges for others.

The file has no name. On Linux it is a `memfd`, so that the size of /dev/shm does not limit it and a crash leaves nothing
behind; where the system has none, or refuses it (a sandbox), it is a file that is unlinked before use (macOS: untested). Its
descriptor is passed over a Unix socket.

    segment: one arrival counter per rank, 64 bytes apart | slot (rank 0, region 0) | (0, 1) | (0, 2) | (1, 0) | ...
    window:  rank 0's part | rank 1's part | ...

Rules (docs/protocol.md#slots, #staging-regions, #allocation, #memory-order)
- Pages are allocated with `posix_fallocate` before they are written: a lack of memory is a `MemoryError`, never SIGBUS.
- The file is sparse and of fixed length (2**62 bytes, or what the file system supports). Each segment or window is the next
  range of it. All ranks, members or not, request the same ranges in the same order, so they agree without communication.
  Ranges are not reused; when the file is exhausted, a request is a `MemoryError`.
- A part of the file, the heaps, is divided between the ranks. From its own heap a rank takes ranges without asking anybody,
  and notifies those that share them. They come back to it, and are used again.
- A staging slot is written by its own rank only. A window's part is written by other ranks only within a reduction.
- A window stays mapped while a view of it exists (for example a framework's gradient). A rank's pages are freed with its
  last view; no other rank reads them by then, because a reduction ends with a barrier. A forked child has the mappings, but
  frees no pages: they belong to its parent.
- On machines that reorder stores, counters alone do not order memory: a barrier calls the host's fence, see
  `memory/fence.py`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.core.array import Array
from hvdlite.memory.fence import Fence, fence_file

COUNTER_STRIDE = 64
REGIONS = 3
"""Staging regions of a segment, see `planes/staging.py`."""
PAGE = 1 << 16
HUGE_PAGE = 1 << 21
HEAP_MAPPED = 1 << 38
"""Bytes of a heap that are mapped as a whole; of addresses, not of memory."""


def _nothing() -> None:
    pass


class _Mapping(mmap.mmap):
    """A mapping of a range of the file; exists as long as any view of it."""

    own: tuple[int, int] = (0, 0)  # this rank's part: offset and length
    process = 0  # the process id of the rank

    def __del__(self) -> None:
        _free_pages(self, self.process, *self.own)


def _free_pages(mapping: mmap.mmap, process: int, start: int, length: int) -> bool:
    """Free the pages of a range, unless this is a forked child of their process; return whether it has zeros now."""
    if os.getpid() != process:
        return False
    try:
        mapping.madvise(mmap.MADV_REMOVE, start, length)
    except (AttributeError, OSError, ValueError):
        return False  # not Linux, or a file system without holes: the pages are freed with the file
    return True


class Range:
    """A range of the file, as one rank has mapped it.

    Attributes:
        start: where it begins in the file.
        bytes: its memory; valid as long as a view of it exists.
        memory: the file.
    """

    def __init__(self, memory: SharedMemory, start: int, nbytes: int, mapping: mmap.mmap, at: int) -> None:
        self.memory, self.start = memory, start
        self._mapping, self._at = mapping, at  # the range begins at this byte of the mapping
        self.bytes: Array = np.frombuffer(mapping, np.uint8, nbytes, at)

    def part(self, begin: int, nbytes: int) -> Range:
        """Return a part of it."""
        return Range(self.memory, self.start + begin, nbytes, self._mapping, self._at + begin)

    def allocate(self, begin: int, length: int) -> None:
        """Allocate pages for a part, or raise `MemoryError`."""
        self.memory.allocate(self.start + begin, length)

    def free(self, begin: int, length: int) -> bool:
        """Free the pages of a part, if that is possible; return whether it has zeros now. In a forked child, do nothing."""
        return _free_pages(self._mapping, self.memory.process, self._at + begin, length)


class Segment:
    """The shared memory of a process set's ranks: barrier counters and staging slots.

    Args:
        range_: of `segment_bytes`; its first `counter_bytes` have pages.

    Attributes:
        arrivals: the number of barriers that each rank has reached, by index in the set; written by that rank.
        fence: see `SharedMemory`.
        flush: a fence on every machine; private to this rank where the machine preserves the order of stores.
        slot: bytes of one staging slot.
        regions: how many slots each rank has.
    """

    regions = REGIONS

    def __init__(self, range_: Range, index: int, ranks: int, slot: int) -> None:
        self.slot = slot = _rounded(slot)
        self.fence, self.flush = range_.memory.fence, range_.memory.flush
        self._range, self._index = range_, index
        self._counter_bytes = counter_bytes(ranks)
        self.arrivals = range_.bytes[:ranks * COUNTER_STRIDE].view(np.int64)[::COUNTER_STRIDE // 8]
        self._allocated = [0] * REGIONS  # bytes of this rank's slots that have pages

    @property
    def allocated(self) -> int:
        """Bytes of this rank's slots that have pages."""
        return sum(self._allocated)

    def staging(self, index: int, region: int) -> Array:
        """Return a rank's slot of a region, as bytes; only the rank itself writes to it."""
        start = self._start_of(index, region)
        return self._range.bytes[start:start + self.slot]

    def reserve(self, region: int, nbytes: int) -> None:
        """Allocate pages for the first `nbytes` bytes of this rank's slot of `region`.

        Raises:
            MemoryError: if the system has no memory left, with the requested size.
        """
        if nbytes <= self._allocated[region]:
            return
        wanted = min(self.slot, max(_rounded(nbytes), 2 * self._allocated[region]))
        start = self._start_of(self._index, region)
        self._range.allocate(start + self._allocated[region], wanted - self._allocated[region])
        self._allocated[region] = wanted

    def release(self) -> None:
        """Free this rank's pages; called when all ranks of the set have finished reading them."""
        self._range.free(self._start_of(self._index, 0), REGIONS * self.slot)

    def close(self) -> None:
        """Let go of the memory, which is unmapped with its last view. The pages remain: a slower rank may read them."""
        del self.arrivals, self._range

    def _start_of(self, index: int, region: int) -> int:
        return self._counter_bytes + (index * REGIONS + region) * self.slot


class _File:
    """A descriptor; closed when nobody has this object: until then its number does not come to mean another file."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class SharedMemory:
    """One rank's handle of the host's shared memory file.

    Attributes:
        process: the process id of the rank.

    Args:
        descriptor: from `anonymous_file`, the same file on all ranks; owned by this object.
        rank: this rank.
        fence: the host's fence, owned by this object; None on machines that need none.
    """

    def __init__(self, descriptor: int, rank: int, fence: Fence | None = None) -> None:
        self._file: _File | None = _File(descriptor)
        self.process = os.getpid()
        self.fence: Callable[[], None] | None = fence
        self.flush: Callable[[], None] = fence or Fence(fence_file())
        self._rank = rank
        self._heaps: list[Heap] = []
        self._end, self._length = 0, os.fstat(descriptor).st_size  # the end of the ranges in use, and of all

    def range(self, nbytes: int, ranks: Sequence[int], pages: int = 0) -> Range | None:
        """Return the next range, whose first `pages` bytes have pages; None if this rank is not one of `ranks`.

        Raises:
            MemoryError: if the system has no memory left, or (on all ranks) the file is exhausted. Ranks remain in step.
        """
        start = self._next_range(nbytes, PAGE)
        if self._rank not in ranks:
            return None
        if pages:
            self.allocate(start, pages)
        return self.mapped(start, nbytes)

    def mapped_range(self, nbytes: int) -> Range:
        """Return the next range, without pages, on every rank.

        Raises:
            MemoryError: on all ranks, when the file is exhausted.
        """
        return self.mapped(self._next_range(nbytes, PAGE), nbytes)

    def segment(self, ranks: Sequence[int], slot: int) -> Segment | None:
        """Return the next segment, for a process set; None if this rank is not one of `ranks`.

        Raises:
            MemoryError: as for `range`.
        """
        found = self.range(segment_bytes(len(ranks), slot), ranks, counter_bytes(len(ranks)))
        return None if found is None else Segment(found, list(ranks).index(self._rank), len(ranks), slot)

    def window(self, nbytes: int, ranks: Sequence[int]) -> list[Array]:
        """Return the next window: an array of `nbytes` zero bytes for each of `ranks`; an empty list on other ranks.

        Raises:
            MemoryError: as for `segment`.
        """
        step = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
        part = max(1, -(-nbytes // step)) * step
        start = self._next_range(part * len(ranks), step)
        if self._rank not in ranks:
            return []
        index = list(ranks).index(self._rank)
        self.allocate(start + index * part, part)
        mapping = self.mapping(start, part * len(ranks), _Mapping)
        assert isinstance(mapping, _Mapping)
        mapping.own, mapping.process = (index * part, part), self.process
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # this kernel has no huge pages for shared memory
        everything = np.frombuffer(mapping, np.uint8)
        return [everything[each * part:each * part + nbytes] for each in range(len(ranks))]

    def heaps(self, count: int) -> list[Heap]:
        """Reserve half of what is left of the file for heaps, one for each rank of the host."""
        begin = -(-self._end // HUGE_PAGE) * HUGE_PAGE
        each = (self._length - begin) // 2 // count // HUGE_PAGE * HUGE_PAGE
        self._end = begin + count * each
        self._heaps = [Heap(self, begin + index * each, each) for index in range(count)]
        return self._heaps

    def close(self) -> None:
        """Close the file; mappings remain, and the fence while a segment has it."""
        self.flush, self.fence = _nothing, self.fence and _nothing
        for heap in self._heaps:
            heap.close()
        self._file = None

    def allocate(self, start: int, length: int) -> None:
        """Allocate pages for a range, or raise `MemoryError`."""
        if not hasattr(os, "posix_fallocate"):
            return  # macOS: a sparse file on disk
        file = self._open_file()
        try:
            os.posix_fallocate(file.descriptor, start, length)
        except OSError as error:
            raise MemoryError(f"no memory for {length} bytes shared between ranks ({error}); lower HVDLITE_SHM_SLOT, or "
                              "turn learned buckets off with HVDLITE_BUCKET_SIZE=0") from error
        finally:
            del file  # whoever keeps the error would keep it open

    def mapping(self, start: int, nbytes: int, kind: type[mmap.mmap] = mmap.mmap) -> mmap.mmap:
        """Return a mapping of a range of the file."""
        file = self._open_file()
        try:
            return kind(file.descriptor, nbytes, offset=start)
        finally:
            del file

    def _open_file(self) -> _File:
        file = self._file
        if file is None:
            raise MemoryError("the memory that ranks share is closed: the job has ended")
        return file

    def mapped(self, start: int, nbytes: int) -> Range:
        """Return a range of the file with a mapping of its own."""
        return Range(self, start, nbytes, self.mapping(start, nbytes), 0)

    def _next_range(self, nbytes: int, alignment: int) -> int:
        start = -(-self._end // alignment) * alignment
        if start + nbytes > self._length:
            raise MemoryError(f"no range of {nbytes} bytes is left in the {self._length} bytes of the file that ranks "
                              "share; raise the limit on the size of files (ulimit -f)")
        self._end = start + nbytes
        return start


class Heap:
    """The part of the host's file from which one rank takes ranges, as another rank of the host or this one sees it.

    Most of it is mapped as a whole, because a mapping has a descriptor of its own. Where the address space is limited
    (`ulimit -v`), and in the rest of the heap, each range is.

    Args:
        begin: in the file.

    Attributes:
        memory: the file.
    """

    def __init__(self, memory: SharedMemory, begin: int, nbytes: int) -> None:
        self.memory, self._begin, self._end = memory, begin, begin + nbytes
        self._mapping: mmap.mmap | None = None
        self._mapped = min(nbytes, HEAP_MAPPED)  # of the heap's first bytes
        self._lock = threading.RLock()  # guards the rest
        self._next = begin
        self._free: dict[int, list[Range]] = {}  # by length
        self._lent: list[tuple[Sequence[Range], Callable[[], bool], Callable[[], object]]] = []

    def take(self, nbytes: int) -> Range:
        """Return a range of zeros, without pages; only the heap's own rank calls this.

        Raises:
            MemoryError: if there is none left.
        """
        nbytes = _rounded(nbytes)
        self.take_back()
        with self._lock:
            free = self._free.get(nbytes)
            if free:
                return free.pop()
            start = self._next
            if start + nbytes > self._end:
                raise MemoryError(f"no range of {nbytes} bytes is left in this rank's part of the file that ranks share; "
                                  "raise the limit on the size of files (ulimit -f)")
            self._next += nbytes
        return self.mapped(start, nbytes)

    def lend(self, taken: Sequence[Range], is_over: Callable[[], bool], over: Callable[[], object] = _nothing) -> None:
        """Take ranges back once all that share them have let go of them.

        Args:
            is_over: whether they have.
            over: called when the ranges are back; `is_over` is not asked any more.
        """
        with self._lock:
            self._lent.append((taken, is_over, over))

    def take_back(self) -> None:
        """Free the pages of what all have let go of."""
        with self._lock:
            lent, self._lent = self._lent, []
            for each in lent:
                ranges, is_over, over = each
                if not is_over():
                    self._lent.append(each)
                    continue
                for taken in ranges:
                    if taken.free(0, taken.bytes.size):  # else it keeps what is in it, and is not used again
                        self._free.setdefault(taken.bytes.size, []).append(taken)
                over()

    def close(self) -> None:
        """The file is closed: keep no memory mapped but what is in use."""
        with self._lock:
            self._mapping, self._free, self._lent = None, {}, []

    def mapped(self, start: int, nbytes: int) -> Range:
        """Return a range that the heap's rank has taken."""
        with self._lock:
            if self._mapping is None and self._mapped:
                try:
                    self._mapping = self.memory.mapping(self._begin, self._mapped)
                except (OSError, ValueError):
                    self._mapped = 0
            at = start - self._begin
            if self._mapping is not None and at + nbytes <= self._mapped:
                return Range(self.memory, start, nbytes, self._mapping, at)
        return self.memory.mapped(start, nbytes)


def counter_bytes(ranks: int) -> int:
    """Return the size of a segment's counters in bytes."""
    return _rounded(ranks * COUNTER_STRIDE)


def segment_bytes(ranks: int, slot: int) -> int:
    """Return the length of a segment in bytes; most of its pages are never allocated."""
    return counter_bytes(ranks) + ranks * REGIONS * _rounded(slot)


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE
