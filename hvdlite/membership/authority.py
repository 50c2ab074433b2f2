"""The authority of an elastic job: it alone orders worlds (docs/protocol.md#membership). Pure.

The launcher owns one, passes what happens as events, and does what the commands say.
"""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.membership.events import Command, Event
from hvdlite.membership.limits import Limits


def _itself(host: str) -> str:
    return host


class Authority:
    """Decides who is in which world.

    What the launcher guarantees:

    - It carries out commands in their order. Orders for a member that has not connected yet are kept until it says
      `MemberHello`. It passes on all messages of a member in their order, and before the member's `MemberGone`.
    - A `MemberGone` for each process that it has started, once all descendants are dead, too; after a `Kill`, soon.
    - `HostLost` stands for the `MemberGone` of all members of the host. It comes when they cannot be alive any more.
    - `TimePassed` when `wake_at` has come. `now` never falls.
    - After `EndJob` no event has an effect.

    Args:
        limits: what the user allows.
        now: the time, in seconds of any clock.
        machine_of: returns the machine of a host, if several names may stand for one machine with one job directory.
    """

    def __init__(self, limits: Limits, now: float, machine_of: Callable[[str], str] = _itself) -> None:
        raise NotImplementedError

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in an event, and return what must be done, in this order."""
        raise NotImplementedError

    def wake_at(self) -> float | None:
        """Return when `TimePassed` is due; None: after the next other event only."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """The number of the last world; 0 before the founders have been started."""
        raise NotImplementedError

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the last world by rank, those that are gone included."""
        raise NotImplementedError

    def rank_of(self, member: int) -> int | None:
        """Return a member's rank in the last world; None for one that is not in it."""
        raise NotImplementedError

    def host_of(self, member: int) -> str:
        """Return the host on which a member was started."""
        raise NotImplementedError

    def slot_of(self, member: int) -> int:
        """Return a member's slot on its host."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Return whether `EndJob` has been returned."""
        raise NotImplementedError

    def summary(self) -> list[str]:
        """Return lines for the end of the job: worlds, and who was lost and why."""
        raise NotImplementedError
