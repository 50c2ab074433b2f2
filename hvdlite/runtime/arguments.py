"""Checks of the arrays that are given to collectives."""

from __future__ import annotations

from hvdlite.core.array import check_reducible, dtype_name
from hvdlite.core.device import AnyArray, DeviceArray
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp


def reducible(name: str, source: AnyArray | None, output: AnyArray, op: ReduceOp) -> str:
    """Return the dtype's name of arrays that can be reduced with `op`, or raise `UnsupportedError`.

    `source` must be of `output`'s shape and dtype; None stands for a rank that contributes nothing.
    """
    dtype = transportable(name, output)
    check_reducible(dtype, op, f"'{name}'")
    if source is None or source is output:
        return dtype
    if source.shape != output.shape or source.dtype != output.dtype:
        raise UnsupportedError(f"'{name}': source is {source.dtype}{list(source.shape)}, "
                               f"output {output.dtype}{list(output.shape)}; they must be equal")
    return transportable(name, source)


def check_writeable(name: str, output: AnyArray) -> None:
    """Raise `UnsupportedError` for an array that cannot receive a result."""
    if type(output) is not DeviceArray and not output.flags.writeable:  # type: ignore[union-attr]
        raise UnsupportedError(f"'{name}': the array of shape {list(output.shape)} is read-only, and would be overwritten; "
                               "pass a copy")


def check_rows(name: str, array: AnyArray, what: str) -> None:
    """Raise `UnsupportedError` for a scalar, of which no rows can be cut or joined."""
    if array.ndim == 0:
        raise UnsupportedError(f"'{name}': {what} the first dimension, and a scalar has none; pass an array of shape (1,)")


def transportable(name: str, array: AnyArray) -> str:
    """Return the dtype's name of an array that a plane can take, or raise `UnsupportedError`."""
    dtype = dtype_name(array.dtype, name)
    if type(array) is not DeviceArray and not array.flags.c_contiguous:  # type: ignore[union-attr]
        raise UnsupportedError(f"'{name}': the array of shape {list(array.shape)} is not C-contiguous; "
                               "pass numpy.ascontiguousarray(...)")
    return dtype
