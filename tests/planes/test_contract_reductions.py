"""The contract of planes: reductions, whose results are a closed form or those of a NumPy model."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from hvdlite.core.array import SUPPORTED_DTYPES, Array, identity
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.fusion import even_rows
from hvdlite.planes.base import BufferSlice
from tests.planes.contract import (
    FAMILIES,
    LARGE,
    SIZES,
    allreduce,
    case,
    check_equal,
    in_any_order,
    reductions,
    response,
    run_cases,
)
from tests.planes.makers import hierarchical_mpi, mpi
from tests.planes.models import drawn, mean_near_limits, modelled, near_limits, values
from tests.planes.nccl_double import nccl
from tests.planes.steps import run


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_allreduce_matches_the_model_bit_for_bit(make_planes: Any, size: int, family: str) -> None:
    def step(rank: int, execute: Any) -> int:
        found = list(reductions(execute, family, size))
        for dtype, op in found:
            for count in (0, 1, 17, 1000, LARGE):
                with case(dtype, op.name, count):
                    given = drawn(rank, count, SUPPORTED_DTYPES[dtype])
                    mine, out = given.copy(), np.empty_like(given)
                    execute(allreduce(dtype, op, size), [mine], [out])
                    expected = modelled(op, count, given.dtype, size) if count else out
                    check_equal(out, expected, in_any_order(make_planes, size))
                    assert mine.tobytes() == given.tobytes(), "the source was changed"
                    execute(allreduce(dtype, op, size), [mine], [mine])
                    assert mine.tobytes() == out.tobytes(), "in place differs"
        return len(found)
    run_cases(make_planes, size, step)


@pytest.mark.parametrize("size", SIZES)
def test_operations_on_bits(make_planes: Any, size: int) -> None:
    """Ordered groups have them, which use neither MPI nor NCCL."""
    if make_planes in (mpi, hierarchical_mpi, nccl):
        pytest.skip("not a plane of groups")
    bitwise = {ReduceOp.BAND: np.bitwise_and, ReduceOp.BOR: np.bitwise_or, ReduceOp.BXOR: np.bitwise_xor}

    def step(rank: int, execute: Any) -> int:
        for dtype in ("int8", "uint16", "int32", "uint64", "bool"):
            for op, ufunc in bitwise.items():
                for count in (0, 1, 1000, 50_000):
                    with case(dtype, op.name, count):
                        mine = values(rank, count, SUPPORTED_DTYPES[dtype])
                        execute(allreduce(dtype, op, size), [mine], [mine])
                        everybodys = [drawn(each, count, SUPPORTED_DTYPES[dtype]) for each in range(size)]
                        assert mine.tobytes() == functools.reduce(ufunc, everybodys).tobytes()
        return 1
    run_cases(make_planes, size, step)


@pytest.mark.parametrize("size", [3, 4])
# docs/protocol.md#same-bits
def test_fusion_does_not_change_a_bit(make_planes: Any, size: int) -> None:
    counts = [1, 300, 7, 40_000, 0, 5000]

    def step(rank: int, execute: Any) -> None:
        sources = [values(rank, count, np.dtype(np.float32)) for count in counts]
        together, alone = ([np.empty_like(source) for source in sources] for _ in range(2))
        execute(allreduce("float32", ReduceOp.AVERAGE, size, names=tuple("abcdef")), sources, together)
        for source, out in zip(sources, alone, strict=True):
            execute(allreduce("float32", ReduceOp.AVERAGE, size), [source], [out])
        for one, other in zip(together, alone, strict=True):
            check_equal(one, other, in_any_order(make_planes, size))
    run(make_planes, size, step)


@pytest.mark.parametrize("count", [10, 50_000])
def test_only_contributors_count_but_average_divides_by_all(make_planes: Any, count: int) -> None:
    def step(rank: int, execute: Any) -> None:
        out = np.zeros(count, np.float32)
        mine = np.full(count, 4.0 ** rank, np.float32) if rank in (0, 2) else None
        execute(allreduce("float32", ReduceOp.AVERAGE, 4, contributors=(0, 2)), [mine], [out])
        assert (out == 17 / 4).all()
        execute(allreduce("float32", ReduceOp.AVERAGE, 4, contributors=()), [None], [out])
        assert (out == 17 / 4).all(), "nobody contributed, so nothing may be written"
    run(make_planes, 4, step)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 7.5), ("int32", 6), ("bfloat16", 7.5), ("float16", 7.5)])
def test_scale_factors(make_planes: Any, dtype: str, expected: float) -> None:
    def step(rank: int, execute: Any) -> None:
        for count in (3, 50_000):
            with case(count):
                mine = np.full(count, 2 + rank).astype(SUPPORTED_DTYPES[dtype])  # 2 + 3, halves of ints truncated: 1 + 1
                execute(allreduce(dtype, ReduceOp.SUM, 2, prescale=0.5, postscale=3.0), [mine], [mine])
                assert (mine.astype(np.float64) == expected).all()
    run(make_planes, 2, step)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_bucket_gives_the_same_bits_as_a_private_tensor(make_planes: Any, size: int, family: str) -> None:
    def step(rank: int, execute: Any) -> int:
        buffer = execute.fusion_buffer(3 * 65_536, tuple(range(size)))
        found = list(reductions(execute, family, size))
        for dtype, op in found:
            kind = SUPPORTED_DTYPES[dtype]
            for count, factors in ((8, {}), (4000, {}), (4000, {"prescale": 0.3, "postscale": 1.7})):
                if factors and kind.kind not in "f":
                    continue
                with case(dtype, op.name, count, factors):
                    response = allreduce(dtype, op, size, **factors)
                    mine = values(rank, count, kind)
                    alone = np.empty_like(mine)
                    execute(response, [mine], [alone])
                    nbytes = -(-mine.nbytes // 64) * 64
                    buffer_slice = BufferSlice(buffer, 65_536, 65_536 + nbytes)
                    memory = buffer.own[buffer_slice.begin:buffer_slice.end].view(kind)
                    memory[...] = 0
                    memory[:count] = mine
                    execute.barrier()  # as the decision that releases a bucket says
                    execute(response, [memory], [memory], buffer_slice)
                    check_equal(memory[:count], alone, in_any_order(make_planes, size))
        return len(found)
    run_cases(make_planes, size, step)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_identity_changes_no_bit(make_planes: Any, family: str) -> None:
    """A missing member's place holds it (docs/protocol.md#rounds): rank 1 contributes it, rank 0 anything, -0.0 too."""
    def step(rank: int, execute: Any) -> int:
        found = list(reductions(execute, family, 2))
        for dtype, op in found:
            kind = SUPPORTED_DTYPES[dtype]
            special = [0.0, -0.0, np.inf, -np.inf, np.nan] if kind.kind in "fV" else [0, 1]
            everything = np.concatenate([np.array(special, np.float32).astype(kind), values(0, 100, kind)])
            neutral = np.empty_like(everything)
            neutral[...] = identity(op, kind)
            results = []
            for contributors in ((0,), (0, 1)):
                out = np.empty_like(everything)
                response = msgspec.structs.replace(allreduce(dtype, op, 2), contributors=contributors)
                source = everything if rank == 0 else neutral if 1 in contributors else None
                execute(response, [source], [out])
                results.append(out.view(np.uint8))
            with case(dtype, op.name):
                assert np.array_equal(*results)
        return len(found)
    run_cases(make_planes, 2, step)


@pytest.mark.parametrize("size", SIZES)
def test_averages_of_integers_are_exact_where_their_sum_overflows(make_planes: Any, size: int) -> None:
    """The means of a dtype's limits and of values beside them, by every way a reduction takes."""
    def step(rank: int, execute: Any) -> int:
        found = [dtype for dtype, op in reductions(execute, "integers", size) if op is ReduceOp.AVERAGE]
        for dtype in found:
            kind = SUPPORTED_DTYPES[dtype]
            buffer = execute.fusion_buffer(3 * 65_536, tuple(range(size)))
            for count in (8, 20_000):
                mine = near_limits(rank, size, count, dtype)
                expected = mean_near_limits(size, count, dtype)
                total = len(mine)
                with case(dtype, count):
                    out = np.empty_like(mine)
                    execute(allreduce(dtype, ReduceOp.AVERAGE, size), [mine], [out])
                    assert np.array_equal(out, expected)
                    parts = [out[:count], out[count:]]
                    out[...] = 1
                    execute(allreduce(dtype, ReduceOp.AVERAGE, size, names=("a", "b")), [mine[:count], mine[count:]], parts)
                    assert np.array_equal(out, expected), "fused"
                    root = size - 1
                    execute(response(Collective.REDUCE, size, [], dtype=dtype, op=ReduceOp.AVERAGE, root_rank=root),
                            [mine], [out if rank == root else None])
                    assert rank != root or np.array_equal(out, expected), "reduce"
                    rows = even_rows(total, size)
                    own, begin = np.empty(rows[rank], kind), sum(rows[:rank])
                    scattered = response(Collective.REDUCESCATTER, size, list(rows), dtype=dtype, op=ReduceOp.AVERAGE)
                    execute(msgspec.structs.replace(scattered, row_elements=1), [mine], [own])
                    assert np.array_equal(own, expected[begin:begin + len(own)]), "reducescatter"
                    if mine.nbytes <= 65_536:
                        memory = buffer.own[65_536:131_072].view(kind)
                        memory[:total], memory[total:] = mine, 0
                        execute.barrier()
                        piece = BufferSlice(buffer, 65_536, 131_072)
                        execute(allreduce(dtype, ReduceOp.AVERAGE, size), [memory], [memory], piece)
                        assert np.array_equal(memory[:total], expected), "a bucket"
        return len(found)
    run_cases(make_planes, size, step)


def test_factors_of_averaged_integers_truncate_each_value_and_the_mean(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> int:
        found = [dtype for dtype, op in reductions(execute, "integers", 2) if op is ReduceOp.AVERAGE]
        for dtype in found:
            mine = np.array([5, 100] if rank else [2, 27], dtype)  # halved: 2 + 1 and 50 + 13, whose means are 1 and 31
            execute(allreduce(dtype, ReduceOp.AVERAGE, 2, prescale=0.5, postscale=2.5), [mine], [mine])
            with case(dtype):
                assert mine.tolist() == [2, 77]
        return len(found)
    run_cases(make_planes, 2, step)


def test_sixteen_bit_floats_are_summed_in_float32(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        for dtype in (ml_dtypes.bfloat16, np.float16):
            mine = np.array([[4096.0], [1.0], [1.0], [1.0]][rank], dtype)  # in 16 bits each + 1 would be lost
            out = np.empty_like(mine)
            execute(allreduce(np.dtype(dtype).name, ReduceOp.SUM, 4), [mine], [out])
            assert out == np.array([4099.0], np.float32).astype(dtype)
    run(make_planes, 4, step)


def test_nan_and_infinity_travel(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        for dtype in ("bfloat16", "float16", "float32"):
            mine = np.array([np.nan if rank == 1 else 1.0, np.inf, -np.inf, 1.0], np.float32)
            mine = mine.astype(SUPPORTED_DTYPES[dtype])
            execute(allreduce(dtype, ReduceOp.SUM, 2), [mine], [mine])
            assert str(mine.astype(np.float32).tolist()) == "[nan, inf, -inf, 2.0]"
    run(make_planes, 2, step)


def test_product(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        for dtype in ("int16", "float16", "complex64"):
            mine = np.array([rank + 1, 2, 0.5 if dtype != "int16" else 3], SUPPORTED_DTYPES[dtype])
            out = np.empty_like(mine)
            execute(allreduce(dtype, ReduceOp.PRODUCT, 3), [mine], [out])
            assert out.tolist() == [6, 8, 27 if dtype == "int16" else 0.125]
    run(make_planes, 3, step)


def adaptive(one: Array, other: Array) -> Array:
    """Adasum of two tensors, as the paper has it."""
    agreement = float(one @ other)
    squares = [float(one @ one), float(other @ other)]
    weights = [1 - agreement / (2 * square) if square else 1 for square in squares]
    return weights[0] * one + weights[1] * other


def adaptive_model(inputs: list[Array]) -> Array:
    level = [array.astype(np.float64) for array in inputs]
    while len(level) > 1:
        level = [adaptive(*level[at:at + 2]) if at + 1 < len(level) else level[at] for at in range(0, len(level), 2)]
    return level[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_adasum_weighs_each_tensor_by_itself(make_planes: Any, size: int, dtype: str) -> None:
    kind = SUPPORTED_DTYPES[dtype]
    counts = (1, 0, 70, 30_000)  # from less than a cache line a rank to more than a slot

    def step(rank: int, execute: Any) -> list[bytes]:
        inputs = [[values(other, count, kind) for other in range(size)] for count in counts]
        inputs[2][0][:] = 0  # a zero vector has no direction
        outputs = [np.empty_like(each[rank]) for each in inputs]
        execute(allreduce(dtype, ReduceOp.ADASUM, size, rows=counts, prescale=2.0, postscale=0.25, elements=sum(counts)),
                [each[rank] for each in inputs], outputs)
        for each, output in zip(inputs, outputs, strict=True):
            expected = 0.5 * adaptive_model(each)
            np.testing.assert_allclose(output.astype(np.float64), expected, rtol=0.01 if kind.itemsize == 2 else 1e-5,
                                       atol=0.02 if kind.itemsize == 2 else 1e-6)
        return [output.tobytes() for output in outputs]
    results = run(make_planes, size, step)
    assert all(result == results[0] for result in results), "ranks differ"


def test_adasum_without_a_rank_that_joined(make_planes: Any) -> None:
    def step(rank: int, execute: Any) -> None:
        inputs = [values(other, 20_000, np.dtype(np.float32)) for other in range(3)]
        out = np.empty(20_000, np.float32)
        given = ([], []) if rank == 1 else ([inputs[rank]], [out])
        execute(allreduce("float32", ReduceOp.ADASUM, 3, rows=(20_000,), elements=20_000, contributors=(0, 2)), *given)
        if rank != 1:
            expected = adaptive_model([inputs[0], inputs[2]])
            np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    run(make_planes, 3, step)
