"""The calls of an ordered group in which this rank has waited for long, so that rank 0 can tell who waits for whom.

In the ordinary case rank 0 hears nothing of a group's calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from hvdlite.groups.transfer import Transfer

PATIENCE_SECONDS: Final = 4.0
"""How long a rank waits for the others before it tells so."""


class LongWait(NamedTuple):
    """A call in which this rank has waited for long. Ranks are indices in the group."""

    name: str
    sequence: int  # the number of the collective; 0 for a send or receive
    ranks: Sequence[int]  # that take part
    missing: Sequence[int]  # for which it waits, as far as this rank knows
    seconds: float


class LongWaits:
    """The waits of one rank in one group.

    Args:
        changed: called when they have changed.
        patience: in seconds.

    Attributes:
        since: since when this rank waits for others to make the collective that is under way; 0 if that is not long.
    """

    def __init__(self, changed: Callable[[], None], patience: float) -> None:
        self.since = 0.0
        self.patience = patience
        self._changed = changed
        self._transfers: dict[Transfer, float] = {}
        self._callbacks: set[object] = set()  # of sends and receives, a key for each that has not returned

    def tell(self) -> None:
        """The thread that carries out calls has waited for long; called again while it does."""
        self.since = self.since or time.monotonic() - self.patience
        self._changed()

    def over(self) -> None:
        """It does not wait for others to make the call any more; again is fine."""
        if self.since:
            self.since = 0.0
            self._changed()

    def begin(self, transfer: Transfer) -> None:
        """A thread has waited for long for a send or receive."""
        self._transfers[transfer] = time.monotonic() - self.patience
        self._changed()

    def end(self, transfer: Transfer) -> None:
        """It does not any more."""
        self._transfers.pop(transfer, None)
        self._changed()

    @property
    def may_call_back(self) -> bool:
        """Whether a callback of a send or receive may make calls, now or later, whatever this rank's threads wait for."""
        return bool(self._callbacks)

    def counted(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Return a callback of sends or receives as one that counts in `may_call_back` until it has returned."""
        key = object()
        self._callbacks.add(key)

        def call() -> None:
            try:
                callback()
            finally:
                self._callbacks.discard(key)
        return call

    def of_transfers(self, group: str) -> list[LongWait]:
        """Return the sends and receives for which threads have waited for long."""
        now = time.monotonic()
        found = []
        for transfer, since in tuple(self._transfers.items()):
            what, rank, peers = transfer.described()
            found.append(LongWait(f"{group}: {what}", 0, (rank, *peers), peers, now - since))
        return found
