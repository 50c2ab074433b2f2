"""What the authority of an elastic job hears, and what it orders; see `membership.authority`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hvdlite.membership.messages import MemberMessage, MemberOrder


@dataclasses.dataclass(frozen=True)
class HostsSeen:
    """Discovery has run: the slots of each host, in its order."""

    slots: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class MemberSaid:
    """A member has sent a message."""

    member: int
    message: MemberMessage


@dataclasses.dataclass(frozen=True)
class MemberGone:
    """A member's process has ended.

    Attributes:
        code: 0 or an exit code, negative for a signal; None for one that is lost with its host.
        cause: the exception of its failure record: type and message.
        is_consequence: the record says that the failure began in another rank.
    """

    member: int
    code: int | None
    cause: str = ""
    is_consequence: bool = False


@dataclasses.dataclass(frozen=True)
class HostLost:
    """A host cannot be reached any more; its members, which end by themselves, are gone."""

    host: str
    reason: str


@dataclasses.dataclass(frozen=True)
class TimePassed:
    """`Authority.wake_at` has come."""


Event = HostsSeen | MemberSaid | MemberGone | HostLost | TimePassed


@dataclasses.dataclass(frozen=True)
class StartMember:
    """Start a process on a slot of a host.

    Attributes:
        rank: founders: their rank in world 1; joiners: a provisional one.
        size: of that world.
        is_joiner: whether it does not meet anybody in `init()`.
    """

    member: int
    host: str
    slot: int
    rank: int
    size: int
    is_joiner: bool


@dataclasses.dataclass(frozen=True)
class Tell:
    """Send an order to a member."""

    member: int
    order: MemberOrder


@dataclasses.dataclass(frozen=True)
class Kill:
    """Kill a member's process and its descendants."""

    member: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Note:
    """A line for the user."""

    text: str


@dataclasses.dataclass(frozen=True)
class WorldBegun:
    """A world has been ordered: the ranks of the members, for the launcher's own tables."""

    epoch: int
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class EndJob:
    """End the job with this exit code; what is left is killed.

    Attributes:
        member: the one whose end is to blame; None if it is none in particular.
    """

    code: int
    reason: str = ""
    member: int | None = None


Command = StartMember | Tell | Kill | Note | WorldBegun | EndJob
