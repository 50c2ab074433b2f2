"""What the ranks of a host do with values that each writes as a whole before any reads: one class for each kind.

Each rank writes to its own place only; when all have written, it only reads. So no kind needs a second step in which ranks
wait for each other. Mailboxes are made of this (`handoff/exchange.py`); `ShmPlane` does it with what fits into a slot.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import Collective
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.slices import row_bounds, slice_bounds

Places = Sequence[Sequence[Array]]
"""By region, which calls use by turns, and rank: bytes that this rank writes, and all read."""


class Exchange:
    """Calls of one response with one tensor, to which all ranks contribute.

    Args:
        elements: of this rank's tensor.
        index: this rank's.
        root: likewise; -1 if all ranks have values.
        chunk: bytes of each rank that are reduced per NumPy call.

    Attributes:
        counts: elements of each rank's tensor.
        written: the bytes of its place that this rank uses.
    """

    def __init__(self, response: Response, elements: int, places: Places, index: int, *, root: int = -1, chunk: int,
                 casts: Casts) -> None:
        self.response, self.elements, self.index, self.root = response, elements, index, root
        self._places, self._chunk, self._casts = places, chunk, casts
        self.dtype = SUPPORTED_DTYPES[response.dtype]
        self.counts = self._counted()
        self.written = elements * self.dtype.itemsize if root in (-1, index) else 0
        self._values: list[list[Array]] = [[] for _ in places]

    def values(self, region: int) -> list[Array]:
        """Return each rank's values."""
        found = self._values[region]
        if not found:  # all or none of them, also if a signal interrupts this
            found = self._values[region] = [place[:count * self.dtype.itemsize].view(self.dtype)
                                            for place, count in zip(self._places[region], self.counts, strict=True)]
        return found

    def _counted(self) -> list[int]:
        return [self.elements] * len(self._places[0])

    def write(self, region: int, source: Array) -> None:
        """Write what others need of this rank's values."""
        raise NotImplementedError

    def collect(self, region: int, source: Array, output: Array) -> None:
        """Make the result, for which all ranks have written; `output` may be `source`."""
        raise NotImplementedError


class Reduce(Exchange):
    """Every rank that has an output reduces all values."""

    @functools.cached_property
    def reduction(self) -> Reduction:
        """Its arithmetic."""
        chunk = min(self.elements, self._chunk // self.dtype.itemsize)
        return Reduction(self.response, self.dtype, len(self._places[0]), chunk, self._casts)

    def write(self, region: int, source: Array) -> None:
        self.reduction.copy_prescaled(source, self.values(region)[self.index])

    def collect(self, region: int, source: Array, output: Array) -> None:
        self.reduction.combine(self.values(region), output)


class Reducescatter(Reduce):
    """Every rank reduces its rows; its own values of these it takes from where they are."""

    @functools.cached_property
    def own(self) -> slice:
        """The elements of this rank's rows."""
        return slice(*row_bounds(self.response)[self.index:self.index + 2])

    def write(self, region: int, source: Array) -> None:
        place, own = self.values(region)[self.index], self.own
        for others in (slice(own.start), slice(own.stop, None)):
            self.reduction.copy_prescaled(source[others], place[others])

    def collect(self, region: int, source: Array, output: Array) -> None:
        terms = [place[self.own] for place in self.values(region)]
        terms[self.index] = self.reduction.prescaled(source[self.own])
        self.reduction.combine(terms, output)


class Broadcast(Exchange):
    """Every rank copies the root's values."""

    def write(self, region: int, source: Array) -> None:
        if self.index == self.root:
            np.copyto(self.values(region)[self.index], source)

    def collect(self, region: int, source: Array, output: Array) -> None:
        if self.index != self.root or output is not source:
            np.copyto(output, self.values(region)[self.root])


class Gather(Exchange):
    """Every rank that has an output copies all values, one after the other."""

    def write(self, region: int, source: Array) -> None:
        np.copyto(self.values(region)[self.index], source)

    def collect(self, region: int, source: Array, output: Array) -> None:
        join(self.values(region), output)

    def _counted(self) -> list[int]:
        return [count * self.response.row_elements for count in self.response.rows]


WHOLE: dict[Collective, type[Exchange]] = {
    Collective.ALLREDUCE: Reduce, Collective.REDUCE: Reduce, Collective.REDUCESCATTER: Reducescatter,
    Collective.BROADCAST: Broadcast, Collective.ALLGATHER: Gather, Collective.GATHER: Gather,
}
"""Of the kinds in which each rank knows how many values the others have."""


class ReduceInPlace:
    """A reduction of memory that all ranks have filled: each one reduces its slice, and writes the result to all.

    The exception of a signal handler may leave `run` anywhere: calling it again goes on from there. A barrier has to follow.

    Args:
        slots: the memory of each rank, flat.
        index: this rank's.
    """

    def __init__(self, reduction: Reduction, slots: Sequence[Array], index: int) -> None:
        self._reduction, self._slots = reduction, slots
        self._begin, self._end = slice_bounds(0, slots[0].size, len(slots), reduction.dtype)[index:index + 2]
        self._result = np.empty(min(reduction.chunk, self._end - self._begin), reduction.dtype)
        self.begin()

    def begin(self) -> None:
        """The memory is filled again."""
        self._at = self._begin, False  # where it is, and whether the result of this chunk is known

    def run(self) -> None:
        """Reduce what is left."""
        reduction = self._reduction
        while self._at[0] < self._end:
            start, is_known = self._at
            stop = min(start + reduction.chunk, self._end)
            pieces = [slot[start:stop] for slot in self._slots]
            result = self._result[:stop - start]
            if not is_known:
                reduction.combine([reduction.prescaled(piece) for piece in pieces], result)
                self._at = start, True
            for piece in pieces:
                np.copyto(piece, result)
            self._at = stop, False


def join(parts: Iterable[Array], output: Array) -> None:
    """Copy parts to an output, one after the other."""
    end = 0
    for part in parts:
        begin, end = end, end + part.size
        output[begin:end] = part
