"""Requests that a host's leader holds back until all ranks of the host have made them. Pure.

Rules (docs/protocol.md#leaders)
- A request is held back until the last participating rank of the host makes it. Equal requests are then forwarded as one.
- A tensor whose requests must not wait is *unmerged*: its requests are forwarded as they come until it is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hvdlite.negotiation.messages import Key, MergedRequests, Request, Response


class HeldRequests:
    """A leader's requests.

    Args:
        count: returns how many of the host's ranks participate in a process set.
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        self._count = count
        self._held: dict[Key, dict[int, Request]] = {}  # invariant: never of all participating ranks, never unmerged
        self._unmerged: set[Key] = set()

    def add(self, rank: int, request: Request) -> list[MergedRequests]:
        """Handle a rank's request; return what to forward now."""
        key = request.key
        if key in self._unmerged:
            return [MergedRequests((rank,), (request,))]
        held = self._held.setdefault(key, {})
        held[rank] = request
        if len(held) < self._count(request.process_set_id):
            return []
        return _merged(self._held.pop(key))

    def release(self, request: Request) -> list[MergedRequests]:
        """Stop holding back requests for a tensor; return those that were."""
        self._unmerged.add(request.key)
        return _merged(self._held.pop(request.key, {}))

    def release_if(self, condition: Callable[[Request], bool] = lambda request: True) -> list[MergedRequests]:
        """Like `release`, for all tensors that meet a condition."""
        released: list[MergedRequests] = []
        for held in [held for held in self._held.values() if condition(next(iter(held.values())))]:
            released.extend(self.release(next(iter(held.values()))))
        return released

    def answered(self, responses: Iterable[Response]) -> list[MergedRequests]:
        """Note that tensors are answered; return held requests for them, which the coordinator answers again."""
        released: list[MergedRequests] = []
        for response in responses:
            for name in response.names:
                key = response.process_set_id, name, response.round_id
                self._unmerged.discard(key)
                if key in self._held:  # refused before all ranks have made the request
                    released.extend(self.release(next(iter(self._held[key].values()))))
        return released

    def check_invariants(self) -> None:
        """Fail when a request is held back that all ranks have made."""
        for key, held in self._held.items():
            assert 0 < len(held) < self._count(key[0]), key
        assert self._held.keys().isdisjoint(self._unmerged)


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
