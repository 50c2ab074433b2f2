"""The readiness table: which ranks have reported which tensor, and which tensors are ready on all ranks. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from hvdlite.core.errors import ProtocolError
from hvdlite.core.types import Collective
from hvdlite.negotiation.messages import Key, Request
from hvdlite.negotiation.process_sets import ProcessSetTable
from hvdlite.negotiation.requests import Ranks, Requests, first_of


@dataclasses.dataclass
class PendingTensor:
    """One tensor that some ranks have reported."""

    since: float  # when the first rank reported it; the caller's clock, seconds
    requests: Requests
    missing_count: int  # how many ranks have yet to report it; never 0 (a complete one leaves the table at once)
    warned: bool = False


class ReadinessTable:
    """Collects requests by key until every rank of their process set has made its own, except ranks that have joined.

    Args:
        process_sets: who belongs to which process set.
        joined: the ranks that have joined; the caller's, who calls `join` after each that it adds. Only a join itself waits
            for them.

    Attributes:
        pending: the incomplete tensors, oldest first; for reading and for marking as warned.
    """

    def __init__(self, process_sets: ProcessSetTable, joined: Collection[int]) -> None:
        self._process_sets, self._joined = process_sets, joined
        self.pending: dict[Key, PendingTensor] = {}

    def add(self, ranks: Ranks, request: Request, now: float) -> Requests | None:
        """Record a request of some ranks; return the requests of all ranks when these were the last.

        Raises:
            ProtocolError: when one of `ranks` reports a name again before it was answered.
        """
        key = request.key
        pending = self.pending.get(key)
        if pending is None:
            pending = self.pending[key] = PendingTensor(now, Requests(), len(self._expected(request)))
        if not pending.requests.add(ranks, request):
            raise ProtocolError(f"reported '{request.name}' twice before it was answered")
        if not self._joined or request.collective is Collective.JOIN:
            pending.missing_count -= len(ranks)
        else:
            pending.missing_count -= sum(rank not in self._joined for rank in ranks)
        if pending.missing_count:
            return None
        return self.pending.pop(key).requests

    def join(self, rank: int) -> list[Requests]:
        """Stop waiting for a rank that has joined; remove and return the tensors that are complete by that."""
        complete = []
        for key, pending in list(self.pending.items()):
            first = first_of(pending.requests)
            if (first.collective is not Collective.JOIN and rank not in pending.requests
                    and self._process_sets.includes(key[0], rank)):
                pending.missing_count -= 1
                if not pending.missing_count:
                    complete.append(self.take(key))
        return complete

    def recount(self) -> None:
        """Wait for all ranks again: none has joined any more."""
        for key, pending in self.pending.items():
            pending.missing_count = len(self.missing(key))

    def missing(self, key: Key) -> list[int]:
        """Return the ranks that have not reported an incomplete tensor, ascending."""
        requests = self.pending[key].requests
        return [rank for rank in self._expected(first_of(requests)) if rank not in requests]

    def take(self, key: Key) -> Requests:
        """Remove an incomplete tensor; return its requests."""
        return self.pending.pop(key).requests

    def take_if(self, condition: Callable[[Request], bool]) -> list[Requests]:
        """Remove the tensors that meet a condition, which must be equal for all ranks' requests; return their requests."""
        keys = [key for key, pending in self.pending.items() if condition(first_of(pending.requests))]
        return [self.take(key) for key in keys]

    def check_invariants(self) -> None:
        """Fail when the table holds an empty or a complete entry, or one under a wrong key."""
        for key, pending in self.pending.items():
            assert pending.requests, key
            assert all(request.key == key for request in pending.requests.values()), key
            assert pending.missing_count == len(self.missing(key)) > 0, key

    def _expected(self, request: Request) -> Collection[int]:
        """Return the ranks that a tensor needs."""
        members = self._process_sets[request.process_set_id]
        if not self._joined or request.collective is Collective.JOIN:
            return members
        return [rank for rank in members if rank not in self._joined]
