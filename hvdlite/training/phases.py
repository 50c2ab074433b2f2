"""Where a round of gradients is, and where its results are waited for."""

from __future__ import annotations

import enum


class WaitIn(enum.Enum):
    """Where ranks wait for the reduced gradients."""

    BACKWARD = "backward"
    STEP = "step"


class Phase(enum.Enum):
    """Where a round is; see the rules above."""

    IDLE = enum.auto()
    FILLING = enum.auto()
    CLOSED = enum.auto()
