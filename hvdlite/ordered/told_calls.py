"""Calls that are told to rank 0, so that its stall inspector knows who waits for whom. Pure.

In the ordinary case rank 0 hears nothing of a group's calls. A rank that has waited for some seconds, its patience, for the
others to make a call *tells* it: it requests a negotiated barrier named after the call. So reports, the end of a stalled job
and the search for its cause work as for any tensor. A barrier that only some ranks request would look like a stall for
ever. Therefore

- every rank says when it has begun a call. When all have made it, each one computes how long the first has waited. If that
  is more than half of the patience, all request the barrier, those that had not done so, too: they see the same numbers, so
  all of them do.
- every rank says which call's barrier it still waits for. Who finds a call there that it has made, and not requested,
  requests it. That is for a rank that said when it began, and was then stopped for seconds: nobody could see that the
  others waited for it.

Ranks that do not agree what they call have told barriers of several names; then all ranks request all of them.
Rule: docs/protocol.md#told-calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from hvdlite.core.errors import HorovodInternalError

PATIENCE_SECONDS: Final = 4.0
"""How long a rank waits for the others to make a call before it tells it."""
REASON_SECONDS: Final = 5.0
"""How long rank 0 has to say why a call has failed."""
_REMEMBERED: Final = 8
"""Calls of which a rank knows whether it has told them."""


class Pending(Protocol):
    """A barrier that was requested."""

    def done(self) -> bool:
        """Return whether all ranks have requested it, or it has failed."""

    def wait(self, timeout: float | None = None) -> object:
        """Wait until it is done, and raise its error, if it has one; `TimeoutError` if that takes longer than `timeout`."""


class ToldCalls:
    """The calls that one rank has told.

    Args:
        request: requests the barrier of a call, given its number and text.
        patience: in seconds, the same on all ranks.
    """

    def __init__(self, request: Callable[[int, str], Pending], patience: float) -> None:
        self._request, self._late = request, int(patience * 1e9 / 2)
        self._pending: dict[tuple[int, str], Pending] = {}
        self._requested: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._last: tuple[int, Sequence[str]] = (0, ())  # the last call that all ranks have made

    @property
    def owed(self) -> int:
        """The number of the last call for whose barrier this rank waits; 0 for none."""
        if not self._pending:
            return 0
        for call, pending in list(self._pending.items()):
            if pending.done():
                del self._pending[call]
        return max((number for number, _ in self._pending), default=0)

    def waits(self, sequence: int, text: str) -> None:
        """This rank's patience in a call is at an end; called again later.

        Raises:
            HorovodInternalError: when they will never come.
        """
        self._tell(sequence, text)
        pending = self._pending.get((sequence, text))
        if pending is not None and pending.done():
            pending.wait()

    def reason(self, sequence: int, text: str) -> Exception | None:
        """Return why a call that has failed cannot succeed, as rank 0 sees it; None if it knows nothing within seconds."""
        try:
            self._tell(sequence, text)
            pending = self._pending.get((sequence, text))
            if pending is not None:
                pending.wait(REASON_SECONDS)
        except TimeoutError:
            return None
        except HorovodInternalError as error:
            return error
        return None

    def made(self, sequence: int, texts: Sequence[str], waited: int, owed: int) -> None:
        """All ranks have made a call.

        Args:
            texts: what it is; several if ranks disagree.
            waited: nanoseconds between the first rank and the last.
            owed: the greatest of the ranks' `owed`.
        """
        number, last = self._last
        if owed and owed == number:
            self._tell_all(number, last)
        self._last = sequence, texts
        if waited > self._late:
            self._tell_all(sequence, texts)

    def _tell_all(self, sequence: int, texts: Sequence[str]) -> None:
        for text in texts:
            self._tell(sequence, text)

    def _tell(self, sequence: int, text: str) -> None:
        if (sequence, text) not in self._requested:
            self._requested.append((sequence, text))
            self._pending[sequence, text] = self._request(sequence, text)
