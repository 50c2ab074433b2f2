"""The last collectives of a rank, for stall reports."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.stall_report import rank_status
from hvdlite.negotiation.messages import GpuProgress, RankStatus

RECENT: Final = 200
"""How many collectives a rank remembers."""


class CallHistory:
    """The names of the collectives that this rank has called last. Any thread may add to it."""

    def __init__(self) -> None:
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._numbers = itertools.count(1)  # of all collectives, since the beginning
        self._count = 0

    def add(self, name: str) -> None:
        """This rank has called a collective."""
        self._recent.append(name)
        self._count = next(self._numbers)

    def status(self, thread: int, waiting: Sequence[str], gpu: tuple[GpuProgress, ...], ledger: Ledger) -> RankStatus:
        """Describe this rank; the first arguments are those of `rank_status`."""
        status = rank_status(thread, tuple(self._recent), self._count - len(self._recent) + 1, waiting)
        return msgspec.structs.replace(status, gpu=gpu, ledger=ledger)
