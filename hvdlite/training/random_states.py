"""The states of the generators that every process has: Python's `random`, and NumPy's legacy one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

RandomStates = tuple[Any, Any]


def random_states() -> RandomStates:
    """Return copies of the states."""
    return random.getstate(), np.random.get_state(legacy=False)


def load_random_states(states: RandomStates) -> None:
    """Go back to states, which stay as they are."""
    random.setstate(states[0])
    np.random.set_state(states[1])
