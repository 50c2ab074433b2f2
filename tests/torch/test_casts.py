"""torch's kernels for 16-bit floats against NumPy's: the same bits."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from hvdlite.core.array import BFLOAT16, Array
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.negotiation.messages import Response
from hvdlite.planes import arithmetic
from hvdlite.planes.arithmetic import Casts, Reduction
from hvdlite_torch.arrays import tensors as casts

DTYPES = [np.dtype(np.float16), BFLOAT16]
ALL = np.arange(1 << 16, dtype=np.uint16)
SPECIAL = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x03FF, 0x0400, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0x7E00, 0x7EFF,
           0x7F00, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFBFF, 0xFC00]
"""Bits of zeros, subnormals, the smallest and the largest normal numbers, infinities and NaN of both dtypes."""
OPS = [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]


def test_torch_and_numpy_convert_16_bit_floats_to_the_same_bits() -> None:
    values = np.concatenate([np.linspace(-7e4, 7e4, 4001), [0.0, -0.0, np.inf, -np.inf, 1e-8, 6e-8, 65519.9, 1 + 2**-9]])
    values = np.concatenate([values, np.random.default_rng(1).standard_normal(5000)]).astype(np.float32)
    for dtype in DTYPES:
        results = []
        for widen, narrow in ((arithmetic.widen, arithmetic.narrow), (casts.widen, casts.narrow)):
            short, wide = np.empty(values.size, dtype), np.empty(values.size, np.float32)
            with np.errstate(all="ignore"):
                narrow(values.copy(), short)
                widen(short, wide)
            results.append((short.view(np.uint16), wide.view(np.uint32)))
        assert np.array_equal(results[0][0], results[1][0]) and np.array_equal(results[0][1], results[1][1])


# docs/protocol.md#same-bits
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_value_with_many_others_reduces_to_the_bits_of_float32(op: ReduceOp, dtype: np.dtype[np.generic]) -> None:
    partners = [*SPECIAL, *np.random.default_rng(2).integers(0, 1 << 16, 20)]
    for partner in partners:
        others = np.full(ALL.size, partner, np.uint16)
        for one, other in ((ALL, others), (others, ALL)):
            # 16 chunks: those with a result that the kernel refuses, and those without
            expected, *actual = (reduce(op, [one.view(dtype), other.view(dtype)], kernels, 1 << 12, in_place)
                                 for kernels, in_place in ((Casts(casts.widen, casts.narrow), False),
                                                           (casts_of_torch(), False), (casts_of_torch(), True)))
            for result in actual:
                assert np.array_equal(result, expected)


# docs/protocol.md#same-bits
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_values_and_odd_lengths_reduce_to_the_bits_of_numpy(dtype: np.dtype[np.generic]) -> None:
    random = np.random.default_rng(3)
    for length in [*range(1, 70), 1000, 10007]:
        one, other = (random.standard_normal(length).astype(np.float32).astype(dtype) for _ in range(2))
        one.flags.writeable = False
        for op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            expected = reduce(op, [one, other], Casts.of_numpy(), length)
            assert np.array_equal(reduce(op, [one, other], casts_of_torch(), length), expected)


def test_a_pair_whose_result_may_be_inexact_is_refused() -> None:
    largest = np.array([0x7F7F, 0x3F80], np.uint16).view(BFLOAT16)
    out = np.empty_like(largest)
    assert not casts.reduce_pair(largest, largest, 1, out)  # the sum is infinite
    assert not casts.reduce_pair(largest, largest, 2, out)  # so is half of it, but not the interpolation
    assert casts.reduce_pair(largest, -largest, 1, out) and out.view(np.uint16).tolist() == [0, 0]
    assert casts.reduce_pair(largest[1:], largest[1:], 2, out[1:]) and out[1] == 1


def casts_of_torch() -> Casts:
    return Casts(casts.widen, casts.narrow, casts.reduce_pair)


def reduce(op: ReduceOp, sources: list[Array], kernels: Casts, chunk: int, in_place: bool = False) -> Array:
    """Return the bits of the reduction of two ranks' arrays."""
    dtype = sources[0].dtype
    name = "bfloat16" if dtype == BFLOAT16 else "float16"
    response = Response(names=("x",), collective=Collective.ALLREDUCE, dtype=name, op=op, contributors=(0, 1))
    if in_place:
        sources = [source.copy() for source in sources]
    out = sources[0] if in_place else np.empty_like(sources[0])
    Reduction(response, dtype, 2, chunk, kernels).combine(sources, out)
    bits: Array = out.view(np.uint16)
    return bits
