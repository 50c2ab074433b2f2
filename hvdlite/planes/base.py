"""The data planes' contract: execute a plan that all ranks execute in the same order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlite.core.array import Array
from hvdlite.negotiation.messages import Response

WaitUntil = Callable[[Callable[[], bool]], None]
"""Block until the predicate holds; raises the job's error when the job ends first."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One response with this rank's memory.

    `sources[i]` is flat and contiguous, or None when this rank does not contribute; `outputs[i]` is flat and contiguous,
    None only for a barrier, and may be the memory of `sources[i]`. Broadcast: the root's source is what all outputs get.
    """

    sequence: int  # counts the plans of this runtime, equal on all ranks
    response: Response
    sources: Sequence[Array | None]
    outputs: Sequence[Array | None]


class Plane(Protocol):
    """Moves and combines bytes between the ranks."""

    name: str

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        """Carry out `plan`; when it returns, the outputs hold the result and the sources may be reused."""

    def close(self) -> None:
        """Release the plane's memory."""
