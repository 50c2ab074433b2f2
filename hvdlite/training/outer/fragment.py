"""The state of one fragment: its global weights, the outer optimizer's momentum, and what an exchange leaves behind."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hvdlite.core.array import Array
from hvdlite.training.outer.codec import Codec
from hvdlite.training.outer.settings import CARRY, DiLoCo

NEVER: Final = -1
"""The step of an exchange that was left out."""


@dataclasses.dataclass
class Errors:
    """What this rank has not sent because of rounding; added to what it sends next.

    Attributes:
        change: of its slice of the worker's change.
        mean: of its piece of the mean of all workers.
    """

    change: Array
    mean: Array


@dataclasses.dataclass
class Fragment:
    """Flat arrays of one dtype, float32 or float64. The first two are bitwise equal on all ranks.

    Attributes:
        weights: the global weights.
        momentum: of the outer optimizer; None without momentum.
        errors: None where nothing is rounded, or nothing has been exchanged.
        start: the local weights with which the exchange under way began; None when there is none.
        begun: the step at which the last exchange began; `NEVER` after one that was left out.
        due: the step at which the one under way is merged.
        is_reset: whether local weights became the global ones while an exchange was under way: "carry" and shares have no
            meaning then, and its merge replaces them.
        merges: how often the global weights have changed.
    """

    weights: Array
    momentum: Array | None = None
    errors: Errors | None = None
    start: Array | None = None
    begun: int = 0
    due: int = 0
    is_reset: bool = False
    merges: int = 0

    def state(self) -> dict[str, Any]:
        """Return copies of all fields, for a checkpoint; errors as a list."""
        errors = self.errors and [self.errors.change, self.errors.mean]
        return copy.deepcopy({"weights": self.weights, "momentum": self.momentum, "start": self.start, "errors": errors,
                              "begun": self.begun, "due": self.due, "is_reset": self.is_reset, "merges": self.merges})

    def load(self, state: Mapping[str, Any], *, with_errors: bool) -> None:
        """Take over what `state` returned; momentum only where there is one."""
        dtype = self.weights.dtype
        self.weights = np.array(state["weights"], dtype)
        if self.momentum is not None and state["momentum"] is not None:
            self.momentum = np.array(state["momentum"], dtype)
        if with_errors and state["errors"] is not None:
            self.errors = Errors(*(np.array(each, dtype) for each in state["errors"]))
        self.start = None if state["start"] is None else np.array(state["start"], dtype)
        self.begun, self.due, self.is_reset, self.merges = (state[each] for each in ("begun", "due", "is_reset", "merges"))

    def step(self, gradient: Array, settings: DiLoCo) -> None:
        """Make a step of the outer optimizer: SGD as in torch, with dampening 0.

        Args:
            gradient: the mean of the workers' changes, global minus local; it is overwritten.
        """
        if self.momentum is not None:
            self.momentum *= settings.momentum
            self.momentum += gradient
            if settings.nesterov:
                gradient += settings.momentum * self.momentum
            else:
                gradient[:] = self.momentum
        gradient *= settings.lr
        self.weights -= gradient

    def merged(self, local: Array, settings: DiLoCo) -> Array:
        """Return what the local weights become, when the global ones have changed.

        Args:
            local: the present ones.
        """
        if self.start is None or self.due == self.begun or self.is_reset:
            return self.weights
        if settings.merge == CARRY:
            carried: Array = self.weights + (local - self.start)
            return carried
        share = float(settings.merge)
        mixed: Array = share * local + (1 - share) * self.weights
        return mixed


def with_errors(values: Array, errors: Array | None, codec: Codec, rows: Array) -> Array | None:
    """Encode values and the errors of earlier ones; return the new errors, or None where nothing is rounded.

    Args:
        values: flat.
        errors: of as many values; None for zeros.
        rows: is overwritten.
    """
    if errors is not None:
        values = values + errors
    codec.encode(values, rows)
    if codec.is_exact:
        return None
    with np.errstate(invalid="ignore"):
        return values - codec.decode(rows)
