"""The hosts of an elastic job: which slots discovery has found, which have failed, and which hosts are barred.

A failed slot is not used again until its cooldown has passed, or until discovery has lost it and found it again. Several
failures within a time bar the whole host, for the cooldown or for good. What other ranks cannot reach has no cooldown: it
stays out until discovery has lost it, because each try interrupts training.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from hvdlite.membership.events import Limits

Slot = tuple[str, int]
"""A host, and the number of one of its slots."""


class _Cooldowns:
    """How long each of some things is not used: longer each time."""

    def __init__(self, limits: Limits) -> None:
        self._range = limits.cooldown
        self._times: dict[object, int] = {}
        self._until: dict[object, float] = {}

    def start(self, key: object, now: float, *, for_good: bool = False) -> None:
        times = self._times[key] = self._times.get(key, 0) + 1
        delay = math.inf if for_good or self._range is None else min(
            self._range[0] * 2.0 ** min(times - 1, 60), self._range[1])
        self._until[key] = max(now + delay, self._until.get(key, now))  # what is out for good stays out

    def forget(self, key: object) -> None:
        self._until.pop(key, None)

    def is_running(self, key: object, now: float) -> bool:
        return self._until.get(key, now) > now

    def next_end(self, now: float) -> float:
        return min((until for until in self._until.values() if until > now), default=math.inf)


class HostSlots:
    """The slots that an elastic job may use.

    Args:
        limits: the cooldown, and what bars a host.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._slots: dict[str, int] = {}  # as discovery saw them last, in its order
        self._lost: set[str] = set()  # hosts that cannot be reached, until discovery has lost them
        self._left_out: set[str] = set()  # hosts that other ranks cannot reach, until then
        self._failures: dict[str, list[float]] = {}  # those within the window that have not barred the host yet
        self._retired = _Cooldowns(limits)  # slots
        self._barred = _Cooldowns(limits)  # hosts

    def see(self, slots: Mapping[str, int]) -> None:
        """Take in what discovery has found."""
        for host, count in self._slots.items():
            for slot in range(slots.get(host, 0), count):
                self._retired.forget((host, slot))
            if host not in slots:
                self._lost.discard(host)
                self._left_out.discard(host)
        self._slots = dict(slots)

    def has(self, host: str, slot: int) -> bool:
        """Return whether discovery has a slot, whatever has happened there."""
        return slot < self._slots.get(host, 0)

    def why_left(self, host: str, slot: int, now: float) -> str:
        """Return why a member that runs on a slot is to leave; "" if it may stay."""
        if not self.has(host, slot):
            return "its host was removed"
        return f"another process has failed on {host}" if self._limits.whole_host and self.is_barred(host, now) else ""

    def fail(self, host: str, slot: int, now: float) -> bool:
        """Count a failure of a member: its slot is retired. Return whether this has barred the host."""
        self._retired.start((host, slot), now)
        return self._count(host, now)

    def lose(self, host: str, now: float) -> bool:
        """Count the loss of a host as one failure: all of its slots are retired. Return whether this has barred the host."""
        self._lost.add(host)
        for slot in range(self._slots.get(host, 0)):
            self._retired.start((host, slot), now)
        return self._count(host, now)

    def retire(self, host: str, slot: int, now: float) -> None:
        """Retire a slot without counting a failure."""
        self._retired.start((host, slot), now)

    def miss(self, host: str, slot: int, other: str, now: float) -> bool:
        """A member cannot be reached from another host, or slot of its host: it is left out until discovery has lost it.

        Return whether it was the host, which has not been barred before.
        """
        if host == other:
            self._retired.start((host, slot), now, for_good=True)
            return False
        if self.is_barred(host, now):
            return False
        self._left_out.add(host)
        return True

    def is_barred(self, host: str, now: float) -> bool:
        """Return whether no members may be started on a host."""
        return host in self._left_out or self._barred.is_running(host, now)

    def free(self, taken: Collection[Slot], now: float) -> list[Slot]:
        """Return the slots on which members can be started, by host in discovery's order.

        Args:
            taken: the slots of living members.
        """
        return [(host, slot) for host, count in self._slots.items() if not self.is_barred(host, now)
                for slot in range(count) if (host, slot) not in taken and not self._is_retired(host, slot, now)]

    def next_end(self, now: float) -> float:
        """Return when the next cooldown ends; infinity for never."""
        return min(self._retired.next_end(now), self._barred.next_end(now))

    def _is_retired(self, host: str, slot: int, now: float) -> bool:
        return self._retired.is_running((host, slot), now) or (host in self._lost and self._limits.cooldown is None)

    def _count(self, host: str, now: float) -> bool:
        enough = 1 if self._limits.whole_host else self._limits.failures_per_host
        recent = [when for when in self._failures.get(host, ()) if now - when < self._limits.failure_window] + [now]
        self._failures[host] = recent
        if not self.is_barred(host, now) and len(recent) >= enough:
            del self._failures[host]
            self._barred.start(host, now)
            return True
        return False
