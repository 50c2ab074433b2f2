"""Gradients that come and go as arrays: for frameworks whose gradients are values, not attributes of parameters."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.core.array import Array, aligned_empty, dtype_name
from hvdlite.core.device import AnyArray, Completion, Event
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.framework import Loan, Shape
from hvdlite.training.gradient_reducer import GradientReducer


class Slot:
    """Stands for a parameter.

    Attributes:
        shape: of its gradient; None until there was one.
        array: the gradient, given or reduced; None when there is none.
    """

    shape: tuple[int, ...] | None = None
    dtype: np.dtype[Any] = np.dtype("float32")
    array: Array | None = None


class ArrayGradients:
    """The gradients of slots, for `GradientReducer`. Results are new arrays: what was handed out is not written again."""

    def has_gradient(self, parameter: Slot) -> bool:
        return parameter.array is not None

    def shape(self, parameter: Slot) -> Shape:
        assert parameter.shape is not None
        return Shape(dtype_name(parameter.dtype), parameter.shape)

    def lend(self, parameter: Slot) -> Loan[Slot]:
        loan = self.lend_empty(parameter)
        assert parameter.array is not None
        np.copyto(loan.tensor, parameter.array)
        return loan

    def lend_empty(self, parameter: Slot) -> Loan[Slot]:
        assert parameter.shape is not None
        array = aligned_empty(parameter.shape, parameter.dtype)
        return Loan(parameter, array, array)

    def give_back(self, loan: Loan[Slot]) -> Any:
        loan.parameter.array = loan.tensor
        return None

    def is_sparse(self, parameter: Slot) -> bool:
        return False

    def rows(self, parameter: Slot) -> Array:
        raise UnsupportedError("arrays are dense")

    def give_rows(self, parameter: Slot, rows: Array, factor: float) -> Any:
        raise UnsupportedError("another rank has a sparse gradient where this one has a dense one")

    def seat(self, parameter: Slot, place: AnyArray) -> Array:
        assert isinstance(place, np.ndarray)
        return place

    def fill(self, parameter: Slot, seat: Array) -> bool:
        given = parameter.array
        if given is None or given.shape != seat.shape or given.dtype != seat.dtype:
            return False
        np.copyto(seat, given)
        return True

    def fill_all(self, pairs: Sequence[tuple[Slot, Array]]) -> list[bool]:
        return [self.fill(parameter, seat) for parameter, seat in pairs]

    def fill_with(self, parameter: Slot, seat: Array, value: Any) -> bool:
        seat[...] = value
        return True

    def filled(self, memory: AnyArray) -> Event | None:
        return None

    def follow(self, completion: Completion) -> None:
        completion.wait()

    def settle(self, seat: Array, values: AnyArray) -> None:
        assert isinstance(values, np.ndarray)
        np.copyto(seat, values)

    def vacate(self, parameter: Slot, seat: Array) -> Any:
        return None

    def adopt(self, parameter: Slot, seat: Array) -> Any:
        assert parameter.shape is not None
        parameter.array = aligned_empty(parameter.shape, parameter.dtype)
        np.copyto(parameter.array, seat)
        return None

    def adopt_all(self, pairs: Sequence[tuple[Slot, Array]]) -> Sequence[Any]:
        return [self.adopt(parameter, seat) for parameter, seat in pairs]

    def is_marked(self, parameter: Slot, mark: Any) -> bool:
        return False

    def is_changed(self, parameter: Slot, mark: Any) -> bool:
        return False

    def is_trainable(self, parameter: Slot) -> bool:
        return True


class ArrayReducer:
    """Reduces the same list of gradients again and again, as one round of a declared set each time.

    Args:
        label: equal on all ranks; names of gradients are made of it and their index.
    """

    def __init__(self, runtime: Runtime, label: str, *, op: ReduceOp, prescale: float = 1.0, postscale: float = 1.0,
                 process_set: int = GLOBAL_PROCESS_SET_ID) -> None:
        self._reducer: GradientReducer[Slot] = GradientReducer(runtime, ArrayGradients(), label, op=op, prescale=prescale,
                                                               postscale=postscale, passes=1, process_set=process_set)
        self._slots: list[Slot] = []
        self._lock = threading.Lock()

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to share gradients with."""
        return self._reducer.is_shared

    def __len__(self) -> int:
        """Return how many gradients there are; 0 before the first round."""
        return len(self._slots)

    def reduce(self, gradients: Sequence[Array | None], clusters: Sequence[int] = ()) -> list[Array]:
        """Return the reductions over all ranks of so many gradients; the same number in every call.

        Args:
            gradients: C-contiguous; None where this rank has none, which counts as zeros.
            clusters: as in `GradientReducer.add`, of each gradient; those of the first call count.

        Raises:
            HorovodInternalError: when a reduction failed.
            UnsupportedError: when the number of gradients has changed, or one is missing in the first call.
        """
        if not self.is_shared:
            return [gradient for gradient in gradients if gradient is not None]
        self.open(clusters or [0] * len(gradients))
        for index, gradient in reversed(list(enumerate(gradients))):  # the last layers' gradients came first
            if gradient is not None:
                self.give(index, gradient)
        return self.finish()

    def open(self, clusters: Sequence[int]) -> None:
        """Say how many gradients there are, before the first `give` of each round, and how they go together.

        `open`, any order of `give` and `finish` are `reduce` in steps; `give` may come from any thread.

        Raises:
            UnsupportedError: when the number has changed.
        """
        with self._lock:
            if not self._slots:
                self._slots = [Slot() for _ in clusters]
                for index, (slot, cluster) in enumerate(zip(self._slots, clusters, strict=True)):
                    self._reducer.add(slot, str(index), cluster)
        if len(clusters) != len(self._slots):
            raise UnsupportedError(f"{len(clusters)} gradients, after {len(self._slots)} in the first step; make another "
                                   "optimizer or tape for another set of variables")

    def give(self, index: int, gradient: Array) -> None:
        """Hand over one gradient, which is C-contiguous and copied before this returns."""
        slot = self._slots[index]
        slot.shape, slot.dtype, slot.array = gradient.shape, gradient.dtype, gradient
        self._reducer.hand_over(slot)

    def finish(self) -> list[Array]:
        """Return the reductions; what was not given counts as zeros.

        Raises:
            HorovodInternalError: when a reduction failed.
            UnsupportedError: when a gradient was never given.
        """
        shapes = [slot.shape for slot in self._slots if slot.shape is not None]
        if len(shapes) < len(self._slots):
            index = next(index for index, slot in enumerate(self._slots) if slot.shape is None)
            raise UnsupportedError(f"gradient {index} is missing in the first step, so nothing is known about it")
        try:
            if self._reducer.end_backward():
                self._reducer.wait()
            return [np.zeros(shape, slot.dtype) if slot.array is None else slot.array
                    for slot, shape in zip(self._slots, shapes, strict=True)]
        finally:
            self._reducer.stepped()
            for slot in self._slots:
                slot.array = None
