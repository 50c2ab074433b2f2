"""All ranks' requests for one tensor, in as few pieces as they were told. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdlite.negotiation.messages import Request

Ranks = tuple[int, ...]
"""Who says something: one rank, or ranks of a host whose leader has merged it."""


class Requests(dict[int, Request]):
    """Requests by rank.

    Attributes:
        groups: the same, as they came: ranks that said the same together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups: list[tuple[Ranks, Request]] = []

    def add(self, ranks: Ranks, request: Request) -> None:
        """Take in what some ranks say, of which none has said anything."""
        self.update(dict.fromkeys(ranks, request))
        self.groups.append((ranks, request))


def grouped(requests: Mapping[int, Request]) -> Sequence[tuple[Ranks, Request]]:
    """Return requests with the ranks that made them; much fewer than ranks, where leaders have merged them."""
    if isinstance(requests, Requests):
        return requests.groups
    return [((rank,), request) for rank, request in requests.items()]
