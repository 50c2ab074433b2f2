"""Variables that are different on every rank: those of layers that each rank keeps for itself, and random states.

A random state of a layer is derived from another rank's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite.core.array import Array

RANDOM_STATE = "seed_generator_state"
"""Keras' name for the states of random layers."""


def is_random_state(variable: Any) -> bool:
    """Return whether a variable, of Keras or TensorFlow, is the random state of a layer."""
    return str(getattr(variable, "path", variable.name)).partition(":")[0].endswith(RANDOM_STATE)


def moved_on(state: Array, rank: int, root_rank: int) -> Array:
    """Return a rank's random state, derived from the root's: different on every rank."""
    moved = state.copy()
    bound = int(np.iinfo(state.dtype).max) + 1
    moved.flat[0] = (int(state.flat[0]) + rank - root_rank) % bound
    return moved


def local_variables(layers: Any) -> list[Any]:
    """Return the trainable variables of a layer, or of a list of layers; none for None.

    Raises:
        ValueError: for an object that is not a layer, and for a layer without variables.
    """
    given = [] if layers is None else layers if isinstance(layers, (list, tuple)) else [layers]
    for layer in given:
        if not hasattr(layer, "trainable_variables"):
            raise ValueError(f"local_layers holds Keras layers, not {type(layer).__name__}")
        if not getattr(layer, "built", True):
            raise ValueError(f"layer '{layer.name}' of local_layers has no variables yet: build the model first")
    return [variable for layer in given for variable in layer.trainable_variables]


def is_sharded(variable: Any) -> bool:
    """Return whether a variable is part of a sharded optimizer's state, and may be different on every rank."""
    return getattr(variable, "_hvdlite_sharded", False)


def is_elsewhere(variable: Any) -> bool:
    """Return whether a variable of an optimizer has its value on another rank."""
    return is_sharded(variable) and 0 in tuple(variable.shape)
