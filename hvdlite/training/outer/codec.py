"""What travels in an outer exchange: rows of bytes that can be cut anywhere between two rows.

Values that are not finite stay so: then a row is decoded to NaN, on all ranks.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from hvdlite.core.array import Array

BLOCK: Final = 1024
"""Values that have a common scale."""
_SCALE: Final = np.dtype(np.float32).itemsize
_LARGEST: Final = 127
_SMALLEST: Final = np.finfo(np.float32).tiny  # smaller scales have fewer digits; such values are zeros


class Codec(Protocol):
    """Turns values into bytes and back.

    Attributes:
        values: of a row.
        nbytes: of a row.
        is_exact: whether values come back as they were.
    """

    values: int
    nbytes: int
    is_exact: bool

    def encode(self, values: Array, rows: Array) -> None:
        """Write flat values, as many as rows hold, to `rows`: uint8, of shape (rows, nbytes), C-contiguous."""

    def decode(self, rows: Array) -> Array:
        """Return the values of rows, flat."""


class Exact:
    """Sends values as they are.

    Args:
        dtype: of the values.
    """

    values, is_exact = 1, True

    def __init__(self, dtype: np.dtype[np.floating]) -> None:
        self._dtype, self.nbytes = dtype, dtype.itemsize

    def encode(self, values: Array, rows: Array) -> None:
        rows.reshape(-1).view(self._dtype)[:] = values

    def decode(self, rows: Array) -> Array:
        return rows.reshape(-1).view(self._dtype)


class Int8:
    """Sends a block of values as integers from -127 to 127, and a factor in float32.

    Args:
        dtype: of the values.
    """

    values, nbytes, is_exact = BLOCK, _SCALE + BLOCK, False

    def __init__(self, dtype: np.dtype[np.floating]) -> None:
        self._dtype = dtype

    def encode(self, values: Array, rows: Array) -> None:
        blocks = values.reshape(-1, BLOCK)
        with np.errstate(over="ignore", invalid="ignore"):
            scales = (np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / _LARGEST).astype(np.float32)
            has_values = np.isfinite(scales) & (scales >= _SMALLEST)
            scaled = blocks / np.where(has_values, scales, 1)[:, None].astype(blocks.dtype)
            np.rint(scaled, out=scaled)
        scaled[~has_values] = 0
        rows[:, :_SCALE] = scales[:, None].view(np.uint8)
        rows[:, _SCALE:] = scaled.astype(np.int8).view(np.uint8)

    def decode(self, rows: Array) -> Array:
        scales = np.ascontiguousarray(rows[:, :_SCALE]).view(np.float32).astype(self._dtype)
        with np.errstate(invalid="ignore"):
            values: Array = rows[:, _SCALE:].view(np.int8) * scales
        return values.reshape(-1)


def codec_of(wire: str | None, dtype: np.dtype[np.floating]) -> Codec:
    """Return the codec of a setting `wire` for values of a dtype."""
    return Exact(dtype) if wire is None else Int8(dtype)
