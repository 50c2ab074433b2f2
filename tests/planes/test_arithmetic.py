"""Averages of integers against Python's integers, up to many more ranks than a test can start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.core.array import Array
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite.planes.eager import reduced

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def mean(terms: list[int], divisor: int) -> int:
    """The naive twin: the mean, truncated toward zero."""
    total = sum(terms)
    return abs(total) // divisor * (1 if total >= 0 else -1)


def average(dtype: str, size: int, **fields: Any) -> Response:
    contributors = fields.pop("contributors", tuple(range(size)))
    return Response(names=("x",), collective=Collective.ALLREDUCE, dtype=dtype, op=ReduceOp.AVERAGE,
                    contributors=contributors, **fields)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, int, Array]:
    """A dtype, a number of ranks, and what some of them contribute (a row each): mostly values near the dtype's limits."""
    dtype = draw(st.sampled_from(INTEGERS))
    size = draw(st.one_of(st.integers(1, 5), st.sampled_from([127, 128, 255, 256, 300])))
    contributors = draw(st.integers(1, min(size, 5))) if size <= 5 else size
    limits = np.iinfo(dtype)
    value = st.one_of(st.integers(limits.min, limits.max), st.sampled_from([limits.min, limits.max]))
    row = st.lists(value, min_size=3, max_size=3)
    few = draw(st.lists(row, min_size=min(contributors, 5), max_size=min(contributors, 5)))
    return dtype, size, np.array([few[index % len(few)] for index in range(contributors)], dtype)


@given(jobs())
def test_an_average_of_integers_is_the_mean_truncated_toward_zero(job: tuple[str, int, Array]) -> None:
    dtype, size, rows = job
    response = average(dtype, size, contributors=tuple(range(len(rows))))
    expected = [mean(column, size) for column in rows.T.tolist()]
    assert reduced(response, list(rows), size, Casts.of_numpy()).tolist() == expected


@given(jobs(), st.integers(1, 2))
# docs/protocol.md#hierarchy
def test_it_may_be_taken_in_pieces_in_place_and_in_two_storeys(job: tuple[str, int, Array], chunk: int) -> None:
    dtype, size, rows = job
    expected = [mean(column, size) for column in rows.T.tolist()]
    reduction = Reduction(average(dtype, size), np.dtype(dtype), size, chunk, Casts.of_numpy())
    hosts = [rows[:len(rows) // 2], rows[len(rows) // 2:]]
    out = np.empty(3, dtype)
    totals = [reduction.accumulator(out, in_place=False) for _ in hosts]
    for host, total in zip(hosts, totals, strict=True):
        reduction.accumulate(list(host), total)
    with np.errstate(over="ignore"):
        reduction.finish(totals[0] + totals[1], out)
    assert out.tolist() == expected
    own = rows.copy()
    reduction.combine(list(own), own[0])
    assert own[0].tolist() == expected


@pytest.mark.parametrize("dtype", INTEGERS)
def test_factors_truncate_each_value_and_the_mean(dtype: str) -> None:
    """prescale: 5 and 2 halved are 2 and 1, whose mean is 1 (the mean of 2.5 and 1 would be 1.75); 1 x 2.5 is 2."""
    response = average(dtype, 2, prescale=0.5, postscale=2.5)
    sources = [np.array([5, 100], dtype), np.array([2, 27], dtype)]
    assert reduced(response, sources, 2, Casts.of_numpy()).tolist() == [2, 77]  # (50 + 13) / 2 is 31, and x 2.5 is 77


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_sum_of_integers_wraps_as_in_numpy(dtype: str) -> None:
    largest = np.full(1, np.iinfo(dtype).max, dtype)
    response = Response(names=("x",), collective=Collective.ALLREDUCE, dtype=dtype, op=ReduceOp.SUM, contributors=(0, 1))
    assert reduced(response, [largest, largest], 2, Casts.of_numpy()).tolist() == (largest + largest).tolist()


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("elements", [0, 1, 7])
def test_the_result_may_lie_where_a_source_does(elements: int, place: int) -> None:
    rows = np.arange(4 * elements, dtype=np.float32).reshape(4, elements)
    expected = rows.sum(axis=0) / 4
    reduction = Reduction(average("float32", 4), np.dtype("float32"), 4, 3, Casts.of_numpy())
    reduction.combine(list(rows), rows[place])
    assert rows[place].tolist() == expected.tolist()
