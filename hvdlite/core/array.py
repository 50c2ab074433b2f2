"""Names of dtypes in the runtime, and the arithmetic rules of a dtype.

Names are NumPy's, plus "bfloat16" (`ml_dtypes`). 16-bit floats are *stored* as such and *accumulated* in float32.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import BITWISE, ReduceOp

Array = NDArray[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ALIGNMENT = 64
"""Alignment in bytes: a cache line, which no two ranks write, and the alignment of memory that TensorFlow does not copy.
Members of a bucket begin at multiples of it.
"""
GPU_ALIGNMENT = 256
"""Alignment of buckets and the staging buffer on a GPU, for vector loads; CUDA's allocations have it too."""

SUPPORTED_DTYPES: dict[str, np.dtype[np.generic]] = {
    **{name: np.dtype(name) for name in (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )},
    "bfloat16": BFLOAT16,
}


_FLOAT32 = np.dtype(np.float32)
_NARROW_FLOATS = frozenset({np.dtype(np.float16), BFLOAT16})
_NAMES = {dtype: name for name, dtype in SUPPORTED_DTYPES.items()}


def dtype_name(dtype: np.dtype[np.generic], tensor: str = "") -> str:
    """Return the runtime's name of `dtype`.

    Args:
        tensor: the name of the tensor of this dtype, for the error.

    Raises:
        UnsupportedError: for a dtype that no plane supports (objects, strings, dates, structures).
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise unsupported_dtype(repr(dtype), tensor)
    return name


def unsupported_dtype(dtype: str, tensor: str = "") -> UnsupportedError:
    """Return the error for a tensor of a dtype that no plane supports."""
    where = f"'{tensor}': " if tensor else ""
    return UnsupportedError(f"{where}dtype {dtype} is not supported; supported: {', '.join(SUPPORTED_DTYPES)}")


def check_reducible(name: str, op: ReduceOp, tensor: str) -> None:
    """Raise `UnsupportedError` if `op` is not one of `hvd`'s operations, or not defined for dtype `name`."""
    if op in BITWISE:
        raise UnsupportedError(f"{tensor}: {op.name} is an operation of torch.distributed; see hvdlite_torch.distributed")
    if op is ReduceOp.ADASUM and name not in ("float16", "bfloat16", "float32", "float64"):
        raise UnsupportedError(f"{tensor}: op=Adasum weighs vectors by their angles and needs a floating point dtype, not "
                               f"{name}; use Average or Sum")
    if name == "bool" and op not in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedError(f"{tensor}: allreduce of bool has no {op.name.capitalize()}; use Min (all), Max (any) "
                               "or convert to an integer type")
    if name.startswith("complex") and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UnsupportedError(f"{tensor}: complex numbers have no order, so no {op.name.capitalize()}; "
                               "use Sum or Average")


def identity(op: ReduceOp, dtype: np.dtype[np.generic]) -> Any:
    """Return the identity element of `op`; it preserves every bit of the other value (-0.0 for sums of floats)."""
    kind = "f" if dtype == BFLOAT16 else dtype.kind
    if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return {"f": -0.0, "c": complex(-0.0, -0.0)}.get(kind, 0)
    if op is ReduceOp.PRODUCT:
        return 1
    if op in BITWISE:
        return np.invert(np.zeros((), dtype)) if op is ReduceOp.BAND else 0
    if kind == "b":
        return op is ReduceOp.MIN
    if kind == "f":
        return float("inf") if op is ReduceOp.MIN else float("-inf")
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    return limits.max if op is ReduceOp.MIN else limits.min


def accumulator_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """Return the dtype in which values of `dtype` are summed: float32 for 16-bit floats, otherwise `dtype`."""
    return _FLOAT32 if dtype in _NARROW_FLOATS else dtype


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an uninitialised array aligned to `ALIGNMENT`."""
    nbytes = math.prod(shape) * dtype.itemsize
    room = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -room.__array_interface__["data"][0] % ALIGNMENT
    result: Array = room[begin:begin + nbytes].view(dtype).reshape(shape)
    return result


def aligned_zeros(nbytes: int) -> Array:
    """Return zero bytes aligned to `ALIGNMENT`."""
    memory = aligned_empty((nbytes,), np.dtype(np.uint8))
    memory.fill(0)
    return memory


def flat(array: Array) -> Array:
    """Return a 1-D view of a C-contiguous array (including 0-d); never copies."""
    assert array.flags.c_contiguous, "flat() needs a contiguous array"
    return array.reshape(-1)
