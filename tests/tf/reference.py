"""The training in one process that ranks compare theirs with: rank 0 does it, and the other ranks get what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras

import hvdlite_tf.keras as hvd


def once(function: Callable[[], Any]) -> Any:
    """Return on every rank what rank 0's `function` returns; the other ranks do not call theirs."""
    return hvd.broadcast_object(function() if hvd.rank() == 0 else None)


def values_of(variables: Sequence[Any]) -> list[Any]:
    """Return the values of variables as NumPy arrays."""
    return [keras.ops.convert_to_numpy(variable) for variable in variables]


class Reference:
    """A Keras model that exists on rank 0 only.

    Every rank calls the same methods in the same order, and gets rank 0's result.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.model = make() if hvd.rank() == 0 else None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            result = getattr(self.model, name)(*arguments, **options)
            return SimpleNamespace(history=result.history) if isinstance(result, keras.callbacks.History) else result
        return lambda *arguments, **options: once(lambda: call(*arguments, **options))

    @property
    def trainable_variables(self) -> list[Any]:
        """The values of the model's variables."""
        return once(lambda: values_of(self.model.trainable_variables))  # type: ignore[union-attr]
