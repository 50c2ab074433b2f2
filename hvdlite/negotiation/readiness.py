"""Who has reported which tensor, and which tensors are ready everywhere."""

from __future__ import annotations

import dataclasses

from hvdlite.core.errors import ProtocolError
from hvdlite.negotiation.messages import Key, Request


@dataclasses.dataclass
class Waiting:
    """One tensor that some ranks have reported."""

    since: float  # when the first rank reported it; the caller's clock, seconds
    requests: dict[int, Request]  # invariant: never all ranks (a complete one leaves the table at once)
    warned: bool = False


class ReadinessTable:
    """Collects requests by key until every rank of a world of `size` has sent its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: dict[Key, Waiting] = {}

    def add(self, rank: int, request: Request, now: float) -> dict[int, Request] | None:
        """Record one rank's request; return all ranks' requests when it was the last one.

        Raises:
            ProtocolError: when `rank` reports a name again before it was answered.
        """
        waiting = self._waiting.setdefault(request.key, Waiting(now, {}))
        if rank in waiting.requests:
            raise ProtocolError(f"reported '{request.name}' twice before it was answered")
        waiting.requests[rank] = request
        if len(waiting.requests) < self._size:
            return None
        return self._waiting.pop(request.key).requests

    def take(self, key: Key) -> dict[int, Request]:
        """Remove and return what waits under a key."""
        return self._waiting.pop(key).requests

    def take_all(self) -> dict[Key, dict[int, Request]]:
        """Remove and return everything that waits."""
        taken = {key: waiting.requests for key, waiting in self._waiting.items()}
        self._waiting.clear()
        return taken

    def waiting(self) -> dict[Key, Waiting]:
        """Return the incomplete tensors, oldest first; for reading and for marking as warned."""
        return self._waiting

    def check_invariants(self) -> None:
        """Fail when the table holds a complete or an empty entry."""
        for key, waiting in self._waiting.items():
            assert 0 < len(waiting.requests) < self._size, (key, waiting)
            assert all(request.key == key for request in waiting.requests.values()), key
