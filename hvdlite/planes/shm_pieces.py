"""One piece of a reduction in shared memory: at most a staging slot of the concatenated tensors."""

from __future__ import annotations

import numpy as np

from hvdlite.core.array import Array
from hvdlite.negotiation.messages import Response
from hvdlite.planes.adasum import AdasumReduction
from hvdlite.planes.arithmetic import Reduction
from hvdlite.planes.base import WaitUntil
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

    def reduce_whole(self, sources: Concatenation | None, outputs: Concatenation | None, wait_until: WaitUntil) -> None:
        """Publish the whole piece; every rank then reduces all of it into its output."""
        self._publish(sources, self.high, self.high, wait_until)
        for start, stop, part in outputs.parts(self.low, self.high, self._reduction.chunk) if outputs else ():
            self._reduction.combine([self._staged(index, start, stop) for index in self._contributors], part)

    def reduce_slices(self, sources: Concatenation | None, outputs: Concatenation | None, wait_until: WaitUntil) -> None:
        """Reduce the slice that this rank owns, and collect the results of the other slices."""
        area = self._area
        bounds = slice_bounds(self.low, self.high, area.size, self._reduction.dtype)
        begin, end = bounds[area.index], bounds[area.index + 1]
        self._publish(sources, begin, end, wait_until)
        self._reduce_slice(sources, outputs, begin, end)
        area.barrier(wait_until)
        if outputs is None:
            return
        for owner in range(area.size):
            if owner != area.index:
                self._collect(outputs, owner, bounds[owner], bounds[owner + 1])

    def reduce_own(self, sources: Concatenation | None, output: Array | None, begin: int, end: int,
                   wait_until: WaitUntil) -> None:
        """Publish the elements that other ranks own, and reduce this piece's part of elements begin..end into `output`."""
        mine, rest = max(begin, self.low), min(end, self.high)
        if mine >= rest:
            mine = rest = self.high
        self._publish(sources, mine, rest, wait_until)
        if sources is None or output is None:
            return  # a rank that has joined
        for start, stop, _ in sources.parts(mine, rest, self._reduction.chunk):
            terms = [self._term(index, sources, start, stop) for index in self._contributors]
            self._reduction.combine(terms, output[start - begin:stop - begin])

    def _publish(self, sources: Concatenation | None, begin: int, end: int, wait_until: WaitUntil) -> None:
        """Publish the piece without elements begin..end, which no other rank reads; return when all ranks have."""
        for low, high in ((self.low, begin), (end, self.high)):
            for start, stop, part in sources.parts(low, high, self._reduction.chunk) if sources is not None else ():
                self._reduction.copy_prescaled(part, self._staged(self._area.index, start, stop))
        self._area.barrier(wait_until)

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


class AdasumPiece(Piece):
    """A piece of an Adasum reduction, whose weights depend on the tensor of an element."""

    def __init__(self, area: StagingArea, response: Response, adasum: AdasumReduction, low: int, high: int) -> None:
        super().__init__(area, response, adasum, low, high)
        self._adasum = adasum

    def reduce_whole(self, sources: Concatenation | None, outputs: Concatenation | None, wait_until: WaitUntil) -> None:
        """Publish the whole piece, the only one; every rank then computes the inner products and reduces."""
        self._publish(sources, self.high, self.high, wait_until)
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
        area = self._area
        bounds = slice_bounds(self.low, self.high, area.size, self._adasum.dtype)
        begin, end = bounds[area.index], bounds[area.index + 1]
        self._publish(sources, begin, end, wait_until)
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
