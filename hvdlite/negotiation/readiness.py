"""What the ranks of a scope report, until all of them have. Pure.

Rank 0 has an `Aggregator` for all ranks of the job.
"""

from __future__ import annotations

from collections.abc import Collection

from hvdlite.core.types import Collective
from hvdlite.negotiation.gathering import Gathered, Gathering, Ranks
from hvdlite.negotiation.messages import Key, Request
from hvdlite.negotiation.process_sets import ProcessSetTable


class Joins:
    """The ranks that have joined: they have no more data and wait until all ranks have called `join()`.

    The last rank to join is told to all. When nothing was reduced without a joined rank since the join before, that join's
    last rank is named again: its parameters are as new as any other rank's, and nested joins (of several optimizers) name
    the same rank.

    Attributes:
        ranks: those that have joined, in order.
        count: how often all ranks have joined.
        was_missed: something was carried out without a rank that has joined.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, None] = {}
        self.count = 0
        self.was_missed = False
        self._last: int | None = None

    def name_last(self) -> int:
        """Return the last rank of the join that is complete now."""
        if self.was_missed or self._last is None:
            self._last = next(reversed(self.ranks))
        return self._last

    def complete(self) -> None:
        """All ranks have joined; they all take part again."""
        self.ranks.clear()
        self.was_missed = False
        self.count += 1


class Aggregator:
    """What some ranks of a scope have reported, and others have not.

    Attributes:
        scope: the ranks whose reports come here.
        process_sets: who belongs to which process set.
        joins: which ranks have joined. Only a join itself waits for them.
        requests: the tensors.
    """

    def __init__(self, scope: Ranks, size: int) -> None:
        self.scope = scope
        self.process_sets = ProcessSetTable(size)
        self.joins = Joins()
        self.requests: Gathering[Key, Request] = Gathering(self._waited_for, scope, self.joins.ranks)

    def join(self, rank: int) -> list[Gathered[Request]]:
        """Stop waiting for a rank, which has joined; remove and return the tensors that are complete by that."""
        complete = self.requests.join(rank)
        self.joins.ranks[rank] = None
        return complete

    def abort_join(self) -> None:
        """A join has failed: the ranks that had joined take part again."""
        self.joins.ranks.clear()
        self.requests.recount()

    def check_invariants(self) -> None:
        """Fail when something is complete, or is not what its key says."""
        self.requests.check_invariants()
        for key, gathered in self.requests.items():
            assert all(request.key == key for _, request in gathered.parts), key

    def _waited_for(self, item: Request, ranks: Ranks) -> Collection[int]:
        """Return those of `ranks` that belong to the process set of an item and are waited for."""
        ranks = self.process_sets.among(item.process_set_id, ranks)
        if not self.joins.ranks or item.collective is Collective.JOIN:
            return ranks
        return [rank for rank in ranks if rank not in self.joins.ranks]
