"""Adasum: a sum in which ranks that agree are averaged and ranks that are orthogonal are added.

Two tensors a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b; more are combined in pairs, pairs of neighbours
first: ((0, 1), (2, 3)), and one without a partner goes up a level as it is, so any number of ranks will do. Source: Maleki
et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, section 3 (powers of two only, as in Horovod).

Whatever is combined is a linear combination of the ranks' tensors, and its factors depend on nothing but their inner
products. So a plane measures those once, every rank derives the same factors, and one weighted sum gives the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.core.array import Array, accumulator_dtype
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts


class AdaptiveSum:
    """The arithmetic of Adasum on one tensor; like `Reduction`, once `weigh` has been told the inner products.

    Args:
        response: gives the factors.
        dtype: a floating point dtype; 16-bit floats are accumulated in float32, inner products in float64.
        chunk: elements worked on at a time.
        casts: for 16-bit floats.
    """

    def __init__(self, response: Response, dtype: np.dtype[np.generic], chunk: int, casts: Casts) -> None:
        self.dtype = dtype
        self.chunk = max(1, chunk)
        self._casts = casts
        self._wide = accumulator_dtype(dtype)
        self._factor = response.prescale * response.postscale  # scaling all tensors alike scales the result
        self._factors: list[float] = []

    def products(self, sources: Sequence[Array]) -> Array:
        """Return the inner products of each two of some flat arrays: float64, (n, n)."""
        total = np.zeros((len(sources), len(sources)))
        rows = np.empty((len(sources), min(self.chunk, sources[0].size if sources else 0)))
        for start in range(0, sources[0].size if sources else 0, self.chunk):
            piece = slice(start, min(start + self.chunk, sources[0].size))
            for row, source in zip(rows, sources, strict=True):
                row[:piece.stop - start] = self._widened(source[piece])
            part = rows[:, :piece.stop - start]
            total += part @ part.T
        return total

    def weigh(self, products: Array) -> None:
        """Derive the factors from the inner products of the whole tensors."""
        self._factors = [float(factor) * self._factor for factor in factors(products)]

    def place(self, source: Array, out: Array) -> None:
        """Copy `source` to `out`."""
        np.copyto(out, source)

    def placed(self, source: Array) -> Array:
        """Return `source` itself."""
        return source

    def combine(self, sources: Sequence[Array], out: Array) -> None:
        """Write the weighted sum of flat arrays to `out`, which may be the memory of one of them."""
        with np.errstate(all="ignore"):
            for start in range(0, out.size, self.chunk):
                piece = slice(start, min(start + self.chunk, out.size))
                total = np.zeros(piece.stop - start, self._wide)
                for factor, source in zip(self._factors, sources, strict=True):
                    total += self._widened(source[piece]) * self._wide.type(factor)
                if self.dtype == self._wide:
                    np.copyto(out[piece], total)
                else:
                    self._casts.narrow(total, out[piece])

    def _widened(self, source: Array) -> Array:
        if self.dtype == self._wide:
            return source
        wide = np.empty(source.size, self._wide)
        self._casts.widen(source, wide)
        return wide


def factors(products: Array) -> Array:
    """Return by what each of n tensors is multiplied in their adaptive sum, given their inner products, float64 (n, n)."""
    terms = list(np.eye(len(products)))
    while len(terms) > 1:
        paired = [_combined(one, other, products) for one, other in zip(terms[::2], terms[1::2])]  # noqa: B905 (an odd one)
        terms = paired + terms[2 * len(paired):]
    return terms[0]


def _combined(one: Array, other: Array, products: Array) -> Array:
    """Combine two tensors, each given as factors of the ranks' tensors."""
    with np.errstate(all="ignore"):
        agreement = one @ products @ other
        own = [1.0 if square == 0 else 1.0 - agreement / (2.0 * square)
               for square in (one @ products @ one, other @ products @ other)]
    result: Array = own[0] * one + own[1] * other
    return result
