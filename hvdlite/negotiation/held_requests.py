"""Requests that a host's leader holds back until all ranks of the host have made them. Pure.

Rules (docs/protocol.md#leaders)
- A request is held back until the last rank of the host that takes part makes it. Those that are equal then go up as one.
- What must not wait for the others is *loose*: its requests go up as they come, until the tensor is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdlite.negotiation.messages import Key, MergedRequests, Request, Response


class HeldRequests:
    """A leader's requests.

    Args:
        count: tells how many of the host's ranks take part in a process set.
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        self._count = count
        self._held: dict[Key, dict[int, Request]] = {}  # invariant: never all that take part, never a loose one
        self._loose: set[Key] = set()

    def add(self, rank: int, request: Request) -> list[MergedRequests]:
        """Take in a rank's request; return what goes up now."""
        key = request.key
        if key in self._loose:
            return [MergedRequests((rank,), (request,))]
        held = self._held.setdefault(key, {})
        held[rank] = request
        if len(held) < self._count(request.process_set_id):
            return []
        return _merged(self._held.pop(key))

    def loosen(self, request: Request) -> list[MergedRequests]:
        """Hold back nothing of a request's tensor; return what goes up for that."""
        self._loose.add(request.key)
        return _merged(self._held.pop(request.key, {}))

    def release(self, condition: Callable[[Request], bool] = lambda request: True) -> list[MergedRequests]:
        """Like `loosen`, for all tensors that meet a condition."""
        released: list[MergedRequests] = []
        for held in [held for held in self._held.values() if condition(next(iter(held.values())))]:
            released.extend(self.loosen(next(iter(held.values()))))
        return released

    def answered(self, responses: Iterable[Response]) -> list[MergedRequests]:
        """Tensors are answered; return what goes up although they were: it may be answered again."""
        released: list[MergedRequests] = []
        for response in responses:
            for name in response.names:
                key = response.process_set_id, name, response.round_id
                self._loose.discard(key)
                if key in self._held:  # refused before all ranks have made the request
                    released.extend(self.loosen(next(iter(self._held[key].values()))))
        return released

    def check_invariants(self) -> None:
        """Fail when something is held back that all ranks have said."""
        for key, held in self._held.items():
            assert 0 < len(held) < self._count(key[0]), key
        assert self._held.keys().isdisjoint(self._loose)


def _merged(held: dict[int, Request]) -> list[MergedRequests]:
    """Return requests for one tensor, equal ones as one."""
    groups: list[tuple[Request, list[int]]] = []
    for rank in sorted(held):
        request = held[rank]
        for other, ranks in groups:
            if request == other:
                ranks.append(rank)
                break
        else:
            groups.append((request, [rank]))
    return [MergedRequests(tuple(ranks), (request,)) for request, ranks in groups]
