"""The communicator of a world from that of the world before, which is cheaper than to connect all ranks again.

In an elastic job, a lost world's communicator is revoked, which stops what is under way, and kept. If the ranks of the next
world are some of its ranks, in their order, NCCL makes a communicator of them from it (`ncclCommShrink`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from hvdlite.planes.nccl.device import Device
from hvdlite.planes.nccl.watcher import ABORT_SECONDS, CommunicatorRef, abort

SHRINK_SECONDS: Final = 20.0
"""Time that NCCL has for it. It needs all ranks; without one of them, the others make a new communicator then."""


class KeptInfo(msgspec.Struct, frozen=True):
    """What a rank tells the others about the communicator that it has kept."""

    token: bytes  # equal on all ranks of the communicator, and of no other one
    rank: int  # in it
    size: int


@dataclasses.dataclass(frozen=True)
class KeptCommunicator:
    """A revoked communicator of a world that has ended.

    Attributes:
        device: its GPU.
    """

    ref: CommunicatorRef
    info: KeptInfo
    device: Device


class CommunicatorKeeper:
    """Keeps one communicator from a world to the next; one of a process of an elastic job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: KeptCommunicator | None = None

    def put(self, kept: KeptCommunicator) -> None:
        """Keep a communicator instead of the one before, which is aborted."""
        with self._lock:
            before, self._kept = self._kept, kept
        if before is not None:
            abort([before.ref], before.device, ABORT_SECONDS)

    def take(self) -> KeptCommunicator | None:
        """Return the communicator, and forget it."""
        with self._lock:
            kept, self._kept = self._kept, None
        return kept

    def close(self) -> None:
        """Abort the communicator."""
        kept = self.take()
        if kept is not None:
            abort([kept.ref], kept.device, ABORT_SECONDS)


def excluded_ranks(infos: Sequence[KeptInfo | None]) -> tuple[int, ...]:
    """Return the ranks without which the kept communicator is that of these ranks; () if it cannot become theirs.

    Args:
        infos: of all ranks of the new communicator, in rank order.
    """
    kept = [info for info in infos if info is not None]
    if len(kept) < len(infos) or len({(info.token, info.size) for info in kept}) != 1:
        return ()
    ranks = [info.rank for info in kept]
    if ranks != sorted(ranks):
        return ()
    return tuple(rank for rank in range(kept[0].size) if rank not in ranks)
