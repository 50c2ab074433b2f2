"""The place where ranks wait for the reduced gradients: in the backward pass or in the step."""

from __future__ import annotations

import enum
import logging

_log = logging.getLogger("hvdlite")


class WaitIn(enum.Enum):
    """Where ranks wait for the reduced gradients."""

    BACKWARD = "backward"
    STEP = "step"


class WaitPolicy:
    """Where one reducer waits.

    Attributes:
        closes_in_backward: whether the end of a backward pass closes the round.
        waits_in_backward: whether it waits for the results too. Once such a wait was deferred, it does not any more.
    """

    def __init__(self, wait_in: WaitIn) -> None:
        self.closes_in_backward = self.waits_in_backward = wait_in is WaitIn.BACKWARD

    def defer(self, label: str, rank: int) -> None:
        """A wait was deferred: leave later ones for the step."""
        if self.waits_in_backward:
            self.waits_in_backward = False
            _log.warning("rank %d: waiting for gradients in backward() made ranks wait for each other in a circle; "
                         "'%s' waits in step() from now on, as with wait_in=\"step\"", rank, label)
