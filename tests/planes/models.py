"""Inputs of the contract suite, and a NumPy model of their reductions, which every rank of every plane compares with."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import ReduceOp


def values(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return random values that differ between ranks."""
    return drawn(rank, count, dtype).copy()


@functools.cache
def drawn(rank: int, count: int, dtype: np.dtype[Any]) -> Array:
    """Return the same `values`, to compare with."""
    generator = np.random.default_rng([rank, count])
    if dtype.kind == "b":
        return generator.integers(0, 2, count).astype(bool)
    if dtype.kind in "iu":
        return generator.integers(0 if dtype.kind == "u" else -60, 60, count).astype(dtype)
    if dtype.kind == "c":
        return (generator.normal(size=count) + 1j * generator.normal(size=count)).astype(dtype)
    return generator.normal(size=count).astype(dtype)


def model(op: ReduceOp, inputs: list[Array], size: int) -> Array:
    """The naive twin: NumPy, in rank order, in a wider type where the runtime accumulates wider."""
    dtype = inputs[0].dtype
    wide = [array.astype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else array for array in inputs]
    total = wide[0].copy()
    for term in wide[1:]:
        total = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}.get(op, np.add)(total, term)
    if op is ReduceOp.AVERAGE and dtype.kind in "iu":
        return mean(inputs, size)
    if op is ReduceOp.AVERAGE:
        total = total / total.dtype.type(size)
    return total.astype(dtype)


@functools.cache
def modelled(op: ReduceOp, count: int, dtype: np.dtype[Any], size: int) -> Array:
    """Return the model's result for the `values` of all ranks; every rank of every plane compares with it."""
    result = model(op, [drawn(rank, count, dtype) for rank in range(size)], size)
    result.flags.writeable = False
    return result


def mean(inputs: list[Array], size: int) -> Array:
    """The mean of integers, truncated toward zero: no sum of them overflows."""
    wide = np.int64 if inputs[0].itemsize < 8 else object
    total = sum(array.astype(wide) for array in inputs)
    down = np.array(total // size, wide)
    return (down + ((down < 0) & (down * size != total))).astype(inputs[0].dtype)


def near_limits(rank: int, size: int, count: int, dtype: str) -> Array:
    """Return values whose sum over ranks overflows."""
    limits = np.iinfo(dtype)
    near = [limits.min, limits.min + 1, limits.max - 1, limits.max]
    return np.array([near[0], near[3], near[rank % 4], near[-rank % 4], rank], SUPPORTED_DTYPES[dtype]).repeat(count)


@functools.cache
def mean_near_limits(size: int, count: int, dtype: str) -> Array:
    return mean([near_limits(rank, size, count, dtype) for rank in range(size)], size)
