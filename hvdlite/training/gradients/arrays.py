"""Gradients that are arrays: the framework adapter for libraries whose gradients are values."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import operator
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from hvdlite.core.array import ALIGNMENT, SUPPORTED_DTYPES, Array, accumulator_dtype, aligned_empty, dtype_name
from hvdlite.core.device import AnyArray, Completion, Event
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.handoff.buckets import LearnedBucket
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.before_step import BeforeStep
from hvdlite.training.gradients.framework import SMALL, Alone, Places, Shape
from hvdlite.training.gradients.reducer import Reducer


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
        group_id: as in `Reducer.add`.
        is_expected: whether a round has been about the variable, maybe the one to come.
        gradient: this rank's or the reduced one; None when there is none.
    """

    shape: tuple[int, ...] | None
    dtype: np.dtype[Any]
    group_id: int = 0
    is_expected: bool = False
    gradient: Gradient | None = None


class ArrayPlaces:
    """The places of a bucket.

    Results are new arrays, which share a block. That is ten times as fast; the block lasts as long as any of them.

    Args:
        arrays: over the places.
    """

    def __init__(self, arrays: Sequence[Array], slots: Sequence[Slot]) -> None:
        self._arrays = arrays
        self._slots = slots
        self.small: Sequence[int] = [place for place, array in enumerate(arrays) if array.nbytes <= SMALL]
        self._outline = self._outlined(range(len(arrays)))

    def fill(self, places: Sequence[int], gradients: Sequence[Gradient], is_own: bool) -> bool:
        arrays = [self._arrays[place] for place in places]
        for array, given in zip(arrays, gradients, strict=True):
            if not isinstance(given, np.ndarray) or given.shape != array.shape or given.dtype != array.dtype:
                return False
        for array, given in zip(arrays, gradients, strict=True):
            np.copyto(array, given)  # type: ignore[arg-type]
        return True

    def vacate(self, place: int, held: list[Gradient]) -> None:
        pass

    def blank(self, place: int, value: Any, old: Gradient | None) -> bool:
        array, slot = self._arrays[place], self._slots[place]
        if slot.shape != array.shape or slot.dtype != array.dtype:
            return False
        array[...] = value
        return True

    def filled(self) -> Event | None:
        return None

    def take_back(self, places: Sequence[int]) -> Sequence[Gradient]:
        return self.results(places)

    def results(self, places: Sequence[int] | None) -> Sequence[Gradient]:
        lead, source, outlines = self._outline if places is None else self._outlined(places)
        block = aligned_empty((lead + source.size,), np.dtype(np.uint8))
        np.copyto(block[lead:], source)
        return [np.ndarray(shape, dtype, block, offset) for shape, dtype, offset in outlines]

    def from_row_major(self, place: int, values: AnyArray) -> None:
        assert isinstance(values, np.ndarray)
        np.copyto(self._arrays[place], values)

    def _outlined(self, places: Sequence[int]) -> tuple[int, Array, list[tuple[tuple[int, ...], np.dtype[Any], int]]]:
        """Return what every copy of these places needs: bytes in front of it, its source, and where the arrays lie in it."""
        arrays = [(self._arrays[place], self._arrays[place].ctypes.data) for place in places]
        begin = min((address for _, address in arrays), default=0)
        length = max((address + array.nbytes for array, address in arrays), default=0) - begin
        lead = begin % ALIGNMENT  # keeps the places' alignment
        source = (np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(begin)) if length
                  else np.empty(0, np.uint8))
        return lead, source, [(array.shape, array.dtype, address - begin + lead) for array, address in arrays]


class ArrayGradients:
    """The gradients of slots, for `Reducer`. Results are new arrays: what was given is not written to.

    Args:
        sources: of gradients; the number of ranks.
    """

    def __init__(self, sources: int) -> None:
        self._sources = sources

    get = staticmethod(operator.attrgetter("gradient"))
    reference = weakref.ref

    def set(self, slot: Slot, gradient: Gradient | None) -> None:
        slot.gradient = gradient

    def is_trainable(self, slot: Slot) -> bool:
        return slot.is_expected

    def shape(self, slot: Slot) -> Shape:
        return Shape(dtype_name(slot.dtype), _shape(slot))

    def add(self, gradient: Gradient, more: Gradient) -> Gradient:
        return gradient + more  # type: ignore[operator]

    def scaled(self, gradients: Sequence[Gradient], factor: float) -> Sequence[Gradient]:
        return [scaled(gradient, factor) for gradient in gradients]

    def version(self, gradient: Gradient) -> int:
        return 0

    def is_zero(self, gradient: Gradient) -> bool:
        return not np.any(gradient.values if isinstance(gradient, Rows) else gradient)

    def rows(self, slot: Slot, gradient: Gradient) -> Array | None:
        if not isinstance(gradient, Rows):
            return None
        indices = np.ascontiguousarray(gradient.indices, np.int64).reshape(-1, 1).view(np.uint8)
        values = np.ascontiguousarray(gradient.values).reshape(len(indices), math.prod(gradient.values.shape[1:]))
        return np.concatenate([indices, values.view(np.uint8)], axis=1)

    def from_rows(self, slot: Slot, rows: Array, factor: float) -> Gradient:
        row = _shape(slot)[1:]
        if rows.shape[1] != 8 + slot.dtype.itemsize * math.prod(row):
            raise UnsupportedError(f"a sparse gradient with rows of {rows.shape[1]} bytes does not fit a variable of shape "
                                   f"{list(_shape(slot))} and dtype {slot.dtype}")
        # Flat, because the slice of a single row counts as contiguous whatever its strides, which the views refuse.
        indices = rows[:, :8].reshape(-1).view(np.int64)
        values = rows[:, 8:].reshape(-1).view(slot.dtype).reshape(len(rows), *row)
        own, rest = divmod(len(rows), self._sources)
        if (own and not rest and (indices.reshape(self._sources, own) == indices[:own]).all()
                and np.unique(indices[:own]).size == own):
            # The same rows on all ranks, each once, as of an embedding of positions that all samples share. Some optimizers
            # (Keras' Adam on TensorFlow) square each row that they get before they add those of the same index, so they get
            # one, as in one process. Where each sample has rows of its own, one process has several of the same index, too.
            summed = values.reshape(self._sources, own, *row).sum(0, dtype=accumulator_dtype(values.dtype))
            indices, values = indices[:own], summed.astype(values.dtype, copy=False)
        return scaled(Rows(indices, values), factor)

    def places(self, bucket: LearnedBucket, slots: Sequence[Slot]) -> Places:
        arrays = [bucket.logical(index) for index in range(len(slots))]
        assert all(isinstance(array, np.ndarray) for array in arrays)
        return ArrayPlaces(arrays, slots)  # type: ignore[arg-type]

    def alone(self, slot: Slot, gradient: Gradient | None, counts: bool) -> Alone:
        array = aligned_empty(_shape(slot), slot.dtype)
        if counts:
            assert isinstance(gradient, np.ndarray)
            np.copyto(array, gradient)
        return array, lambda: array

    def follow(self, completion: Completion) -> None:
        completion.wait()


class ArrayReducer:
    """Reduces the gradients of the same variables again and again, as one round of a gradient set each time.

    Each variable has a slot, whose index `add` returns. A round is `expect`, any number of `hand_over` in any order and from
    any thread, and `finish`.

    Args:
        label: equal on all ranks. Names of gradients are made of it and a number in order of first expectation: ranks may
            have other slots besides.

    Attributes:
        reducer: of the slots.
    """

    def __init__(self, runtime: Runtime, label: str, *, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0,
                 process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
        self.reducer: Reducer[Slot] = Reducer(
            runtime, ArrayGradients(len(runtime.members(process_set))), label, op=op, prescale=prescale, postscale=postscale,
            passes=1, process_set=process_set)
        self._before_step = BeforeStep(self.reducer, looks_for_replaced=False)
        self._slots: list[Slot] = []
        self._names = itertools.count()
        self._lock = threading.Lock()

    def add(self, shape: tuple[int, ...] | None, dtype: str, group_id: int = 0) -> int:
        """Return the index of a new slot. All ranks add those that are expected together in the same order.

        Args:
            shape: of the gradient; None when it is not known before there is one.
            dtype: of the gradient on the wire, as the runtime names it.
            group_id: as in `Reducer.add`.
        """
        with self._lock:
            self._slots.append(Slot(shape, SUPPORTED_DTYPES[dtype], group_id))
            return len(self._slots) - 1

    def expect(self, slots: Collection[int]) -> None:
        """Add slots to the round, before the first `hand_over`. Once expected, a slot is part of every round."""
        if all(self._slots[slot].is_expected for slot in slots):
            return
        with self._lock:
            new = [self._slots[slot] for slot in sorted(slots) if not self._slots[slot].is_expected]
            for slot in new:
                self.reducer.add(slot, str(next(self._names)), slot.group_id)
            for slot in new:
                slot.is_expected = True
            self.reducer.admit()

    def hand_over(self, slot: int, gradient: Gradient) -> None:
        """Enqueue one gradient.

        Args:
            gradient: C-contiguous. One of up to `SMALL` bytes is not to be changed before `finish` returns; a
                larger one is copied before this returns.
        """
        values = gradient.values if isinstance(gradient, Rows) else gradient
        given = self._slots[slot]
        given.dtype, given.gradient = values.dtype, gradient
        if given.shape is None or values is gradient:
            given.shape = values.shape  # of rows only the shape of a row counts
        self.reducer.accumulated(given)

    def finish(self) -> dict[int, Gradient]:
        """Return the reduced gradients by slot, without slots that have no gradient on any rank.

        Raises:
            HorovodInternalError: when a reduction failed.
            UnsupportedError: when a gradient of unknown shape is missing.
        """
        try:
            if self.reducer.end_pass():
                self.reducer.wait()
            return {index: slot.gradient for index, slot in enumerate(self._slots) if slot.gradient is not None}
        finally:
            try:
                self._before_step.stepped()
            finally:
                for slot in self._slots:
                    slot.gradient = None


def scaled(gradient: Gradient, factor: float) -> Gradient:
    """Return a gradient times a factor; itself when that is 1, and zeros when it is 0, also of what is not finite."""
    if factor == 1.0:
        return gradient
    values = gradient.values if isinstance(gradient, Rows) else gradient
    values = (values * factor if factor else np.zeros_like(values)).astype(values.dtype, copy=False)
    return Rows(gradient.indices, values) if isinstance(gradient, Rows) else values


def _shape(slot: Slot) -> tuple[int, ...]:
    if slot.shape is None:
        raise UnsupportedError("a gradient is missing whose shape is not known: this rank has never had one, and what it is "
                               "the gradient of has a shape that TensorFlow does not know; give it a static shape")
    return slot.shape
