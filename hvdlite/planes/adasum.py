"""Adasum: an adaptive sum that averages parallel vectors and adds orthogonal vectors.

Two tensors a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b; more are combined in pairs, pairs of neighbours
first: ((0, 1), (2, 3)). A tensor without a partner moves up a level unchanged, so any number of ranks works. Source: Maleki
et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, section 3 (powers of two only, as in Horovod).

The result is a linear combination of the ranks' tensors, and its weights depend only on their inner products. So a plane
computes the inner products once, every rank derives the same weights, and one weighted sum gives the result. The tensors of
a group share these collectives.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from hvdlite.core.array import Array, accumulator_dtype
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts


class AdasumReduction:
    """The arithmetic of Adasum on concatenated tensors; each tensor has its own weights.

    Has the interface of `Reduction`, after `set_weights` has been called with the inner products.

    Args:
        response: provides the scale factors.
        dtype: a floating point dtype; 16-bit floats are accumulated in float32, inner products in float64.
        chunk: elements per NumPy call.
        casts: for 16-bit floats.
        rows: the number of elements of each tensor.
    """

    def __init__(self, response: Response, dtype: np.dtype[np.generic], chunk: int, casts: Casts,
                 rows: Sequence[int]) -> None:
        self.dtype = dtype
        self.chunk = max(1, chunk)
        self._casts = casts
        self._wide = accumulator_dtype(dtype)
        self._factor = response.prescale * response.postscale  # scaling all tensors alike scales the result
        self._ends = list(itertools.accumulate(rows))
        self._factors = np.empty((0, 0))  # by tensor and contributor

    def products(self, sources: Sequence[Array], begin: int = 0) -> Array:
        """Return the inner products of all pairs of contributors, by tensor: float64, (tensors, n, n).

        Args:
            sources: one flat array for each contributor.
            begin: the element of the concatenated tensors at which the arrays begin.
        """
        count = sources[0].size if sources else 0
        total = np.zeros((len(self._ends), len(sources), len(sources)))
        rows = np.empty((len(sources), min(self.chunk, count)))
        for piece, tensors in self._pieces(begin, count):
            for row, source in zip(rows, sources, strict=True):
                row[:piece.stop - piece.start] = self._widened(source[piece])
            for tensor, low, high in tensors:
                part = rows[:, low:high]
                total[tensor] += part @ part.T
        return total

    def set_weights(self, products: Array) -> None:
        """Derive the weights from the inner products of the whole tensors."""
        self._factors = factors(products) * self._factor

    def copy_prescaled(self, source: Array, out: Array) -> None:
        """Copy `source` to `out`."""
        np.copyto(out, source)

    def prescaled(self, source: Array) -> Array:
        """Return `source` itself."""
        return source

    def combine(self, sources: Sequence[Array], out: Array, begin: int = 0) -> None:
        """Write the weighted sums of flat arrays to `out`, which may share memory with one of them.

        Args:
            begin: as for `products`.
        """
        with np.errstate(all="ignore"):
            for piece, tensors in self._pieces(begin, out.size):
                factors = self._factors[[tensor for tensor, _, _ in tensors]].astype(self._wide)
                if len(tensors) > 1:
                    factors = factors.repeat([high - low for _, low, high in tensors], axis=0)
                total = np.zeros(piece.stop - piece.start, self._wide)
                for factor, source in zip(factors.T, sources, strict=True):
                    total += self._widened(source[piece]) * factor
                if self.dtype == self._wide:
                    np.copyto(out[piece], total)
                else:
                    self._casts.narrow(total, out[piece])

    def _pieces(self, begin: int, count: int) -> Iterator[tuple[slice, list[tuple[int, int, int]]]]:
        """Yield chunks of an array that begins at element `begin`, with (tensor, begin, end) of each chunk's tensors."""
        tensor = bisect.bisect_right(self._ends, begin)
        for first in range(begin, begin + count, self.chunk):
            last = min(first + self.chunk, begin + count)
            tensors, start = [], first
            while start < last:
                stop = min(self._ends[tensor], last)
                if start < stop:
                    tensors.append((tensor, start - first, stop - first))
                tensor += stop == self._ends[tensor]
                start = stop
            yield slice(first - begin, last - begin), tensors

    def _widened(self, source: Array) -> Array:
        if self.dtype == self._wide:
            return source
        wide = np.empty(source.size, self._wide)
        self._casts.widen(source, wide)
        return wide


def factors(products: Array) -> Array:
    """Return the weights of n vectors in their adaptive sum.

    Args:
        products: the inner products of several tensors: float64, (tensors, n, n).

    Returns:
        float64, (tensors, n).
    """
    count = products.shape[1]
    terms = [np.broadcast_to(row, (len(products), count)) for row in np.eye(count)]
    while len(terms) > 1:
        paired = [_combined(one, other, products) for one, other in zip(terms[::2], terms[1::2])]  # noqa: B905 (an odd one)
        terms = paired + terms[2 * len(paired):]
    return terms[0]


def _combined(one: Array, other: Array, products: Array) -> Array:
    """Combine two vectors of each tensor, given as weights of the ranks' vectors."""
    with np.errstate(all="ignore"):
        agreement = np.einsum("ti,tij,tj->t", one, products, other)
        squares = [np.einsum("ti,tij,tj->t", each, products, each) for each in (one, other)]
        own = [np.where(square == 0, 1.0, 1.0 - agreement / (2.0 * square))[:, None] for square in squares]
    result: Array = own[0] * one + own[1] * other
    return result
