"""Reducing gradients that Keras passes to `apply` as values; for eager backends, and the base of JAX's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.core.array import Array
from hvdlite.training.replicas import VALUES
from hvdlite.training.step_reducer import ArrayStepReducer, current_weight

_COMPARED = 16
"""The most variables that are compared between ranks."""


class KerasStepReducer(ArrayStepReducer):
    """Reduces the gradients of backends on which every variable has a dense gradient; ignores `sparse_as_dense`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__("keras", **arguments)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.is_shared:
            self._step_begins()
            return list(gradients)
        slots = self._slots_of(variables)
        given = {slot: gradient for slot, gradient in zip(slots, gradients, strict=True) if gradient is not None}
        original = {slot: keras.backend.standardize_dtype(gradient.dtype) for slot, gradient in given.items()}
        sent = [keras.ops.cast(gradient, self._wire_dtype(original[slot])) for slot, gradient in given.items()]
        weight = current_weight()
        present, is_counted = list(given), weight is not None
        counted = [] if weight is None else [keras.ops.convert_to_tensor(weight, dtype="float32")]

        def reduce(arrays: Sequence[Array]) -> list[Array]:
            own = float(arrays[-1]) if is_counted else None
            self._enqueue(dict(zip(present, arrays, strict=False)), slots, own)
            reduced = self._finish(present, own)
            self._compare_once(lambda: (named, arrays[len(present)]))
            return [*(reduced[slot] for slot in present), *arrays[len(present):]]  # type: ignore[list-item]  # dense ones
        named, few = _few_values(variables)
        tensors = [*sent, few, *counted]
        outputs = dict(zip(given, self._call(reduce, tensors) if tensors else [], strict=False))
        return [keras.ops.cast(outputs[slot], original[slot]) if slot in given else None for slot in slots]

    def _call(self, function: Callable[[Sequence[Array]], Sequence[Array]], tensors: Sequence[Any]) -> list[Any]:
        return call(function, tensors, tensors)


create_step_reducer = KerasStepReducer


def _few_values(variables: Sequence[Any]) -> tuple[list[tuple[str, str]], Any]:
    """Return names, dtypes and values of some variables for `FirstComparison`; a compiled function has them in each step."""
    chosen = [each for each in variables if keras.backend.is_float_dtype(each.dtype)]
    chosen = chosen[::-(-len(chosen) // _COMPARED) or 1]
    rows = []
    for each in chosen:
        flat = keras.ops.reshape(each.value, (-1,))
        values = flat[::max(1, len(flat) // VALUES)][:VALUES]
        rows.append(keras.ops.pad(keras.ops.cast(values, "float32"), [[0, VALUES - len(values)]]))
    named = [(each.path, keras.backend.standardize_dtype(each.dtype)) for each in chosen]
    return named, keras.ops.stack(rows) if rows else keras.ops.zeros((0, VALUES))


def copies(values: Sequence[Any]) -> list[Any]:
    """See the package."""
    return [keras.ops.copy(keras.ops.stop_gradient(value)) for value in values]


def call(function: Callable[[Sequence[Array]], Sequence[Array]], tensors: Sequence[Any],
         like: Sequence[Any]) -> list[Any]:
    """See the package."""
    return [keras.ops.convert_to_tensor(array) for array in function([np.asarray(tensor) for tensor in tensors])]
