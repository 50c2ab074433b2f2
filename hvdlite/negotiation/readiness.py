"""Who has reported which tensor, and which tensors are ready everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hvdlite.core.errors import ProtocolError
from hvdlite.negotiation.messages import Key, Request


@dataclasses.dataclass
class Waiting:
    """One tensor that some ranks have reported."""

    since: float  # when the first rank reported it; the caller's clock, seconds
    requests: dict[int, Request]  # invariant: never all members (a complete one leaves the table at once)
    warned: bool = False


class ReadinessTable:
    """Collects requests by key until every member of their process set has sent its own."""

    def __init__(self) -> None:
        self._waiting: dict[Key, Waiting] = {}

    def add(self, rank: int, request: Request, members: int, now: float) -> dict[int, Request] | None:
        """Record one rank's request; return all requests when it was the last of so many members.

        Raises:
            ProtocolError: when `rank` reports a name again before it was answered.
        """
        waiting = self._waiting.setdefault(request.key, Waiting(now, {}))
        if rank in waiting.requests:
            raise ProtocolError(f"reported '{request.name}' twice before it was answered")
        waiting.requests[rank] = request
        if len(waiting.requests) < members:
            return None
        return self._waiting.pop(request.key).requests

    def take(self, key: Key) -> dict[int, Request]:
        """Remove and return what waits under a key."""
        return self._waiting.pop(key).requests

    def take_if(self, condition: Callable[[Request], bool]) -> list[dict[int, Request]]:
        """Remove and return everything of which one request meets a condition that is the same for all ranks' requests."""
        keys = [key for key, waiting in self._waiting.items() if condition(next(iter(waiting.requests.values())))]
        return [self.take(key) for key in keys]

    def waiting(self) -> dict[Key, Waiting]:
        """Return the incomplete tensors, oldest first; for reading and for marking as warned."""
        return self._waiting

    def check_invariants(self) -> None:
        """Fail when the table holds an empty entry, or one under a wrong key."""
        for key, waiting in self._waiting.items():
            assert waiting.requests, key
            assert all(request.key == key for request in waiting.requests.values()), key
