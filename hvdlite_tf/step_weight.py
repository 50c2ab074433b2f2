"""This rank's weight in a model's step, its number of samples, for the gradients of collectives in it.

On TensorFlow it is a variable: a `tf.function` that the step calls is traced once and used in later steps, too, where a
tensor of the first step's graph would be out of scope.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hvdlite.training.step_reducer import current_weight

_variable: ContextVar[Any] = ContextVar("hvdlite_step_weight", default=None)


@contextmanager
def kept_in(variable: Any) -> Iterator[None]:
    """Return a context in which a variable has the weight, or 1 where ranks have equal weights."""
    token = _variable.set(variable)
    try:
        yield
    finally:
        _variable.reset(token)


def weight_of_step() -> Any:
    """Return the weight that gradients of variables get later; None for equal weights.

    Call it in the forward pass, because the backward pass may run in another thread.
    """
    variable = _variable.get()
    return current_weight() if variable is None else variable
