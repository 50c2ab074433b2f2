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
class FusionBuffer:
    """Memory for buckets, made by a plane so that it can reduce in it.

    Attributes:
        own: this rank's bytes, aligned to 64.
        slots: every rank's bytes where the plane shares them, else empty.
    """

    own: Array
    slots: tuple[Array, ...] = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """A range of a fusion buffer, in bytes: one bucket."""

    buffer: FusionBuffer
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """One response with this rank's memory.

    `part` says that the one source and output is that part of a fusion buffer, on every rank, and every rank contributes.

    `sources[i]` is flat and contiguous, or None when this rank does not contribute; `outputs[i]` is flat and contiguous,
    None only for a barrier, and may be the memory of `sources[i]`. Broadcast: the root's source is what all outputs get.
    """

    sequence: int  # counts the plans of this runtime, equal on all ranks
    response: Response
    sources: Sequence[Array | None]
    outputs: Sequence[Array | None]
    part: Part | None = None


class Plane(Protocol):
    """Moves and combines bytes between the ranks."""

    name: str

    def execute(self, plan: Plan, wait_until: WaitUntil) -> None:
        """Carry out `plan`; when it returns, the outputs hold the result and the sources may be reused."""

    def fusion_buffer(self, nbytes: int) -> FusionBuffer:
        """Return new zeroed memory for buckets; all ranks ask for the same in the same order.

        Raises:
            MemoryError: when there is not enough; saying how much was asked for.
        """

    def close(self) -> None:
        """Release the plane's memory; fusion buffers last as long as their views."""
