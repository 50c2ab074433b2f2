"""What some ranks have reported, until all ranks that take part have reported it. Pure.

Rank 0 gathers what the ranks of a process set report, and a host's leader what those of its host report. For both, what is
gathered is a request for a tensor, a full bucket, the end of a round, or the end of a gradient set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from hvdlite.negotiation.messages import Request

Ranks = tuple[int, ...]
"""The source of an item: one rank, or several ranks of a host whose leader has merged what they reported."""
Key = TypeVar("Key")
Item = TypeVar("Item")


@dataclasses.dataclass(slots=True)
class Gathered(Generic[Item]):
    """What ranks have reported about one thing."""

    since: float  # when the first rank reported it; the caller's clock, seconds
    missing: int  # how many ranks have yet to report it
    parts: list[tuple[Ranks, Item]]  # the items with the ranks that reported each, in order of arrival; never empty
    ranks: set[int]  # of all parts
    is_repeated: bool = False  # a rank has reported it more than once
    passes: bool = False  # at a leader: its items are forwarded as they come
    warned: bool = False  # a stall report has named it

    @property
    def first(self) -> Item:
        """The item that came first."""
        return self.parts[0][1]


class Gathering(dict[Key, Gathered[Item]], Generic[Key, Item]):
    """The incomplete things, oldest first; a complete one is removed at once.

    Args:
        among: returns those of some ranks that take part in what an item is about, and are waited for.
        scope: all ranks whose reports come here.
        joined: ranks for which nothing waits any more; the caller's, who calls `join` before it adds one, and `recount` when
            it has removed some.
    """

    def __init__(self, among: Callable[[Item, Ranks], Collection[int]], scope: Ranks, joined: Collection[int] = ()) -> None:
        super().__init__()
        self._among = among
        self._scope = scope
        self._joined = joined

    def add(self, ranks: Ranks, key: Key, item: Item, now: float = 0.0) -> Gathered[Item]:
        """Add an item of some ranks that take part; return what is gathered: all of it when nothing is `missing`."""
        gathered = self.get(key)
        if gathered is None:
            gathered = self[key] = Gathered(now, len(self._among(item, self._scope)), [], set())
        known = gathered.ranks
        if self._joined or not known.isdisjoint(ranks):
            gathered.is_repeated = gathered.is_repeated or not known.isdisjoint(ranks)
            gathered.missing -= sum(rank not in known for rank in self._among(item, ranks))
        else:
            gathered.missing -= len(ranks)
        known.update(ranks)
        gathered.parts.append((ranks, item))
        if not gathered.missing:
            del self[key]
        return gathered

    def join(self, rank: int) -> list[Gathered[Item]]:
        """Stop waiting for a rank, which has joined; remove and return what is complete by that."""
        complete = []
        for key, gathered in list(self.items()):
            if rank not in gathered.ranks and self._among(gathered.first, (rank,)):
                gathered.missing -= 1
                if not gathered.missing:
                    complete.append(self.pop(key))
        return complete

    def recount(self) -> None:
        """Wait for all ranks again: none has joined any more."""
        for gathered in self.values():
            gathered.missing = len(self.missing_ranks(gathered))

    def missing_ranks(self, gathered: Gathered[Item]) -> list[int]:
        """Return the ranks that have yet to report something, ascending."""
        return [rank for rank in self._among(gathered.first, self._scope) if rank not in gathered.ranks]

    def newly_overdue(self, now: float, after: float) -> list[Gathered[Item]]:
        """Return what has waited at least `after` seconds and was not returned before."""
        overdue = [gathered for gathered in self.values() if now - gathered.since >= after and not gathered.warned]
        for gathered in overdue:
            gathered.warned = True
        return overdue

    def take_if(self, condition: Callable[[Item], bool]) -> list[Gathered[Item]]:
        """Remove and return the things that meet a condition, which must be equal for all their items."""
        return [self.pop(key) for key in [key for key, gathered in self.items() if condition(gathered.first)]]

    def open(self, condition: Callable[[Item], bool] = lambda item: True) -> list[Gathered[Item]]:
        """Hold nothing back any more of the things that meet a condition; return those that were held back so far."""
        opened = [gathered for gathered in self.values() if not gathered.passes and condition(gathered.first)]
        for gathered in opened:
            gathered.passes = True
        return opened

    def check_invariants(self) -> None:
        """Fail when something is complete, or a number is wrong."""
        for key, gathered in self.items():
            assert gathered.ranks == {rank for ranks, _ in gathered.parts for rank in ranks}, key
            assert gathered.ranks.issubset(self._scope), key
            assert gathered.missing == len(self.missing_ranks(gathered)) > 0, key


class Requests(Mapping[int, Request]):
    """All ranks' requests for one tensor, by rank. The table of all ranks is built when a request is looked up first.

    Attributes:
        groups: the requests with the ranks that made them together, in order of arrival.
    """

    def __init__(self, gathered: Gathered[Request]) -> None:
        self.groups = gathered.parts
        self._ranks = gathered.ranks
        self._by_rank: dict[int, Request] = {}

    def __getitem__(self, rank: int) -> Request:
        if not self._by_rank:
            self._by_rank = {each: request for ranks, request in self.groups for each in ranks}
        return self._by_rank[rank]

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


def grouped(requests: Mapping[int, Request]) -> Sequence[tuple[Ranks, Request]]:
    """Return each request with the ranks that made it; with leaders, these are fewer than ranks."""
    if isinstance(requests, Requests):
        return requests.groups
    return [((rank,), request) for rank, request in requests.items()]


def first_of(requests: Mapping[int, Request]) -> Request:
    """Return the request that came first."""
    return requests.groups[0][1] if isinstance(requests, Requests) else next(iter(requests.values()))
