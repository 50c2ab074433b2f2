"""Gradients that are arrays: the framework adapter for libraries whose gradients are values."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from hvdlite.core.array import ALIGNMENT, SUPPORTED_DTYPES, Array, accumulator_dtype, aligned_empty, dtype_name
from hvdlite.core.device import AnyArray, Completion, Event
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.framework import Shape, StagedGradient
from hvdlite.training.gradient_reducer import GradientReducer


@dataclasses.dataclass(frozen=True)
class Rows:
    """A sparse gradient: some rows of a variable, repeated ones allowed.

    Attributes:
        indices: of the rows, (n,) int64.
        values: (n, *shape of a row).
    """

    indices: Array
    values: Array


Gradient = Array | Rows


@dataclasses.dataclass(eq=False)
class Slot:
    """Stands for a variable.

    Attributes:
        shape: of its gradient; None while that is unknown.
        dtype: of the gradient on the wire: the last one's, or the one to expect when there was none yet.
        group_id: as in `GradientReducer.add`.
        is_expected: whether a round has been about the variable, maybe the one to come.
        gradient: this rank's or the reduced one; None when there is none.
    """

    shape: tuple[int, ...] | None
    dtype: np.dtype[Any]
    group_id: int = 0
    is_expected: bool = False
    gradient: Gradient | None = None


class BucketView:
    """A place in a bucket.

    Attributes:
        array: over the place.
        address: of its memory.
    """

    __slots__ = ("address", "array")

    def __init__(self, array: Array) -> None:
        self.array, self.address = array, array.ctypes.data


class _Batch(list[tuple[Slot, BucketView]]):
    """Places of a bucket whose values are copied out together, with what every such copy needs."""

    def __init__(self, pairs: Sequence[tuple[Slot, BucketView]]) -> None:
        super().__init__(pairs)
        begin = min((view.address for _, view in pairs), default=0)
        length = max((view.address + view.array.nbytes for _, view in pairs), default=0) - begin
        self._lead = begin % ALIGNMENT  # keeps the places' alignment
        self._source = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(begin)) if length else None
        self._outlines = [(slot, view.array.shape, view.array.dtype, view.address - begin + self._lead)
                          for slot, view in pairs]

    def copy_out(self) -> None:
        """Make new arrays with the places' values the gradients of the slots. All of them share one block."""
        lead, source = self._lead, self._source
        block = aligned_empty((lead + (0 if source is None else source.size),), np.dtype(np.uint8))
        if source is not None:
            np.copyto(block[lead:], source)
        for slot, shape, dtype, offset in self._outlines:
            slot.gradient = np.ndarray(shape, dtype, block, offset)


class ArrayGradients:
    """The gradients of slots, for `GradientReducer`. Results are new arrays: what was handed out is not written again.

    Args:
        sources: of gradients; the number of ranks.
    """

    needs_notes = False

    def __init__(self, sources: int) -> None:
        self._sources = sources

    def note(self, parameter: Slot) -> None:
        return None

    def has_gradient(self, parameter: Slot) -> bool:
        return parameter.gradient is not None

    def is_trainable(self, parameter: Slot) -> bool:
        return parameter.is_expected

    def shape(self, parameter: Slot) -> Shape:
        return Shape(dtype_name(parameter.dtype), _shape(parameter))

    def stage(self, parameter: Slot) -> StagedGradient[Slot]:
        staged = self.stage_empty(parameter)
        assert isinstance(parameter.gradient, np.ndarray)
        np.copyto(staged.tensor, parameter.gradient)
        return staged

    def stage_empty(self, parameter: Slot) -> StagedGradient[Slot]:
        array = aligned_empty(_shape(parameter), parameter.dtype)
        return StagedGradient(parameter, array, array)

    def unstage(self, staged: StagedGradient[Slot]) -> Any:
        staged.parameter.gradient = staged.tensor
        return None

    def is_sparse(self, parameter: Slot) -> bool:
        return isinstance(parameter.gradient, Rows)

    def rows(self, parameter: Slot) -> Array:
        rows = parameter.gradient
        assert isinstance(rows, Rows)
        indices = np.ascontiguousarray(rows.indices, np.int64).reshape(-1, 1).view(np.uint8)
        values = np.ascontiguousarray(rows.values).reshape(len(rows.indices), math.prod(rows.values.shape[1:]))
        return np.concatenate([indices, values.view(np.uint8)], axis=1)

    def give_rows(self, parameter: Slot, rows: Array, factor: float) -> Any:
        row = _shape(parameter)[1:]
        if rows.shape[1] != 8 + parameter.dtype.itemsize * math.prod(row):
            raise UnsupportedError(f"a sparse gradient with rows of {rows.shape[1]} bytes does not fit a variable of shape "
                                   f"{list(_shape(parameter))} and dtype {parameter.dtype}")
        # Flat, because the slice of a single row counts as contiguous whatever its strides, which the views refuse.
        indices = rows[:, :8].reshape(-1).view(np.int64)
        values = rows[:, 8:].reshape(-1).view(parameter.dtype).reshape(len(rows), *row)
        own, rest = divmod(len(rows), self._sources)
        if (own and not rest and (indices.reshape(self._sources, own) == indices[:own]).all()
                and np.unique(indices[:own]).size == own):
            # The same rows on all ranks, each once, as of an embedding of positions that all samples share. Some optimizers
            # (Keras' Adam on TensorFlow) square each row that they get before they add those of the same index, so they get
            # one, as in one process. Where each sample has rows of its own, one process has several of the same index, too.
            summed = values.reshape(self._sources, own, *row).sum(0, dtype=accumulator_dtype(values.dtype))
            indices, values = indices[:own], summed.astype(values.dtype, copy=False)
        parameter.gradient = Rows(indices, scaled(values, factor))
        return None

    def bucket_view(self, parameter: Slot, place: AnyArray) -> BucketView:
        assert isinstance(place, np.ndarray)
        return BucketView(place)

    def fill(self, parameter: Slot, view: BucketView) -> bool:
        return self.fill_all([(parameter, view)])

    def batch(self, pairs: Sequence[tuple[Slot, BucketView]]) -> Sequence[tuple[Slot, BucketView]]:
        return _Batch(pairs)

    def fill_all(self, pairs: Sequence[tuple[Slot, BucketView]]) -> bool:
        copies = [(view.array, given) for parameter, view in pairs if isinstance(given := parameter.gradient, np.ndarray)
                  and given.shape == view.array.shape and given.dtype == view.array.dtype]
        if len(copies) < len(pairs):
            return False
        for array, given in copies:
            np.copyto(array, given)
        return True

    def fill_with(self, parameter: Slot, view: BucketView, value: Any) -> bool:
        if parameter.shape != view.array.shape or parameter.dtype != view.array.dtype:
            return False
        view.array[...] = value
        return True

    def filled(self, memory: AnyArray) -> Event | None:
        return None

    def follow(self, completion: Completion) -> None:
        completion.wait()

    def copy_from_row_major(self, view: BucketView, values: AnyArray) -> None:
        assert isinstance(values, np.ndarray)
        np.copyto(view.array, values)

    def detach_view(self, parameter: Slot, view: BucketView) -> Any:
        return None

    def install_view(self, parameter: Slot, view: BucketView) -> Any:
        self.install_views([(parameter, view)])
        return None

    def install_views(self, pairs: Sequence[tuple[Slot, BucketView]]) -> Sequence[Any]:
        """See `Framework`. All gradients share one new block: ten times as fast; it lasts as long as any of them."""
        if pairs:
            (pairs if isinstance(pairs, _Batch) else _Batch(pairs)).copy_out()
        return [None] * len(pairs)

    def is_marked(self, parameter: Slot, mark: Any) -> bool:
        return False

    def is_changed(self, parameter: Slot, mark: Any) -> bool:
        return False

    def is_zeroed(self, parameter: Slot, mark: Any) -> bool:
        return False

    def renew(self, parameter: Slot, mark: Any) -> None:
        return None

    def is_staged(self, staged: StagedGradient[Slot]) -> bool:
        return False  # arrays are not written to

    def take(self, parameter: Slot) -> Any:
        raise NotImplementedError  # a slot is enqueued once per round

    def accumulate(self, parameter: Slot, gradient: Any) -> None:
        raise NotImplementedError


class ArrayReducer:
    """Reduces the gradients of the same variables again and again, as one round of a gradient set each time.

    Each variable has a slot, whose index `add` returns. A round is `expect`, any number of `give` in any order, `finish`;
    `give` may come from any thread.

    Args:
        label: equal on all ranks. Names of gradients are made of it and a number in order of first expectation: ranks may
            have other slots besides.
    """

    def __init__(self, runtime: Runtime, label: str, *, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0,
                 process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
        self._reducer: GradientReducer[Slot] = GradientReducer(
            runtime, ArrayGradients(len(runtime.members(process_set))), label, op=op, prescale=prescale, postscale=postscale,
            passes=1, process_set=process_set)
        self._slots: list[Slot] = []
        self._names = itertools.count()
        self._lock = threading.Lock()

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to share gradients with."""
        return self._reducer.is_shared

    def add(self, shape: tuple[int, ...] | None, dtype: str, group_id: int = 0) -> int:
        """Return the index of a new slot. All ranks add those that are expected together in the same order.

        Args:
            shape: of the gradient; None when it is not known before there is one.
            dtype: of the gradient on the wire, as the runtime names it.
            group_id: as in `GradientReducer.add`.
        """
        with self._lock:
            self._slots.append(Slot(shape, SUPPORTED_DTYPES[dtype], group_id))
            return len(self._slots) - 1

    def expect(self, slots: Collection[int]) -> None:
        """Add slots to the round, before the first `give`. Once expected, a slot is part of every round."""
        if all(self._slots[slot].is_expected for slot in slots):
            return
        with self._lock:
            new = [self._slots[slot] for slot in sorted(slots) if not self._slots[slot].is_expected]
            for slot in new:
                self._reducer.add(slot, str(next(self._names)), slot.group_id)
            for slot in new:
                slot.is_expected = True
            self._reducer.sequence.admit()

    def give(self, slot: int, gradient: Gradient) -> None:
        """Enqueue one gradient.

        Args:
            gradient: C-contiguous. One of up to `bucket_round.SMALL` bytes is not to be changed before `finish` returns; a
                larger one is copied before this returns.
        """
        values = gradient.values if isinstance(gradient, Rows) else gradient
        given = self._slots[slot]
        given.dtype, given.gradient = values.dtype, gradient
        if given.shape is None or values is gradient:
            given.shape = values.shape  # of rows only the shape of a row counts
        self._reducer.hand_over(given)

    def finish(self) -> dict[int, Gradient]:
        """Return the reduced gradients by slot, without slots that have no gradient on any rank.

        Raises:
            HorovodInternalError: when a reduction failed.
            UnsupportedError: when a gradient of unknown shape is missing.
        """
        try:
            if self._reducer.end_backward():
                self._reducer.sequence.wait()
            return {index: slot.gradient for index, slot in enumerate(self._slots) if slot.gradient is not None}
        finally:
            try:
                self._reducer.stepped()
            finally:
                for slot in self._slots:
                    slot.gradient = None

    def reduce(self, gradients: dict[int, Gradient]) -> dict[int, Gradient]:
        """Make a whole round of gradients by slot; see `finish`."""
        self.expect(gradients)
        for slot, gradient in reversed(gradients.items()):
            self.give(slot, gradient)
        return self.finish()


def scaled(array: Array, factor: float) -> Array:
    """Return an array times a factor; itself when that is 1."""
    return array if abs(factor - 1.0) < 1e-6 else (array * factor).astype(array.dtype, copy=False)


def _shape(slot: Slot) -> tuple[int, ...]:
    if slot.shape is None:
        raise UnsupportedError("a gradient is missing whose shape is not known: this rank has never had one, and what it is "
                               "the gradient of has a shape that TensorFlow does not know; give it a static shape")
    return slot.shape
