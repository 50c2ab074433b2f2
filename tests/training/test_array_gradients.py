"""Gradients as arrays: one slot per variable, whatever gradients there are on the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.core.array import ALIGNMENT
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.arrays import ArrayReducer, Gradient, Rows
from tests.worlds import threads

SHAPES = [(3,), (40, 5), (6000,)]


def reducer_of(runtime: Runtime, *shapes: tuple[int, ...] | None, dtype: str = "float32") -> ArrayReducer:
    reducer = ArrayReducer(runtime, "set", op=ReduceOp.AVERAGE)
    for shape in shapes:
        reducer.add(shape, dtype)
    return reducer


def reduced_by(reducer: ArrayReducer, gradients: dict[int, Gradient]) -> dict[int, Gradient]:
    """Make a whole round."""
    reducer.expect(gradients)
    for slot, gradient in reversed(gradients.items()):
        reducer.hand_over(slot, gradient)
    return reducer.finish()


def full(slot: int, value: float, dtype: Any = np.float32) -> Any:
    return np.full(SHAPES[slot], value, dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_paired_by_their_slot(size: int) -> None:
    """Rank r has gradients of slot r only at first, then of others, then of none."""
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        reducer = reducer_of(runtime, *SHAPES)
        reducer.expect(range(3))
        for turn in range(12):
            own: dict[int, Gradient] = {} if turn % 4 == 3 else {(rank + turn) % 3: full((rank + turn) % 3, rank + 1)}
            reduced = reduced_by(reducer, own)
            expected = {(rank + turn) % 3: (rank + 1) / size for rank in range(size)} if turn % 4 != 3 else {}
            assert reduced.keys() == expected.keys()
            for slot, value in expected.items():
                np.testing.assert_allclose(reduced[slot], full(slot, value), rtol=1e-6)
    threads(size, step)


def test_a_slot_that_becomes_part_of_the_rounds_later() -> None:
    def step(runtime: Runtime) -> None:
        reducer = reducer_of(runtime, *SHAPES)
        for turn in range(16):
            slots = [0, 1] if turn < 6 else [0, 1, 2] if turn < 12 else [2]
            reduced = reduced_by(reducer, {slot: full(slot, runtime.world.rank + turn) for slot in slots})
            assert list(reduced) == slots
            for slot in slots:
                np.testing.assert_array_equal(reduced[slot], full(slot, turn + 0.5))
    threads(2, step)


def test_results_are_aligned_and_never_written_again() -> None:
    """Also where a slot has no gradient on any rank, so that its place is left out. TensorFlow keeps results uncopied."""
    def step(runtime: Runtime) -> None:
        reducer = reducer_of(runtime, *SHAPES)
        reducer.expect(range(3))
        kept = []
        for turn in range(12):
            slots = [slot for slot in range(3) if turn % 4 != slot]
            kept.append(reduced_by(reducer, {slot: full(slot, runtime.world.rank + turn) for slot in slots}))
            assert list(kept[-1]) == slots
        for turn, reduced in enumerate(kept):
            for slot, gradient in reduced.items():
                assert isinstance(gradient, np.ndarray) and gradient.ctypes.data % ALIGNMENT == 0
                np.testing.assert_array_equal(gradient, full(slot, turn + 0.5))
    threads(2, step)


def test_a_dtype_that_changes_while_a_gradient_is_missing() -> None:
    def step(runtime: Runtime) -> None:
        reducer = reducer_of(runtime, *SHAPES)
        for turn in range(12):
            dtype = np.float32 if turn < 6 else np.float64
            reducer.expect(range(3))
            own = {slot: full(slot, 2, dtype) for slot in range(3) if (slot, runtime.world.rank, turn) != (1, 1, 8)}
            reduced = reduced_by(reducer, {**own})
            assert [reduced[slot].dtype for slot in range(3)] == [dtype] * 3  # type: ignore[union-attr]
            assert reduced[1][0, 0] == (1 if turn == 8 else 2)  # type: ignore[index]
    threads(2, step)


def test_rows_of_a_sparse_gradient_also_where_a_rank_has_none() -> None:
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        reducer = reducer_of(runtime, *SHAPES)
        for turn in range(8):
            reducer.expect([0, 1])
            own: dict[int, Gradient] = {0: full(0, rank)}
            if turn % 4 == 1:
                own[1] = Rows(np.array([7, 7, rank]), np.full((3, 5), 2.0 + turn, np.float32))
            elif rank == 1 and turn % 4 == 2:
                own[1] = Rows(np.array([39]), np.arange(5, dtype=np.float32)[None])
            elif turn % 4 == 3:
                own[1] = Rows(np.zeros(0, np.int64), np.zeros((0, 5), np.float32))
            reduced = reduced_by(reducer, own)
            np.testing.assert_array_equal(reduced[0], full(0, 0.5))
            rows = reduced.get(1)
            if turn % 4 == 0:
                assert rows is None
                continue
            assert isinstance(rows, Rows)
            dense = np.zeros((40, 5), np.float32)
            np.add.at(dense, rows.indices, rows.values)
            expected = np.zeros((40, 5), np.float32)
            if turn % 4 == 1:
                expected[7], expected[0], expected[1] = 2 * (2 + turn), (2 + turn) / 2, (2 + turn) / 2
            elif turn % 4 == 2:
                expected[39] = np.arange(5) / 2
            np.testing.assert_allclose(dense, expected)
    threads(2, step)


def test_the_same_rows_on_all_ranks_are_added() -> None:
    """Those of an embedding of positions; others remain as they are, also if a rank has several of the same index."""
    def step(runtime: Runtime) -> None:
        rank = runtime.world.rank
        reducer = reducer_of(runtime, *SHAPES)
        for own, indices, values in (([3, 1, 0], [3, 1, 0], [1.5, 1.5, 1.5]),
                                     ([3, 1, 3], [3, 1, 3, 3, 1, 3], [0.5, 0.5, 0.5, 1, 1, 1]),
                                     ([0, 1 + rank], [0, 1, 0, 2], [0.5, 0.5, 1, 1]),
                                     ([4] * (1 + 2 * rank), [4] * 4, [0.5, 1, 1, 1])):
            reducer.expect([1])
            reduced = reduced_by(reducer, {1: Rows(np.array(own), np.full((len(own), 5), 1.0 + rank, np.float32))})
            assert isinstance(reduced[1], Rows)
            assert reduced[1].indices.tolist() == indices
            np.testing.assert_array_equal(reduced[1].values, np.repeat(values, 5).reshape(-1, 5))
    threads(2, step)


def test_a_missing_gradient_of_unknown_shape_is_refused() -> None:
    def step(runtime: Runtime) -> None:
        reducer = reducer_of(runtime, None)
        reducer.expect([0])
        if runtime.world.rank == 0:
            reducer.hand_over(0, full(0, 1))
        reducer.finish()
    with pytest.raises(UnsupportedError, match="whose shape is not known"):
        threads(2, step)
