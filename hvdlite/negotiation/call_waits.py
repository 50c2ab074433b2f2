"""Calls of ordered groups in which ranks have waited for long, as the stall inspector sees them. Pure.

These calls are not negotiated, so rank 0 knows of them only what the ranks that wait tell: which call, and for whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hvdlite.negotiation.messages import CallWait, GroupCalls
from hvdlite.negotiation.stalls import MessageStall, Stall


class _Told(NamedTuple):
    wait: CallWait
    since: float  # on the caller's clock


_Key = tuple[str, str]
"""A group and the name of a call."""


class CallWaits:
    """What the ranks wait for; each rank tells all of it again when something changes."""

    def __init__(self) -> None:
        self._told: dict[int, dict[_Key, _Told]] = {}
        self._warned: set[_Key] = set()

    def update(self, rank: int, groups: Iterable[GroupCalls], now: float) -> None:
        """Record what a rank tells; it replaces what it has told before."""
        told = {(calls.group, wait.name): _Told(wait, now - wait.seconds) for calls in groups for wait in calls.waits}
        self._told[rank] = told
        if not told:
            del self._told[rank]
        self._warned.intersection_update({key for each in self._told.values() for key in each})

    def __bool__(self) -> bool:
        return bool(self._told)

    def pending(self, now: float) -> list[Stall]:
        """Return every call for which some ranks wait, however short."""
        return [stall for _, stall in self._stalls(now)]

    def new_stalls(self, now: float, after: float) -> list[Stall]:
        """Return what has waited at least `after` seconds and was not returned before."""
        found = [(key, stall) for key, stall in self._stalls(now) if stall.waited >= after and key not in self._warned]
        self._warned.update(key for key, _ in found)
        return [stall for _, stall in found]

    def _stalls(self, now: float) -> Iterator[tuple[_Key, Stall]]:
        for key in dict.fromkeys(key for told in self._told.values() for key in told):
            waiting = {rank: told[key] for rank, told in self._told.items() if key in told}
            missing = set.intersection(*(set(told.wait.missing) for told in waiting.values())).difference(waiting)
            if missing:
                ranks = {rank for told in waiting.values() for rank in told.wait.ranks}
                kind = Stall if any(told.wait.sequence for told in waiting.values()) else MessageStall
                yield key, kind(key[1], now - min(told.since for told in waiting.values()),
                                tuple(sorted(ranks - missing)), tuple(sorted(missing)))
