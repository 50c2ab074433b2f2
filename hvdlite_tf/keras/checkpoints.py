"""Keras' objects in checkpoints, on any backend: `hvd.save` and `hvd.load` (docs/checkpoints.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.core.array import Array
from hvdlite.training.checkpoints import kinds, load, save
from hvdlite_tf.keras.broadcast import array_of, read_back

__all__ = ["load", "save"]


class KerasKind(kinds.Kind):
    """Models, layers, optimizers, and variables of Keras and TensorFlow, or lists of them."""

    name, order = "keras", 0

    def owns(self, value: Any) -> bool:
        return isinstance(value, (keras.Layer, keras.optimizers.Optimizer)) or _is_variable(value) or (
            isinstance(value, list) and value != [] and all(map(_is_variable, value)))

    def state_of(self, value: Any) -> Any:
        return [{"name": variable.name, "value": array_of(variable)} for variable in _variables(value)]

    def array_of(self, leaf: Any) -> Array | None:
        is_tensor = keras.backend.backend() != "torch" and not isinstance(leaf, np.ndarray) and keras.ops.is_tensor(leaf)
        return np.array(keras.ops.convert_to_numpy(leaf), order="C") if is_tensor else None

    def tensor_of(self, array: Array) -> Any:
        return keras.ops.convert_to_tensor(array)

    def check(self, name: str, value: Any, state: Any) -> bool:
        own = [(f"variable {index}", tuple(each.shape), keras.backend.standardize_dtype(each.dtype))
               for index, each in enumerate(_variables(value))]  # Keras numbers names anew in each process
        kinds.refuse_other(name, own, [(f"variable {index}", each["value"].shape, each["value"].dtype.name)
                                       for index, each in enumerate(state)])
        return True

    def load(self, value: Any, state: Any) -> bool:
        for variable, saved in zip(_variables(value), state, strict=True):
            variable.assign(saved["value"])
        return True


def _variables(value: Any) -> Sequence[Any]:
    """Return the variables of an object, in their order."""
    if isinstance(value, list) or _is_variable(value):
        return value if isinstance(value, list) else [value]
    read_back(value)
    own: Any = value.variables
    return list(own() if callable(own) else own)


def _is_variable(value: Any) -> bool:
    return isinstance(value, keras.Variable) or (callable(getattr(value, "assign", None)) and hasattr(value, "trainable"))


kinds.add(KerasKind())
if keras.backend.backend() == "torch":
    import hvdlite_torch.checkpoints  # noqa: F401 - torch's random states, which Keras' layers draw from
