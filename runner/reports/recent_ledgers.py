"""Why a job has been slow lately, from the ledgers that its ranks write while they train."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.slowness import LEAST_STEPS, Slowness, diagnose
from hvdlite_runner.messages import Sample

WINDOW: Final = 20.0
"""Seconds over which ranks are compared, to see why they are slow; more where these have fewer than `LEAST_STEPS` steps."""
_KEPT: Final = 200  # updates with new ledgers, at most


class RecentLedgers:
    """The ledgers of the ranks at some moments of the last seconds."""

    def __init__(self) -> None:
        self._ledgers: deque[tuple[float, dict[int, Ledger]]] = deque(maxlen=_KEPT)

    def __len__(self) -> int:
        return len(self._ledgers)

    def slowness(self, now: float, ranks: Mapping[int, Sample]) -> Slowness | None:
        """Take the present ledgers; return why the job has been slow lately."""
        last = {rank: each.reading.ledger for rank, each in ranks.items()}
        if not self._ledgers or last != self._ledgers[-1][1]:  # long steps change none for a while
            self._ledgers.append((now, last))
        while len(self._ledgers) > 1 and self._ledgers[1][0] <= now - WINDOW and _are_enough(self._ledgers[1][1], last):
            self._ledgers.popleft()
        return diagnose(_grown(self._ledgers[0][1], last))


def _grown(first: Mapping[int, Ledger], last: Mapping[int, Ledger]) -> dict[int, Ledger]:
    return {rank: ledger.since(first[rank]) for rank, ledger in last.items() if rank in first}


def _are_enough(first: Mapping[int, Ledger], last: Mapping[int, Ledger]) -> bool:
    """Return whether the ranks that step have taken enough steps since the first ledgers, to be compared."""
    steps = [ledger.steps for ledger in _grown(first, last).values() if ledger.steps > 0]
    return min(steps, default=0) >= LEAST_STEPS
