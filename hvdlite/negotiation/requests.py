"""All ranks' requests for one tensor, grouped where they are equal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hvdlite.negotiation.messages import Request

Ranks = tuple[int, ...]
"""The source of a request: one rank, or several ranks of a host whose leader has merged their requests."""


class Requests(Mapping[int, Request]):
    """Requests by rank. The table of all ranks is built when a request is looked up first.

    Attributes:
        groups: the requests with the ranks that made them together, in order of arrival.
    """

    def __init__(self) -> None:
        self.groups: list[tuple[Ranks, Request]] = []
        self._ranks: set[int] = set()
        self._by_rank: dict[int, Request] = {}

    def add(self, ranks: Ranks, request: Request) -> bool:
        """Add a request of some ranks; return False when one of them has made a request before."""
        before = len(self._ranks)
        self.groups.append((ranks, request))
        self._ranks.update(ranks)
        return len(self._ranks) == before + len(ranks)

    def __getitem__(self, rank: int) -> Request:
        if len(self._by_rank) < len(self._ranks):
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
