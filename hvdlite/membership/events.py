"""The events that the authority of a job receives, its commands, and what the user allows it; see `membership.authority`.

What the launcher guarantees:

- It carries out commands in their order. Orders for a member that has not connected yet are kept until it sends
  `MemberHello`. It passes on all messages of a member in their order, and before the member's `MemberGone`.
- There is a `MemberGone` for each process that it has started, in an elastic job when its descendants are dead, too; after a
  `Kill`, soon.
- `HostLost` stands for the `MemberGone` of all members of the host. It comes when they cannot be alive any more.
- `TimePassed` comes at `wake_at`, behind what members have said by then. `now` never falls.
- After `EndJob` no event has an effect.

What concerns a process on another machine is a message, which travels there, or from there, as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import msgspec

from hvdlite.membership.messages import MemberMessage, MemberOrder

TOO_FEW: Final = 75
"""The exit code of a job that had too few members for too long, or whose members were all told to leave: EX_TEMPFAIL, try
again later."""
GRACE: Final = 3.0
"""Seconds between a failure and SIGTERM for the other ranks: they are notified of it, and their own messages are useful."""
GRACE_AFTER_LOSS: Final = 1.0
"""The same after the loss of a host, whose detection has taken seconds already."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a job may do, by its options.

    Attributes:
        start_np: the slots for which the start waits; so many are the founders, too, unless `starts_with_all`.
        min_np: below this, members wait for others.
        max_np: the greatest size of a world; None: every slot is used.
        reset_limit: worlds after the first one; None: as many as are needed. When it is reached, the world does not grow any
            more, and the next failure ends the job.
        elastic_timeout: seconds for which the job waits for `start_np` slots at the start, and for `min_np` members later.
        quiesce_timeout: seconds after which a member for which others wait, and whose process is stopped, is killed.
        heartbeat: seconds after which a member that does not answer is killed, though its process is not stopped.
        stall_shutdown: seconds after which a member that was to stop is killed though it computes.
        cooldown: seconds after which a failed slot or a barred host is used again: (10, 60) for 10, 20, 40, 60, 60 ... after
            the first, second ... time. None: never, unless discovery loses the host or slot and finds it again.
        whole_host: a single failure bars the host, and its members leave with the next world, as in Horovod. Else it costs
            the slot, and several failures bar the host.
        failures_per_host: so many failures of a host within `failure_window` seconds bar it.
        grace: seconds after which a member that got SIGTERM is killed, if it has not left.
        failures_without_progress: so many worlds in a row that are lost by failures, and in which training got no further,
            end the job.
        hosts_are_fixed: no other hosts or slots can come, so a job below `min_np` does not wait for them.
        one_world: the job is not elastic: the first failure or lost host ends it.
        ends_at_reset_limit: more room, or the removal of a host in use, after `reset_limit` worlds ends the job, as in
            Horovod. Else it is left out.
        starts_with_all: the founders are as many as there are slots, up to `max_np`, once there are `start_np`.
    """

    start_np: int
    min_np: int = 1
    max_np: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600.0
    quiesce_timeout: float = 10.0
    heartbeat: float = 60.0
    stall_shutdown: float = 600.0
    cooldown: tuple[float, float] | None = None
    whole_host: bool = False
    failures_per_host: int = 3
    failure_window: float = 600.0
    grace: float = 30.0
    failures_without_progress: int = 3
    hosts_are_fixed: bool = False
    one_world: bool = False
    ends_at_reset_limit: bool = False
    starts_with_all: bool = False

    def room(self, slots: int, size: int) -> int:
        """Return how many of some slots a world of a size has room for."""
        return slots if self.max_np is None else min(slots, max(0, self.max_np - size))

    def allows(self, epoch: int) -> bool:
        """Return whether there may be a world with this number."""
        return self.reset_limit is None or epoch <= self.reset_limit + 1

    @property
    def reset_limit_reached(self) -> str:
        """The reason, for people."""
        return f"the limit of {self.reset_limit} resets has been reached"


# --- events ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostsSeen:
    """Discovery has run: the slots of each host, in its order."""

    slots: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class MemberReported:
    """A member has sent a message."""

    member: int
    message: MemberMessage


@dataclasses.dataclass(frozen=True)
class MemberGone:
    """A member's process has ended.

    Attributes:
        code: 0 or an exit code, negative for a signal; None for one that is lost with its host.
        cause: the exception of its failure record: type and message.
    """

    member: int
    code: int | None
    cause: str = ""


@dataclasses.dataclass(frozen=True)
class HostLost:
    """A host cannot be reached any more; its members, which end by themselves, are gone."""

    host: str
    reason: str


@dataclasses.dataclass(frozen=True)
class MembersNoticed:
    """Members are told to leave, because their host is; `HostsSeen` has it no more.

    Attributes:
        seconds: after which they are killed; may be infinite.
    """

    members: tuple[int, ...]
    reason: str
    seconds: float


class SeenStopped(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Look`, if the kernel says that the member's process is stopped."""

    member: int


@dataclasses.dataclass(frozen=True)
class TimePassed:
    """`Authority.wake_at` has come."""


Event = HostsSeen | MemberReported | MemberGone | HostLost | MembersNoticed | SeenStopped | TimePassed


# --- commands ----------------------------------------------------------------------------------------------------------

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


class SendOrder(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Send an order to a member."""

    member: int
    order: MemberOrder


class Kill(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Kill a member's process and its descendants; its end is reported when all are dead."""

    member: int
    reason: str


class Look(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Look whether a member's process is stopped."""

    member: int


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A line for the user; from a machine of the job, too."""

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
        grace: seconds until what is left gets SIGTERM.
        ends_healthy: whether members are left that could have gone on: the user needs the reason, beside the first failure.
    """

    code: int
    reason: str = ""
    member: int | None = None
    grace: float = 0.0
    ends_healthy: bool = False


Command = StartMember | SendOrder | Kill | Look | Note | WorldBegun | EndJob
