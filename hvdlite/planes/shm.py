"""Shared memory on one host: every rank reduces a slice of each piece, straight from the others' staging slots.

One piece (at most a slot) of an allreduce, on every rank:

    publish   copy the slices that others own into the own slot           (the own slice stays private)
    barrier
    reduce    the own slice, over all contributors in rank order, into the own slot; copy it to the output
    barrier
    collect   copy the other slices' results from their owners' slots

A bucket of a fusion buffer lies in shared memory already, on every rank: the decision that releases it was the first
barrier, every rank reduces its slice and writes the result into all ranks' slots, and one barrier ends it.

A small piece is published whole and reduced by everybody: no second barrier, and no result in shared memory.

Rules (PROTOCOL rules 2, 11)
- Pieces alternate between two regions. A slot of a region is written again two pieces later; every rank has by then
  passed a barrier that all ranks entered after their last read of it.
- Which bytes are whose depends only on the response, so all ranks agree without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import Collective
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.base import FusionBuffer, Part, Plan, WaitUntil

ALIGNMENT = 64
"""Bytes; slices begin at multiples of it, so two owners never write one cache line."""


class StagingMemory(Protocol):
    """What the plane needs of `memory.SharedMemory`."""

    slot: int
    arrivals: Array

    def staging(self, rank: int, region: int) -> Array: ...

    def window(self, nbytes: int) -> list[Array]: ...

    def reserve(self, region: int, nbytes: int) -> None: ...

    def close(self) -> None: ...


class ShmPlane:
    """Collectives of the ranks of one host through shared staging slots.

    Args:
        ring: wakes another rank that may be waiting at a barrier.
        chunk: bytes reduced per NumPy call.
        direct: up to this many bytes every rank reduces everything.
    """

    name = "shm"

    def __init__(self, rank: int, size: int, memory: StagingMemory, ring: Callable[[int], None], *, chunk: int,
                 direct: int, casts: Casts | None = None) -> None:
        self._rank, self._size = rank, size
        self._casts = casts or Casts.of_numpy()
        self._memory, self._ring = memory, ring
        self._chunk, self._direct = chunk, direct
        self._barriers = 0
        self._pieces = 0

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        match plan.response.collective:
            case Collective.ALLREDUCE if plan.part is not None:
                self._allreduce_in_place(plan.part, plan.response, wait_until)
            case Collective.ALLREDUCE:
                self._allreduce(plan, wait_until)
            case Collective.BROADCAST:
                self._broadcast(plan, wait_until)
            case Collective.ALLGATHER:
                self._allgather(plan, wait_until)
            case Collective.BARRIER:
                pass  # that all ranks reported it is the barrier

    def fusion_buffer(self, nbytes: int) -> FusionBuffer:
        slots = self._memory.window(nbytes)
        return FusionBuffer(slots[self._rank], tuple(slots))

    def close(self) -> None:
        self._memory.close()

    def _allreduce_in_place(self, part: Part, response: Response, wait_until: WaitUntil) -> None:
        dtype = SUPPORTED_DTYPES[response.dtype]
        reduction = Reduction(response, dtype, self._size, self._chunk // dtype.itemsize, self._casts)
        slots = [slot[part.begin:part.end].view(dtype) for slot in part.buffer.slots]
        begin, end = slice_bounds(0, slots[0].size, self._size, dtype)[self._rank:self._rank + 2]
        for start in range(begin, end, reduction.chunk):
            pieces = [slot[start:min(start + reduction.chunk, end)] for slot in slots]
            for piece in pieces:
                reduction.place(piece, piece)
            reduction.combine(pieces, pieces[0])
            for piece in pieces[1:]:
                np.copyto(piece, pieces[0])
        self.barrier(wait_until)

    def _allreduce(self, plan: Plan, wait_until: WaitUntil) -> None:
        response = plan.response
        if not response.contributors:
            return
        dtype = SUPPORTED_DTYPES[response.dtype]
        reduction = Reduction(response, dtype, self._size, self._chunk // dtype.itemsize, self._casts)
        sources = Concatenation(plan.sources) if self._rank in response.contributors else None
        outputs = Concatenation(plan.outputs)
        per_piece = self._memory.slot // dtype.itemsize
        for low in range(0, outputs.size, per_piece):
            piece = _Piece(self, response, reduction, low, min(low + per_piece, outputs.size))
            if (piece.high - piece.low) * dtype.itemsize <= self._direct:
                piece.reduce_whole(sources, outputs, wait_until)
            else:
                piece.reduce_slices(sources, outputs, wait_until)

    def _broadcast(self, plan: Plan, wait_until: WaitUntil) -> None:
        root = plan.response.root_rank
        dtype = SUPPORTED_DTYPES[plan.response.dtype]
        outputs = Concatenation(plan.outputs)
        per_piece = self._memory.slot // dtype.itemsize
        for low in range(0, outputs.size, per_piece):
            high = min(low + per_piece, outputs.size)
            region = self.next_region((high - low) * dtype.itemsize if self._rank == root else 0)
            if self._rank == root:
                Concatenation(plan.sources).copy_to(low, high, self.slot(root, region, dtype))
            self.barrier(wait_until)
            staged = self.slot(root, region, dtype)
            for start, stop, part in outputs.parts(low, high, high - low):
                if self._rank != root or plan.sources is not plan.outputs:
                    np.copyto(part, staged[start - low:stop - low])

    def _allgather(self, plan: Plan, wait_until: WaitUntil) -> None:
        (source,), (output,) = plan.sources, plan.outputs
        assert source is not None and output is not None
        rows = plan.response.rows
        per_row = output.size // sum(rows) if sum(rows) else 0
        counts = [count * per_row for count in rows]
        begins = np.cumsum([0, *counts]).tolist()
        per_piece = self._memory.slot // source.itemsize
        for low in range(0, max(counts), per_piece):
            mine = source[low:low + per_piece]
            region = self.next_region(mine.nbytes)
            np.copyto(self.slot(self._rank, region, source.dtype)[:mine.size], mine)
            self.barrier(wait_until)
            for rank, count in enumerate(counts):
                length = max(0, min(count - low, per_piece))
                begin = begins[rank] + low
                np.copyto(output[begin:begin + length], self.slot(rank, region, source.dtype)[:length])

    def next_region(self, nbytes: int) -> int:
        """Return the region for the next piece, with room for `nbytes` in this rank's slot."""
        region = self._pieces % 2
        self._pieces += 1
        self._memory.reserve(region, nbytes)
        return region

    def slot(self, rank: int, region: int, dtype: np.dtype[np.generic]) -> Array:
        """Return a rank's slot as elements of `dtype`."""
        staging = self._memory.staging(rank, region)
        return staging[:staging.size // dtype.itemsize * dtype.itemsize].view(dtype)

    def barrier(self, wait_until: WaitUntil) -> None:
        """Wait until every rank has come here as often as this one."""
        self._barriers += 1
        arrivals, due = self._memory.arrivals, self._barriers
        arrivals[self._rank] = due
        for rank in range(self._size):
            if rank != self._rank:
                self._ring(rank)
        wait_until(lambda: bool((arrivals >= due).all()))

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size


class _Piece:
    """Elements low..high of an allreduce's concatenated tensors, in one region."""

    def __init__(self, plane: ShmPlane, response: Response, reduction: Reduction, low: int, high: int) -> None:
        self.low, self.high = low, high
        self._plane, self._reduction = plane, reduction
        self._contributors = response.contributors
        self._region = plane.next_region((high - low) * reduction.dtype.itemsize)
        self._slots = {rank: plane.slot(rank, self._region, reduction.dtype) for rank in range(plane.size)}

    def reduce_whole(self, sources: Concatenation | None, outputs: Concatenation, wait_until: WaitUntil) -> None:
        """Publish everything, then let every rank reduce everything into its output."""
        if sources is not None:
            self._publish(sources, self.low, self.high)
        self._plane.barrier(wait_until)
        for start, stop, part in outputs.parts(self.low, self.high, self._reduction.chunk):
            self._reduction.combine([self._staged(rank, start, stop) for rank in self._contributors], part)

    def reduce_slices(self, sources: Concatenation | None, outputs: Concatenation, wait_until: WaitUntil) -> None:
        """Let every rank reduce the slice it owns, and collect the other slices' results."""
        bounds = slice_bounds(self.low, self.high, self._plane.size, self._reduction.dtype)
        begin, end = bounds[self._plane.rank], bounds[self._plane.rank + 1]
        if sources is not None:
            self._publish(sources, self.low, begin)
            self._publish(sources, end, self.high)
        self._plane.barrier(wait_until)
        for start, stop, part in outputs.parts(begin, end, self._reduction.chunk):
            result = self._staged(self._plane.rank, start, stop)
            self._reduction.combine([self._term(rank, sources, start, stop) for rank in self._contributors], result)
            np.copyto(part, result)
        self._plane.barrier(wait_until)
        for owner in range(self._plane.size):
            if owner != self._plane.rank:
                for start, stop, part in outputs.parts(bounds[owner], bounds[owner + 1], self.high - self.low):
                    np.copyto(part, self._staged(owner, start, stop))

    def _publish(self, sources: Concatenation, low: int, high: int) -> None:
        for start, stop, part in sources.parts(low, high, self._reduction.chunk):
            self._reduction.place(part, self._staged(self._plane.rank, start, stop))

    def _term(self, rank: int, sources: Concatenation | None, start: int, stop: int) -> Array:
        if rank != self._plane.rank:
            return self._staged(rank, start, stop)
        assert sources is not None
        (_, _, part), = sources.parts(start, stop, stop - start)
        return self._reduction.placed(part)

    def _staged(self, rank: int, start: int, stop: int) -> Array:
        return self._slots[rank][start - self.low:stop - self.low]


def slice_bounds(low: int, high: int, size: int, dtype: np.dtype[np.generic]) -> list[int]:
    """Return where the ranks' slices of elements low..high begin, and where the last one ends."""
    step = ALIGNMENT // dtype.itemsize
    share = -(-(high - low) // (size * step)) * step
    return [min(low + rank * share, high) for rank in range(size + 1)]


class Concatenation:
    """Flat arrays seen as one, without copying."""

    def __init__(self, arrays: Sequence[Array | None]) -> None:
        self._arrays = [array for array in arrays if array is not None]
        assert len(self._arrays) == len(arrays), "a contributor has every tensor of the response"
        self._begins = np.cumsum([0, *(array.size for array in self._arrays)]).tolist()
        self.size: int = self._begins[-1]

    def parts(self, low: int, high: int, limit: int) -> Iterator[tuple[int, int, Array]]:
        """Yield (start, stop, view) covering low..high, each at most `limit` elements and within one array."""
        if low >= high:
            return
        first = int(np.searchsorted(self._begins, low, side="right")) - 1
        for begin, array in zip(self._begins[first:], self._arrays[first:]):  # noqa: B905 (begins has one more)
            if begin >= high:
                return
            start, last = max(low, begin), min(high, begin + array.size)
            while start < last:
                stop = min(start + limit, last)
                yield start, stop, array[start - begin:stop - begin]
                start = stop

    def copy_to(self, low: int, high: int, out: Array) -> None:
        """Copy elements low..high to the beginning of `out`."""
        for start, stop, part in self.parts(low, high, max(1, high - low)):
            np.copyto(out[start - low:stop - low], part)
