"""The random states of Keras' layers, derived from another rank's.

A layer such as Dropout keeps the state of its random numbers in a variable. The same state on all ranks would produce the
same masks, so every rank uses the root's state plus its distance from the root.
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
