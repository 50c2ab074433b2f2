"""Reduction of host arrays; shared by all planes that reduce in Python.

Rule (docs/protocol.md#same-bits): every element is accumulated in ascending rank order, in the accumulator dtype, and
finished by the same two operations, so that the bits do not depend on the plane, on fusion, or on the rank that reduces.

Integers. Average is the exact mean, truncated toward zero. The mean fits into the dtype, but the sum may exceed even 64
bits. Therefore each value x is split into quotient and remainder, x = q n + r with 0 <= r < n, and both are summed in 64
bits; the mean, rounded down, is sum(q) + sum(r) // n. The sum of the quotients may exceed the range by up to n: it wraps
around and back. Sum and Product wrap around like NumPy's. Factors are applied in float64 to each value and to the result,
which are then truncated toward zero; a value that does not fit into the dtype is undefined, as in C.

16-bit floats. Their sums are float32, rounded once. A framework may offer a kernel for the sum or the mean of two arrays in
one pass (`Casts.reduce_pair`); it has to return the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.core.array import BFLOAT16, Array, accumulator_dtype, identity
from hvdlite.core.types import ReduceOp
from hvdlite.negotiation.messages import Response

_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add, ReduceOp.AVERAGE: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply, ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor,
}
_INT64, _UINT64 = np.dtype(np.int64), np.dtype(np.uint64)


@dataclasses.dataclass
class Casts:
    """Conversions between 16-bit floats and float32; an adapter may install its framework's vectorised versions.

    Attributes:
        widen: convert a flat float16 or bfloat16 array to a float32 array of the same length.
        narrow: convert back, rounding to nearest even; may overwrite the float32 array.
        reduce_pair: write the sum of two 16-bit arrays, divided by 1 or 2, to an array that shares no memory with them.
            Return False if the bits may differ from those of `widen`, an addition, a division and `narrow`. Optional.
    """

    widen: Callable[[Array, Array], object]
    narrow: Callable[[Array, Array], object]
    reduce_pair: Callable[[Array, Array, int, Array], bool] | None = None

    @classmethod
    def of_numpy(cls) -> Casts:
        """Return conversions by NumPy."""
        return cls(widen, narrow)


class Reduction:
    """The arithmetic of one allreduce response.

    Args:
        response: provides op, dtype and factors.
        size: number of ranks of the process set; Average divides by it, regardless of the number of contributors.
        casts: for 16-bit floats.
        chunk: elements per NumPy call: few enough for the cache, enough to amortise the call.
    """

    def __init__(self, response: Response, dtype: np.dtype[np.generic], size: int, chunk: int, casts: Casts) -> None:
        self.dtype = dtype
        self.chunk = max(1, chunk)
        self._op, self._combine = response.op, _UFUNCS[response.op]
        self._divisor = (response.divisor or size) if response.op is ReduceOp.AVERAGE else 1
        self._prescale, self._postscale = response.prescale, response.postscale
        self._widen, self._narrow = casts.widen, casts.narrow
        self._accumulator = accumulator_dtype(dtype)
        self._split = self._divisor > 1 and dtype.kind in "iu"  # accumulators have two rows: quotients and remainders
        if self._split:
            self._accumulator = _UINT64 if dtype == _UINT64 else _INT64
            self._widen, self._narrow = self._split_quotients, self._merge_quotients
        self._wide = self._split or self._accumulator != dtype
        rows = (2, self.chunk) if self._split else (self.chunk,)
        self._scratch_shape = (2, *rows)
        is_plain_sum = self._combine is np.add and self._divisor <= 2 and self._postscale == 1.0
        self._reduce_pair = casts.reduce_pair if is_plain_sum and self._wide and not self._split else None

    @functools.cached_property
    def _scratch(self) -> Array:
        """An accumulator and a term of a chunk."""
        return np.empty(self._scratch_shape, self._accumulator)

    def copy_prescaled(self, source: Array, out: Array) -> None:
        """Copy `source` to `out` (flat, same length, possibly the same memory), multiplied by the prescale factor."""
        if self._prescale == 1.0:
            if out is not source:
                np.copyto(out, source)
        else:
            with np.errstate(all="ignore"):
                self._scale(source, self._prescale, out)

    def prescaled(self, source: Array) -> Array:
        """Return `source` multiplied by the prescale factor; `source` itself if the factor is 1."""
        if self._prescale == 1.0:
            return source
        scaled = np.empty_like(source)
        self.copy_prescaled(source, scaled)
        return scaled

    def combine(self, sources: Sequence[Array], out: Array) -> None:
        """Reduce flat, prescaled arrays into `out`.

        `out` may be the memory of any source.
        """
        if not out.size:
            return
        sources = [*sources[:2], *(source.copy() if np.may_share_memory(source, out) else source for source in sources[2:])]
        with np.errstate(all="ignore"):  # overflow and nan are values here, as in the framework's own arithmetic
            if out.size <= self.chunk:
                self._combine_chunk(sources, out)
                return
            for start in range(0, out.size, self.chunk):
                piece = slice(start, min(start + self.chunk, out.size))
                self._combine_chunk([source[piece] for source in sources], out[piece])

    def _combine_chunk(self, terms: Sequence[Array], out: Array) -> None:
        if self._reduce_pair is not None and len(terms) == 2 and self._combine_pair(terms[0], terms[1], out):
            return
        total = self._scratch[0][..., :out.size] if self._wide else out
        self._sum(terms, total)
        self.finish(total, out)

    def accumulator(self, out: Array, *, in_place: bool) -> Array:
        """Return a flat array for `accumulate`; sums of accumulators are accumulators as well.

        Args:
            out: the array that will receive the result.
            in_place: whether `out` itself may be the accumulator, if its dtype permits.
        """
        if in_place and not self._wide:
            return out
        return np.empty(out.size * (2 if self._split else 1), self._accumulator)

    def accumulate(self, sources: Sequence[Array], total: Array) -> None:
        """Reduce like `combine`, into an array from `accumulator`; writes the identity element if there are no sources."""
        if not sources:
            total[...] = identity(self._op, total.dtype)
            return
        rows = self._rows(total)
        with np.errstate(all="ignore"):
            for start in range(0, rows.shape[-1], self.chunk):
                piece = slice(start, min(start + self.chunk, rows.shape[-1]))
                self._sum([source[piece] for source in sources], rows[..., piece])

    def finish(self, total: Array, out: Array) -> None:
        """Convert an accumulator to the result, which may be the same array; overwrites `total`."""
        if self._divisor == 1 and self._postscale == 1.0 and not self._wide:
            if out is not total:
                np.copyto(out, total)
            return
        with np.errstate(all="ignore"):
            if self._split:
                self._narrow(self._rows(total), out)
                if self._postscale != 1.0:
                    self._scale(out, self._postscale, out)
                return
            if self._divisor > 1:
                _divide(total, self._divisor)
            if not self._wide:
                if self._postscale != 1.0:
                    self._scale(total, self._postscale, total)
                if out is not total:
                    np.copyto(out, total)
                return
            if self._postscale != 1.0:
                np.multiply(total, np.float32(self._postscale), out=total)
            self._narrow(total, out)

    def _rows(self, total: Array) -> Array:
        return total.reshape(2, -1) if self._split else total

    def _sum(self, sources: Sequence[Array], total: Array) -> None:
        if not self._wide:
            if len(sources) == 1:
                np.copyto(total, sources[0])
            else:
                self._combine(sources[0], sources[1], out=total)
            for source in sources[2:]:
                self._combine(total, source, out=total)
            return
        term = self._scratch[1][..., :total.shape[-1]]
        self._widen(sources[0], total)
        for source in sources[1:]:
            self._widen(source, term)
            self._combine(total, term, out=total)

    def _combine_pair(self, one: Array, other: Array, out: Array) -> bool:
        """Reduce two 16-bit arrays in one pass; return False, and change nothing that they share, if that is not exact."""
        assert self._reduce_pair is not None
        is_shared = np.may_share_memory(out, one) or np.may_share_memory(out, other)
        result = self._scratch[1].view(self.dtype)[:out.size] if is_shared else out
        if not self._reduce_pair(one, other, self._divisor, result):
            return False
        if is_shared:
            np.copyto(out, result)
        return True

    def _split_quotients(self, source: Array, out: Array) -> None:
        """Write the quotients of integers by the divisor, rounded down, to `out[0]`, and the remainders to `out[1]`."""
        quotients, remainders = out
        divisor = self._accumulator.type(self._divisor)
        np.copyto(remainders, source)
        np.floor_divide(remainders, divisor, out=quotients)
        np.subtract(remainders, quotients * divisor, out=remainders)

    def _merge_quotients(self, total: Array, out: Array) -> None:
        """Write the means, truncated toward zero, to `out`."""
        quotients, remainders = total
        divisor = self._accumulator.type(self._divisor)
        carried = remainders // divisor
        np.add(quotients, carried, out=quotients)  # the mean rounded down
        if self.dtype.kind == "i":
            inexact = remainders != carried * divisor
            np.add(quotients, inexact & (quotients < 0), out=quotients)
        np.copyto(out, quotients, casting="unsafe")

    def _scale(self, source: Array, factor: float, out: Array) -> None:
        if self.dtype.kind in "iu":
            with np.errstate(invalid="ignore"):
                np.copyto(out, np.trunc(source.astype(np.float64) * factor), casting="unsafe")
        elif self._wide:
            wide = np.empty(source.size, np.float32)
            self._widen(source, wide)
            np.multiply(wide, np.float32(factor), out=wide)
            self._narrow(wide, out)
        else:
            np.multiply(source, source.dtype.type(factor), out=out)


def _divide(values: Array, divisor: int) -> None:
    """Divide values of any non-integer dtype in place."""
    if values.dtype.kind == "f" and divisor & (divisor - 1) == 0:  # the same bits as a division, several times faster
        np.multiply(values, values.dtype.type(1.0 / divisor), out=values)
    else:
        np.divide(values, values.dtype.type(divisor), out=values)


def widen(source: Array, out: Array) -> None:
    """Convert 16-bit floats to float32, bfloat16 by shifting (its `ml_dtypes` cast is slow)."""
    if source.dtype == BFLOAT16:
        np.left_shift(source.view(np.uint16), np.uint32(16), out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        np.copyto(out, source)


def narrow(source: Array, out: Array) -> None:
    """Convert float32 to a 16-bit float, rounding to nearest even; overwrites `source`."""
    if out.dtype != BFLOAT16:
        np.copyto(out, source, casting="unsafe")
        return
    bits, target = source.view(np.uint32), out.view(np.uint16)
    nan = np.isnan(source)
    np.add(bits, ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF), out=bits)
    np.right_shift(bits, np.uint32(16), out=target, dtype=np.uint32, casting="unsafe")
    target[nan] = 0x7FC0
