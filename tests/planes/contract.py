"""Responses and comparisons that the tests of the contract of planes share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from tests.planes import under_mpi
from tests.planes.makers import gloo, hierarchical, hierarchical_mpi, mpi
from tests.planes.nccl_double import nccl
from tests.planes.steps import run

SIZES = (2, 4) if under_mpi.ACTIVE else (1, 2, 3, 4)  # a world under mpiexec takes as much time as all others
LARGE = 20_000 if under_mpi.ACTIVE else 50_000
"""Elements that make several pieces, also of one byte each."""


@contextlib.contextmanager
def case(*what: object) -> Iterator[None]:
    """Name one of several cases on the same planes: to make planes takes longer than most cases."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"in the case of {', '.join(map(str, what))}: {error}") from error


def in_any_order(make_planes: Any, size: int) -> bool:
    """Say whether a plane may add up the terms of a sum in another order than that of the ranks.

    It may also divide the terms of an average, and not their sum.
    """
    return make_planes in (gloo, mpi, hierarchical, hierarchical_mpi, nccl) and size > 2


def check_equal(result: Array, expected: Array, reordered: bool) -> None:
    """Fail unless two results are equal: to the bit, or but for rounding where a sum was `reordered`."""
    if reordered and result.dtype.kind not in "biu":
        step = {"float16": 1e-3, "bfloat16": 8e-3}.get(result.dtype.name)
        if step is not None:  # divided terms are rounded, and may be much larger than the result
            result, expected, tolerance = result.astype(np.float32), expected.astype(np.float32), 4 * step
        else:
            tolerance = 1e-6 if result.dtype.itemsize > 4 else 1e-5
        np.testing.assert_allclose(result, expected, rtol=step or 1e-3, atol=tolerance)
    else:
        assert result.tobytes() == expected.tobytes()


def ops_for(dtype: np.dtype[Any]) -> list[ReduceOp]:
    if dtype.kind == "b":
        return [ReduceOp.MIN, ReduceOp.MAX]
    if dtype.kind == "c":
        return [ReduceOp.SUM, ReduceOp.AVERAGE]
    return [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX]


FAMILIES = {
    "bool": ["bool"], "complex": ["complex64", "complex128"], "floats": ["float16", "bfloat16", "float32", "float64"],
    "integers": ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]}
assert {dtype for family in FAMILIES.values() for dtype in family} == set(SUPPORTED_DTYPES)


def reductions(execute: Any, family: str, size: int) -> Iterator[tuple[str, ReduceOp]]:
    """Yield the dtypes of a family with what can be made of them, as far as the plane supports it."""
    for dtype in FAMILIES[family]:
        for op in ops_for(SUPPORTED_DTYPES[dtype]):
            if execute.supports(allreduce(dtype, op, size)):
                yield dtype, op


def run_cases(make_planes: Any, size: int, step: Callable[[int, Any], int]) -> None:
    """Run a step that returns how many cases there were; without any there was nothing to test."""
    if 0 in run(make_planes, size, step):
        pytest.skip(f"{make_planes.__name__} supports none of them")


def allreduce(dtype: str, op: ReduceOp, size: int, **fields: Any) -> Response:
    return Response(names=fields.pop("names", ("x",)), collective=Collective.ALLREDUCE, dtype=dtype, op=op,
                    contributors=fields.pop("contributors", tuple(range(size))), **fields)


def response(collective: Collective, size: int, rows: list[int], **rest: Any) -> Response:
    return Response(names=("x",), collective=collective, rows=tuple(rows), row_elements=3,
                    contributors=tuple(range(size)), **rest)
