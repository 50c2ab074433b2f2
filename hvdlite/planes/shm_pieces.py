"""One piece of a reduction in shared memory: at most a staging slot of the concatenated tensors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hvdlite.core.array import Array
from hvdlite.negotiation.messages import Response
from hvdlite.planes.adasum import AdasumReduction
from hvdlite.planes.arithmetic import Reduction
from hvdlite.planes.base import WaitUntil
from hvdlite.planes.shm_barrier import Barrier
from hvdlite.planes.slices import Concatenation, slice_bounds
from hvdlite.planes.staging import StagingArea


class Piece:
    """Elements low..high of a reduction's concatenated tensors, in one staging region."""

    def __init__(self, area: StagingArea, response: Response, reduction: Reduction | AdasumReduction, low: int,
                 high: int) -> None:
        self.low, self.high = low, high
        self._area, self._reduction = area, reduction
        self._contributors = [area.ranks.index(rank) for rank in response.contributors]
        self._region = area.next_region((high - low) * reduction.dtype.itemsize)
        self._slots = [area.slot(index, self._region, reduction.dtype) for index in range(area.size)]
        self._bounds = slice_bounds(low, high, area.size, reduction.dtype)

    def reduce_whole(self, sources: Concatenation | None, outputs: Concatenation | None, wait_until: WaitUntil) -> None:
        """Publish the whole piece; every rank then reduces all of it into its output."""
        self._publish(sources, self.high, self.high)
        self._area.barrier(wait_until)
        for start, stop, part in outputs.parts(self.low, self.high, self._reduction.chunk) if outputs else ():
            self._reduction.combine([self._staged(index, start, stop) for index in self._contributors], part)

    def reduce_own(self, sources: Concatenation | None, output: Array | None, begin: int, end: int,
                   wait_until: WaitUntil) -> None:
        """Publish the elements that other ranks own, and reduce this piece's part of elements begin..end into `output`."""
        mine, rest = max(begin, self.low), min(end, self.high)
        if mine >= rest:
            mine = rest = self.high
        self._publish(sources, mine, rest)
        self._area.barrier(wait_until)
        if sources is None or output is None:
            return  # a rank that has joined
        for start, stop, _ in sources.parts(mine, rest, self._reduction.chunk):
            terms = [self._term(index, sources, start, stop) for index in self._contributors]
            self._reduction.combine(terms, output[start - begin:stop - begin])

    def publish_for_owners(self, sources: Concatenation | None) -> None:
        """Publish the slices that other ranks own."""
        self._publish(sources, *self._own())

    def reduce_slice(self, sources: Concatenation | None, outputs: Concatenation | None) -> None:
        """Reduce the slice that this rank owns, which all ranks have published, into its slot and its output."""
        self._reduce_slice(sources, outputs, *self._own())

    def collect_slices(self, outputs: Concatenation | None) -> None:
        """Copy the results of the other slices, which their owners have reduced, to the output."""
        if outputs is None:
            return
        for owner in range(self._area.size):
            if owner != self._area.index:
                self._collect(outputs, owner, self._bounds[owner], self._bounds[owner + 1])

    def _own(self) -> tuple[int, int]:
        index = self._area.index
        return self._bounds[index], self._bounds[index + 1]

    def _publish(self, sources: Concatenation | None, begin: int, end: int) -> None:
        """Copy the piece without elements begin..end, which no other rank reads, into this rank's slot."""
        for low, high in ((self.low, begin), (end, self.high)):
            for start, stop, part in sources.parts(low, high, self._reduction.chunk) if sources is not None else ():
                self._reduction.copy_prescaled(part, self._staged(self._area.index, start, stop))

    def _term(self, index: int, sources: Concatenation | None, start: int, stop: int) -> Array:
        if index != self._area.index:
            return self._staged(index, start, stop)
        assert sources is not None
        (_, _, part), = sources.parts(start, stop, stop - start)
        return self._reduction.prescaled(part)

    def _reduce_slice(self, sources: Concatenation | None, outputs: Concatenation | None, begin: int, end: int) -> None:
        """Reduce elements begin..end into this rank's slot and its output."""
        own = self._area.index
        guide = outputs or sources or Concatenation([self._slots[own][:self.high - self.low]], self.low)
        for start, stop, part in guide.parts(begin, end, self._reduction.chunk):
            result = self._staged(own, start, stop)
            self._reduction.combine([self._term(index, sources, start, stop) for index in self._contributors], result)
            if outputs is not None:
                np.copyto(part, result)

    def _collect(self, outputs: Concatenation, owner: int, begin: int, end: int) -> None:
        """Copy elements begin..end from the owner's slot to the output."""
        for start, stop, part in outputs.parts(begin, end, self.high - self.low):
            np.copyto(part, self._staged(owner, start, stop))

    def _staged(self, index: int, start: int, stop: int) -> Array:
        return self._slots[index][start - self.low:stop - self.low]


def reduce_by_slices(pieces: Iterable[Piece], sources: Concatenation | None, outputs: Concatenation | None,
                     barrier: Barrier, wait_until: WaitUntil) -> None:
    """Reduce pieces one after the other, each slice by its owner.

    One barrier lies between two pieces: it means that all ranks have reduced their slices of one and published the next.
    """
    reducing: Piece | None = None
    for piece in pieces:
        if reducing is not None:
            reducing.reduce_slice(sources, outputs)
        piece.publish_for_owners(sources)
        barrier(wait_until)
        if reducing is not None:
            reducing.collect_slices(outputs)
        reducing = piece
    if reducing is not None:
        reducing.reduce_slice(sources, outputs)
        barrier(wait_until)
        reducing.collect_slices(outputs)


class AdasumPiece(Piece):
    """A piece of an Adasum reduction, whose weights depend on the tensor of an element."""

    def __init__(self, area: StagingArea, response: Response, adasum: AdasumReduction, low: int, high: int) -> None:
        super().__init__(area, response, adasum, low, high)
        self._adasum = adasum

    def reduce_whole(self, sources: Concatenation | None, outputs: Concatenation | None, wait_until: WaitUntil) -> None:
        """Publish the whole piece, the only one; every rank then computes the inner products and reduces."""
        self._publish(sources, self.high, self.high)
        self._area.barrier(wait_until)
        if outputs is None:
            return
        terms = [self._staged(index, self.low, self.high) for index in self._contributors]
        self._adasum.set_weights(self._adasum.products(terms, self.low))
        result = np.empty_like(terms[0])
        self._adasum.combine(terms, result, self.low)
        for start, stop, part in outputs.parts(self.low, self.high, self.high - self.low):
            np.copyto(part, result[start - self.low:stop - self.low])

    def measure_slice(self, sources: Concatenation | None, wait_until: WaitUntil) -> Array:
        """Publish the elements that other ranks own; return the inner products, by tensor, of this rank's slice."""
        begin, end = self._own()
        self._publish(sources, begin, end)
        self._area.barrier(wait_until)
        return self._adasum.products(self._terms(sources, begin, end), begin)

    def _reduce_slice(self, sources: Concatenation | None, outputs: Concatenation | None, begin: int, end: int) -> None:
        own = self._area.index
        self._adasum.combine(self._terms(sources, begin, end), self._staged(own, begin, end), begin)
        if outputs is not None:
            self._collect(outputs, own, begin, end)

    def _terms(self, sources: Concatenation | None, begin: int, end: int) -> list[Array]:
        """Return every contributor's elements begin..end; this rank's own elements are not in a slot."""
        return [self._staged(index, begin, end) if index != self._area.index or sources is None
                else sources.contiguous(begin, end) for index in self._contributors]
