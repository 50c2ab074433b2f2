"""Slices of tensors: which elements each rank owns, and several flat arrays seen as one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hvdlite.core.array import ALIGNMENT, Array
from hvdlite.negotiation.messages import Response


def slice_bounds(low: int, high: int, size: int, dtype: np.dtype[np.generic]) -> list[int]:
    """Return the bounds of the ranks' slices of elements low..high, rounded to whole cache lines."""
    step = ALIGNMENT // dtype.itemsize
    share = -(-(high - low) // (size * step)) * step
    return [min(low + rank * share, high) for rank in range(size + 1)]


def row_bounds(response: Response) -> list[int]:
    """Return the bounds of each rank's rows of a scattered tensor, in elements."""
    return [0, *itertools.accumulate(count * response.row_elements for count in response.rows)]


class Concatenation:
    """A view of several flat arrays as one, without copying; the first array begins at element `begin`."""

    def __init__(self, arrays: Sequence[Array | None], begin: int = 0) -> None:
        self._arrays = [array for array in arrays if array is not None]
        assert len(self._arrays) == len(arrays), "a contributor has every tensor of the response"
        self._begins = list(itertools.accumulate((array.size for array in self._arrays), initial=begin))
        self.size: int = self._begins[-1] - begin

    def parts(self, low: int, high: int, limit: int) -> Iterator[tuple[int, int, Array]]:
        """Yield (start, stop, view) that cover low..high; each view has at most `limit` elements and lies in one array."""
        if low >= high:
            return
        first = bisect.bisect_right(self._begins, low) - 1
        for begin, array in zip(self._begins[first:], self._arrays[first:]):  # noqa: B905 (begins has one more)
            if begin >= high:
                return
            start, last = max(low, begin), min(high, begin + array.size)
            while start < last:
                stop = min(start + limit, last)
                yield start, stop, array[start - begin:stop - begin]
                start = stop

    def single(self, low: int, high: int) -> Array | None:
        """Return a view of elements low..high if they lie in one array, else None."""
        parts = list(self.parts(low, high, high - low))
        return parts[0][2] if len(parts) == 1 else None

    def contiguous(self, low: int, high: int) -> Array:
        """Return elements low..high; copies them only if they lie in several arrays."""
        single = self.single(low, high)
        if single is not None:
            return single
        out = np.empty(high - low, self._arrays[0].dtype)
        self.copy_to(low, high, out)
        return out

    def copy_to(self, low: int, high: int, out: Array) -> None:
        """Copy elements low..high to the beginning of `out`."""
        for start, stop, part in self.parts(low, high, max(1, high - low)):
            np.copyto(out[start - low:stop - low], part)
