"""Kernels for 16-bit floats that torch has and NumPy does not; see `hvdlite.planes.arithmetic.Casts`."""

from __future__ import annotations

import numpy as np
import torch

from hvdlite.core.array import BFLOAT16, Array

_HIGHEST_MEAN = {torch.bfloat16: 0x7EFF, torch.float16: 0x7BFF}
"""Bits of the largest mean whose sum surely was finite in float32: below 2 ** 127; any finite one for float16."""
_HIGHEST_SUM = {torch.bfloat16: 0x7F7F, torch.float16: 0x7BFF}
"""Bits of the largest finite value."""
_SIGN = 0x8000


def widen(source: Array, out: Array) -> None:
    """Convert a flat 16-bit float array to float32: five times as fast as NumPy for float16."""
    torch.from_numpy(out).copy_(_sixteen_bits(source))


def narrow(source: Array, out: Array) -> None:
    """Convert a flat float32 array to 16-bit floats, rounding to nearest even."""
    _sixteen_bits(out).copy_(torch.from_numpy(source))


def reduce_pair(one: Array, other: Array, divisor: int, out: Array) -> bool:
    """Write the sum of two 16-bit arrays, divided by 1 or 2, to `out`; return False where that may not be exact.

    Both of torch's kernels compute in float32 and round once. Their bits equal those of the sum and its half in float32 as
    long as the float32 operations do not overflow (all 2 ** 32 pairs of values were compared). The interpolation
    y - (y - x) / 2 overflows for other values than x + y does, so large and infinite results, and NaN, are refused.
    """
    first, second, result = _sixteen_bits(one), _sixteen_bits(other), _sixteen_bits(out)
    if divisor == 1:
        torch.add(first, second, out=result)
        highest = _HIGHEST_SUM[result.dtype]
    else:
        torch.lerp(first, second, 0.5, out=result)
        highest = _HIGHEST_MEAN[result.dtype]
    # NumPy finds the maximum of integers many times as fast as any library finds an infinite value.
    return bool(out.view(np.int16).max() <= highest and out.view(np.uint16).max() <= highest | _SIGN)


def _sixteen_bits(array: Array) -> torch.Tensor:
    bits = array.view(np.int16)
    return torch.from_numpy(bits if bits.flags.writeable else bits.copy()).view(  # torch warns of read-only memory
        torch.bfloat16 if array.dtype == BFLOAT16 else torch.float16)
