"""One shared file for all ranks of a host: a segment for each process set, and windows for fusion buffers.

The file has no name. On Linux it is a `memfd`, so neither /dev/shm's size limit nor a crash matters; elsewhere it is
a file that is unlinked before it is used (macOS: documented, not yet run). Its descriptor travels over a Unix socket.

    segment: one arrival counter a rank, 64 bytes apart | slot (rank 0, region 0) | slot (0, 1) | slot (1, 0) | ...
    window:  rank 0's part | rank 1's part | ...

Rules (docs/protocol.md#slots, #staging-regions, #allocation, #memory-order)
- Pages are allocated with `posix_fallocate` before they are written: no memory is a `MemoryError`, never SIGBUS.
- The file is sparse and vast, so it never changes its length; a segment or window is the next range of it. All ranks ask for
  the same ones in the same order, members or not, so they agree on the ranges without a word. No range is used again: there
  are enough for centuries (2**62 bytes), and where a file system allows only few, the end of them is a `MemoryError`, too.
- A staging slot is written by its own rank only. A window's part is written by others only within a reduction.
- A window stays mapped while a view of it lives (a framework's gradient, say). Its owner's pages go back to the system with
  the owner's last view; nobody else reads them by then, because a reduction ends with a barrier. A forked child has the
  mappings, but the pages are its parent's: it gives none back.
- Where the machine reorders stores, plain counters order nothing: a barrier calls the host's fence, see `memory/fence.py`.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np

from hvdlite.core.array import Array
from hvdlite.memory.fence import Fence, fence_file

COUNTER_STRIDE = 64
REGIONS = 2
PAGE = 1 << 16
HUGE_PAGE = 1 << 21
FILE_SPAN = 1 << 62
"""Bytes of the file, and where there cannot be so many, as many as there can."""
LEAST_SPAN = 1 << 32


def anonymous_file() -> int:
    """Return the descriptor of an empty shared memory object without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hvdlite", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="hvdlite-")
        os.unlink(path)
    span = FILE_SPAN
    while True:
        try:
            os.ftruncate(descriptor, span)
            return descriptor
        except OSError:  # 32 bits, another file system, or `ulimit -f`
            if span <= LEAST_SPAN:
                raise
            span >>= 1


class _Mapping(mmap.mmap):
    """A range of the file; lives as long as any view of it."""

    own: tuple[int, int] = (0, 0)  # this rank's part: where it begins, and its length
    process = 0  # the rank's

    def __del__(self) -> None:
        _give_back(self, self.process, *self.own)


def _give_back(mapping: mmap.mmap, process: int, start: int, length: int) -> None:
    """Return a range's pages to the system, unless this is a forked child of the process that they belong to."""
    if os.getpid() != process:
        return
    try:
        mapping.madvise(mmap.MADV_REMOVE, start, length)
    except (AttributeError, OSError, ValueError):
        pass  # not Linux, or never allocated: the pages go with the file


class Segment:
    """What the ranks of one process set share: counters and staging slots.

    Attributes:
        arrivals: how many barriers each rank has reached, by its index in the set; written by that rank.
        fence: see `SharedMemory`.
        flush: a fence on every machine; where the machine keeps the order of stores, one of this rank alone.
        slot: bytes of one staging slot.
    """

    def __init__(self, memory: SharedMemory, start: int, index: int, ranks: int, slot: int) -> None:
        self.slot = slot
        self.fence, self.flush = memory.fence, memory.flush
        self._memory, self._start, self._index = memory, start, index
        self._counter_bytes = counter_bytes(ranks)
        memory.allocate(start, self._counter_bytes)
        self._map = mmap.mmap(memory.descriptor, segment_bytes(ranks, slot), offset=start)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.arrivals = self._bytes[:ranks * COUNTER_STRIDE].view(np.int64)[::COUNTER_STRIDE // 8]
        self._allocated = [0] * REGIONS  # bytes of this rank's slots that have pages

    def staging(self, index: int, region: int) -> Array:
        """Return a rank's slot of a region, as bytes; write only into your own."""
        start = self._counter_bytes + (index * REGIONS + region) * self.slot
        return self._bytes[start:start + self.slot]

    def reserve(self, region: int, nbytes: int) -> None:
        """Give this rank's slot of `region` pages for its first `nbytes` bytes.

        Raises:
            MemoryError: when the system has no memory left, saying how much was asked for.
        """
        if nbytes <= self._allocated[region]:
            return
        wanted = min(self.slot, max(_rounded(nbytes), 2 * self._allocated[region]))
        start = self._start + self._counter_bytes + (self._index * REGIONS + region) * self.slot
        self._memory.allocate(start + self._allocated[region], wanted - self._allocated[region])
        self._allocated[region] = wanted

    def release(self) -> None:
        """Give this rank's pages back; only when all ranks of the set have finished reading them."""
        start = self._counter_bytes + self._index * REGIONS * self.slot
        _give_back(self._map, self._memory.process, start, REGIONS * self.slot)

    def close(self) -> None:
        """Unmap it. The pages stay: a slower rank may still be reading them."""
        del self.arrivals, self._bytes
        try:
            self._map.close()
        except BufferError:
            pass  # a view is still alive somewhere: the mapping goes with it


class SharedMemory:
    """The host's shared file, as one rank sees it.

    Attributes:
        process: the rank's.

    Args:
        descriptor: from `anonymous_file`, the same file in all ranks; owned by this object.
        rank: this rank.
        fence: the host's, likewise; None on machines that need none.
    """

    def __init__(self, descriptor: int, rank: int, fence: Fence | None = None) -> None:
        self.descriptor, self.fence, self.process = descriptor, fence, os.getpid()
        self.flush = fence or Fence(fence_file())
        self._rank = rank
        self._end = 0  # of what has been given out
        self._length = os.fstat(descriptor).st_size

    def segment(self, ranks: Sequence[int], slot: int) -> Segment | None:
        """Return the next segment, for a process set; None when this rank is not one of `ranks`.

        Raises:
            MemoryError: when the system has no memory left or, on all ranks alike, the file no range; the next call is in
                step with the other ranks all the same.
        """
        slot = _rounded(slot)
        start = self._take(segment_bytes(len(ranks), slot), PAGE)
        if self._rank not in ranks:
            return None
        return Segment(self, start, list(ranks).index(self._rank), len(ranks), slot)

    def window(self, nbytes: int, ranks: Sequence[int]) -> list[Array]:
        """Return the next window: `nbytes` zero bytes for each of `ranks`, one array a rank; nothing for other ranks.

        Raises:
            MemoryError: Like `segment`.
        """
        step = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
        part = max(1, -(-nbytes // step)) * step
        start = self._take(part * len(ranks), step)
        if self._rank not in ranks:
            return []
        index = list(ranks).index(self._rank)
        self.allocate(start + index * part, part)
        mapping = _Mapping(self.descriptor, part * len(ranks), offset=start)
        mapping.own, mapping.process = (index * part, part), self.process
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # this kernel has no huge pages for shared memory
        everything = np.frombuffer(mapping, np.uint8)
        return [everything[each * part:each * part + nbytes] for each in range(len(ranks))]

    def close(self) -> None:
        """Close the file and the fence; what is mapped lives on."""
        self.flush.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def allocate(self, start: int, length: int) -> None:
        """Give a range pages, or raise `MemoryError`."""
        if not hasattr(os, "posix_fallocate"):
            return  # macOS: a sparse file on disk
        try:
            os.posix_fallocate(self.descriptor, start, length)
        except OSError as error:
            raise MemoryError(f"no memory for {length} bytes shared between ranks ({error}); lower HVDLITE_SHM_SLOT, or "
                              "turn learned buckets off with HVDLITE_BUCKET_SIZE=0") from error

    def _take(self, nbytes: int, alignment: int) -> int:
        start = -(-self._end // alignment) * alignment
        if start + nbytes > self._length:
            raise MemoryError(f"no range of {nbytes} bytes is left in the {self._length} bytes of the file that ranks "
                              "share; raise the limit on the size of files (ulimit -f)")
        self._end = start + nbytes
        return start


def counter_bytes(ranks: int) -> int:
    """Return the bytes of a segment's counters."""
    return _rounded(ranks * COUNTER_STRIDE)


def segment_bytes(ranks: int, slot: int) -> int:
    """Return the length of a segment; most of it never gets pages."""
    return counter_bytes(ranks) + ranks * REGIONS * slot


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE
