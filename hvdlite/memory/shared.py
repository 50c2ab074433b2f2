"""The shared memory file of a host: a segment for each process set, and windows for fusion buffers.

The file has no name. On Linux it is a `memfd`, so that the size of /dev/shm does not limit it and a crash leaves nothing
behind; where the system has none, or refuses it (a sandbox), it is a file that is unlinked before use (macOS: untested). Its
descriptor is passed over a Unix socket.

    segment: one arrival counter per rank, 64 bytes apart | slot (rank 0, region 0) | (0, 1) | (0, 2) | (1, 0) | ...
    window:  rank 0's part | rank 1's part | ...
    area:    see `memory/mailbox_area.py`, `memory/group_area.py`, `memory/message_area.py`

Rules (docs/protocol.md#slots, #staging-regions, #allocation, #memory-order)
- Pages are allocated with `posix_fallocate` before they are written: a lack of memory is a `MemoryError`, never SIGBUS.
- The file is sparse and of fixed length (2**62 bytes, or what the file system supports). Each segment or window is the next
  range of it. All ranks, members or not, request the same ranges in the same order, so they agree without communication.
  Ranges are not reused; when the file is exhausted, a request is a `MemoryError`.
- A staging slot is written by its own rank only. A window's part is written by other ranks only within a reduction.
- A window stays mapped while a view of it exists (for example a framework's gradient). A rank's pages are freed with its
  last view; no other rank reads them by then, because a reduction ends with a barrier. A forked child has the mappings, but
  frees no pages: they belong to its parent.
- On machines that reorder stores, counters alone do not order memory: a barrier calls the host's fence, see
  `memory/fence.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import LaunchError
from hvdlite.core.kernel_files import open_memfd
from hvdlite.memory import group_area, mailbox_area, message_area
from hvdlite.memory.fence import Fence, fence_file
from hvdlite.memory.group_area import GroupArea
from hvdlite.memory.mailbox_area import MailboxArea
from hvdlite.memory.message_area import MessageArea

_log = logging.getLogger("hvdlite")
COUNTER_STRIDE = 64
REGIONS = 3
"""Staging regions of a segment, see `planes/staging.py`."""
PAGE = 1 << 16
HUGE_PAGE = 1 << 21
FILE_SPAN = 1 << 62
"""Length of the file in bytes; reduced where the file system does not support it."""
LEAST_SPAN = 1 << 32


def anonymous_file() -> int:
    """Return the descriptor of an empty shared memory object without a name, whose length is fixed."""
    descriptor = open_memfd("hvdlite", seals=True)
    if descriptor < 0:
        descriptor = _unlinked_file()
    span = FILE_SPAN
    while True:
        try:
            os.ftruncate(descriptor, span)
            break
        except OSError as error:  # 32 bits, another file system, or `ulimit -f`
            if span <= LEAST_SPAN:
                os.close(descriptor)
                raise LaunchError(f"cannot make shared memory of {LEAST_SPAN >> 30} GiB (only used pages take memory): "
                                  f"{error.strerror}; `ulimit -f` must allow as much") from None
            span >>= 1
    with contextlib.suppress(OSError):  # not all files can be sealed; a process that shrinks one ends the others (SIGBUS)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def _unlinked_file() -> int:
    """Return the descriptor of a temporary file without a name."""
    try:
        descriptor, path = tempfile.mkstemp(prefix="hvdlite-")
    except OSError as error:
        raise LaunchError("this system has no files in memory (memfd_create), and a temporary file for what ranks "
                          f"share cannot be made: {error.strerror}; name another place with TMPDIR") from None
    os.unlink(path)
    _log.warning("this system has no files in memory (memfd_create): the memory that ranks share is a file in %s; on a disk "
                 "this is slow, TMPDIR=/dev/shm names memory", os.path.dirname(path))
    return descriptor


class _Mapping(mmap.mmap):
    """A mapping of a range of the file; exists as long as any view of it."""

    own: tuple[int, int] = (0, 0)  # this rank's part: offset and length
    process = 0  # the process id of the rank

    def __del__(self) -> None:
        _free_pages(self, self.process, *self.own)


def _free_pages(mapping: mmap.mmap, process: int, start: int, length: int) -> None:
    """Free the pages of a range, unless this is a forked child of the process that owns them."""
    if os.getpid() != process:
        return
    try:
        mapping.madvise(mmap.MADV_REMOVE, start, length)
    except (AttributeError, OSError, ValueError):
        pass  # not Linux, or never allocated: the pages are freed with the file


class Segment:
    """The shared memory of a process set's ranks: barrier counters and staging slots.

    Attributes:
        arrivals: the number of barriers that each rank has reached, by index in the set; written by that rank.
        fence: see `SharedMemory`.
        flush: a fence on every machine; private to this rank where the machine preserves the order of stores.
        slot: bytes of one staging slot.
        regions: how many slots each rank has.
    """

    regions = REGIONS

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

    @property
    def allocated(self) -> int:
        """Bytes of this rank's slots that have pages."""
        return sum(self._allocated)

    def staging(self, index: int, region: int) -> Array:
        """Return a rank's slot of a region, as bytes; only the rank itself writes to it."""
        start = self._counter_bytes + (index * REGIONS + region) * self.slot
        return self._bytes[start:start + self.slot]

    def reserve(self, region: int, nbytes: int) -> None:
        """Allocate pages for the first `nbytes` bytes of this rank's slot of `region`.

        Raises:
            MemoryError: if the system has no memory left, with the requested size.
        """
        if nbytes <= self._allocated[region]:
            return
        wanted = min(self.slot, max(_rounded(nbytes), 2 * self._allocated[region]))
        start = self._start + self._counter_bytes + (self._index * REGIONS + region) * self.slot
        self._memory.allocate(start + self._allocated[region], wanted - self._allocated[region])
        self._allocated[region] = wanted

    def release(self) -> None:
        """Free this rank's pages; called when all ranks of the set have finished reading them."""
        start = self._counter_bytes + self._index * REGIONS * self.slot
        _free_pages(self._map, self._memory.process, start, REGIONS * self.slot)

    def close(self) -> None:
        """Unmap the segment. The pages remain: a slower rank may still read them."""
        del self.arrivals, self._bytes
        try:
            self._map.close()
        except BufferError:
            pass  # a view is still alive somewhere: the mapping goes with it


class SharedMemory:
    """One rank's handle of the host's shared memory file.

    Attributes:
        process: the process id of the rank.

    Args:
        descriptor: from `anonymous_file`, the same file on all ranks; owned by this object.
        rank: this rank.
        fence: the host's fence, owned by this object; None on machines that need none.
        span: the beginning and the end of what this object may use; by default the whole file.
    """

    def __init__(self, descriptor: int, rank: int, fence: Fence | None = None, span: tuple[int, int] | None = None) -> None:
        self.descriptor, self.fence, self.process = descriptor, fence, os.getpid()
        self.flush = fence or Fence(fence_file())
        self._rank = rank
        self._end, self._length = span or (0, os.fstat(descriptor).st_size)  # the end of the ranges in use, and of all

    def segment(self, ranks: Sequence[int], slot: int) -> Segment | None:
        """Return the next segment, for a process set; None if this rank is not one of `ranks`.

        Raises:
            MemoryError: if the system has no memory left, or (on all ranks) the file is exhausted. Ranks remain in step.
        """
        slot = _rounded(slot)
        start = self._next_range(segment_bytes(len(ranks), slot), PAGE)
        if self._rank not in ranks:
            return None
        return Segment(self, start, list(ranks).index(self._rank), len(ranks), slot)

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
        mapping = _Mapping(self.descriptor, part * len(ranks), offset=start)
        mapping.own, mapping.process = (index * part, part), self.process
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # this kernel has no huge pages for shared memory
        everything = np.frombuffer(mapping, np.uint8)
        return [everything[each * part:each * part + nbytes] for each in range(len(ranks))]

    def mailbox_area(self, capacity: int, ranks: Sequence[int]) -> MailboxArea | None:
        """Return the next area for mailboxes of tensors of up to `capacity` bytes; None if this rank is not one of `ranks`.

        Raises:
            MemoryError: as for `segment`.
        """
        nbytes = _rounded(mailbox_area.area_bytes(capacity, len(ranks)))
        start = self._next_range(nbytes, PAGE)
        if self._rank not in ranks:
            return None
        self.allocate(start, nbytes)
        return MailboxArea(mmap.mmap(self.descriptor, nbytes, offset=start), list(ranks).index(self._rank), len(ranks),
                           capacity)

    def group_area(self, ranks: Sequence[int]) -> GroupArea | None:
        """Return the next area for an ordered group; None if this rank is not one of `ranks`.

        Raises:
            MemoryError: as for `segment`.
        """
        nbytes = _rounded(group_area.area_bytes(len(ranks)))
        start = self._next_range(nbytes, PAGE)
        if self._rank not in ranks:
            return None
        self.allocate(start, nbytes)
        return GroupArea(mmap.mmap(self.descriptor, nbytes, offset=start), list(ranks).index(self._rank), len(ranks),
                         self.fence)

    def message_area(self, ranks: Sequence[int], ring: int = message_area.RING_BYTES) -> MessageArea | None:
        """Return the next area for messages between two of `ranks`; None if this rank is not one of them.

        Args:
            ring: bytes that a rank can send to another one without waiting for it.

        Raises:
            MemoryError: as for `segment`.
        """
        start = self._next_range(message_area.area_bytes(len(ranks), ring), PAGE)
        if self._rank not in ranks:
            return None
        return MessageArea(self, start, list(ranks).index(self._rank), len(ranks), ring)

    def reserve_portions(self) -> Portions:
        """Reserve a range of the file, a sixteenth of what is left, for handles with ranges of their own."""
        begin = -(-self._end // HUGE_PAGE) * HUGE_PAGE
        self._end = begin + _sixteenth(begin, self._length)
        return Portions(self, begin, self._end)

    def portion(self, begin: int, end: int) -> SharedMemory:
        """Return a handle of its own for a range of the file."""
        return SharedMemory(os.dup(self.descriptor), self._rank, self.fence and self.fence.duplicate(), (begin, end))

    def close(self) -> None:
        """Close the file and the fence; mappings remain."""
        self.flush.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def allocate(self, start: int, length: int) -> None:
        """Allocate pages for a range, or raise `MemoryError`."""
        if not hasattr(os, "posix_fallocate"):
            return  # macOS: a sparse file on disk
        try:
            os.posix_fallocate(self.descriptor, start, length)
        except OSError as error:
            raise MemoryError(f"no memory for {length} bytes shared between ranks ({error}); lower HVDLITE_SHM_SLOT, or "
                              "turn learned buckets off with HVDLITE_BUCKET_SIZE=0") from error

    def free(self, mapping: mmap.mmap, start: int, length: int) -> None:
        """Free the pages of a range of a mapping of this file; in a forked child, do nothing."""
        _free_pages(mapping, self.process, start, length)

    def _next_range(self, nbytes: int, alignment: int) -> int:
        start = -(-self._end // alignment) * alignment
        if start + nbytes > self._length:
            raise MemoryError(f"no range of {nbytes} bytes is left in the {self._length} bytes of the file that ranks "
                              "share; raise the limit on the size of files (ulimit -f)")
        self._end = start + nbytes
        return start


class Portions:
    """A range of the host's file from which one handle after the other is made.

    All ranks make the same calls in the same order, but independently of what they request of the file itself.
    """

    def __init__(self, memory: SharedMemory, begin: int, end: int) -> None:
        self._memory, self._begin, self._end = memory, begin, end

    def open(self) -> SharedMemory:
        """Return the next handle, which has a sixteenth of what is left."""
        begin = self._begin
        self._begin += _sixteenth(begin, self._end)
        return self._memory.portion(begin, self._begin)


def _sixteenth(begin: int, end: int) -> int:
    return (end - begin) // 16 // HUGE_PAGE * HUGE_PAGE


def counter_bytes(ranks: int) -> int:
    """Return the size of a segment's counters in bytes."""
    return _rounded(ranks * COUNTER_STRIDE)


def segment_bytes(ranks: int, slot: int) -> int:
    """Return the length of a segment in bytes; most of its pages are never allocated."""
    return counter_bytes(ranks) + ranks * REGIONS * slot


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE)) * PAGE
