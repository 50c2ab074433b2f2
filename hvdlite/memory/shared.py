"""One shared file for all ranks of a host: arrival counters and staging slots, then windows for fusion buffers.

The memory has no name. On Linux it is a `memfd`, so neither /dev/shm's size limit nor a crash matters; elsewhere it is
a file that is unlinked before it is used (macOS: documented, not yet run). Its descriptor travels over a Unix socket.

    page 0: one arrival counter a rank, 64 bytes apart | slot (rank 0, region 0) | slot (0, 1) | slot (1, 0) | ...
    each window: rank 0's part | rank 1's part | ...

Rules (PROTOCOL rules 1, 2, 4, 5)
- Pages are allocated with `posix_fallocate` before they are written: no memory is a `MemoryError`, never SIGBUS.
- The file is sparse and vast, so it never changes its length; a window is the next range of it. All ranks ask for the same
  windows in the same order, so they agree on the ranges without a word, and a range is never used again.
- A staging slot is written by its own rank only. A window's part is written by others only within a reduction.
- A window stays mapped while a view of it lives (a framework's gradient, say). Its owner's pages go back to the system with
  the owner's last view; nobody else reads them by then, because a reduction ends with a barrier.
- Ordering between processes goes through a bell (a system call); plain counters are trusted on x86-64 only because of that.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from hvdlite.core.array import Array

COUNTER_STRIDE = 64
REGIONS = 2
PAGE = 1 << 16
HUGE_PAGE = 1 << 21
FILE_SPAN = 1 << 42


def anonymous_file() -> int:
    """Return the descriptor of an empty shared memory object without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hvdlite", os.MFD_CLOEXEC)
    else:
        descriptor, path = tempfile.mkstemp(prefix="hvdlite-")
        os.unlink(path)
    os.ftruncate(descriptor, FILE_SPAN)
    return descriptor


class _Mapping(mmap.mmap):
    """A range of the file; lives as long as any view of it."""

    own: tuple[int, int] = (0, 0)  # this rank's part: where it begins, and its length

    def __del__(self) -> None:
        try:
            self.madvise(mmap.MADV_REMOVE, *self.own)
        except (AttributeError, OSError, ValueError):
            pass  # not Linux, or never allocated: the pages go with the file


class SharedMemory:
    """The host's ranks' mapping of one anonymous file.

    Args:
        descriptor: from `anonymous_file`, the same file in all ranks; owned by this object.
        place: this rank's index among the ranks of the host.
        ranks: how many ranks share it.
        slot: bytes of one staging slot.
    """

    def __init__(self, descriptor: int, place: int, ranks: int, slot: int) -> None:
        self.place, self.ranks = place, ranks
        self.slot = _rounded(slot)
        self._descriptor = descriptor
        self._counter_bytes = _rounded(ranks * COUNTER_STRIDE)
        self._length = self._counter_bytes + ranks * REGIONS * self.slot
        self._windows_end = self._length
        self._allocate(0, self._counter_bytes)
        self._map = mmap.mmap(descriptor, self._length)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.arrivals = self._bytes[:ranks * COUNTER_STRIDE].view(np.int64)[::COUNTER_STRIDE // 8]
        self._allocated = [0] * REGIONS  # bytes of this rank's slots that have pages

    def staging(self, rank: int, region: int) -> Array:
        """Return a rank's slot of a region, as bytes; write only into your own."""
        start = self._counter_bytes + (rank * REGIONS + region) * self.slot
        return self._bytes[start:start + self.slot]

    def reserve(self, region: int, nbytes: int) -> None:
        """Give this rank's slot of `region` pages for its first `nbytes` bytes.

        Raises:
            MemoryError: when the system has no memory left, saying how much was asked for.
        """
        if nbytes <= self._allocated[region]:
            return
        wanted = min(self.slot, max(_rounded(nbytes), 2 * self._allocated[region]))
        start = self._counter_bytes + (self.place * REGIONS + region) * self.slot
        self._allocate(start + self._allocated[region], wanted - self._allocated[region])
        self._allocated[region] = wanted

    def window(self, nbytes: int) -> list[Array]:
        """Return new memory of `nbytes` zero bytes a rank, one array a rank, shared by all ranks that make the same call.

        Raises:
            MemoryError: Like `reserve`; the next call is in step with the other ranks all the same.
        """
        step = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
        part = -(-nbytes // step) * step
        start = -(-self._windows_end // step) * step
        self._windows_end = start + part * self.ranks
        self._allocate(start + self.place * part, part)
        mapping = _Mapping(self._descriptor, part * self.ranks, offset=start)
        mapping.own = (self.place * part, part)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # this kernel has no huge pages for shared memory
        everything = np.frombuffer(mapping, np.uint8)
        return [everything[rank * part:rank * part + nbytes] for rank in range(self.ranks)]

    def close(self) -> None:
        """Give the memory back; views handed out keep their mapping alive until they are gone."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        del self.arrivals, self._bytes
        try:
            self._map.close()
        except BufferError:
            pass  # a view is still alive somewhere: the mapping goes with it

    def _allocate(self, start: int, length: int) -> None:
        if not hasattr(os, "posix_fallocate"):
            return  # macOS: a sparse file on disk
        try:
            os.posix_fallocate(self._descriptor, start, length)
        except OSError as error:
            raise MemoryError(f"no memory for {length} bytes shared between ranks ({error}); lower HVDLITE_SHM_SLOT "
                              f"(now {self.slot} bytes, {REGIONS} a rank)") from error


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
