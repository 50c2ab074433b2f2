"""The messages between a member of an elastic job and the authority, which orders worlds.

They travel over a Unix socket in the job's directory (`launch_contract.MEMBER_SOCKET`), as MessagePack in frames with a
length; the launcher or its agent on that host is at the other end.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from hvdlite.core.frames import FrameReader, to_frame

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""A count, or an id; the authority computes with them, so a message with another one is no message."""
JOIN: Final = 1 << 24
"""More than the boundaries between two `join()`s."""
Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]


class MembershipMessage(msgspec.Struct, frozen=True, tag=True):
    """A message between a member and the authority, in one of the two directions."""


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a member reports about its state when it stops.

    Attributes:
        has_state: whether it has a state at all; a joiner has none until it has been synchronised.
        commits: how many commits it has made or received; 0: the state with which it began.
        boundaries: how many it has passed since its last commit: in this world, or, in a loop that counts bodies, in all of
            them; there, where it would go on.
        can_resume: whether it can run the body of its last boundary again: it has a copy of what that has changed, and no
            optimizer has begun a step in it.
        at_rest: whether it stopped at a boundary that all members had agreed on, so that its state is current; else it goes
            on from its last commit.
        is_behind: whether it waited in `join()` then, so that the others have gone on without it, or whether it has trained
            on afterwards, so that the state may be half of a step's; its last commit counts as any other.
    """

    has_state: bool = True
    commits: Number = 0
    boundaries: Number = 0
    can_resume: bool = False
    at_rest: bool = False
    is_behind: bool = False


# --- from a member -----------------------------------------------------------------------------------------------------


class MemberHello(MembershipMessage, frozen=True):
    """The first message on a connection."""

    member: Number
    pid: Number


class MemberReady(MembershipMessage, frozen=True):
    """The member is at the entrance of `elastic.run`: from now on it survives the loss of others."""


class MemberIdle(MembershipMessage, frozen=True):
    """World `epoch` has ended on this member: its background thread has ended, and its planes are closed."""

    epoch: Number
    state_report: StateReport
    reason: str = ""  # why it ended, in a line; "" for a stop at a boundary
    blamed: tuple[Number, ...] = ()  # the ranks that others have waited for in vain, if that is why


class Alive(MembershipMessage, frozen=True):
    """The answer to `AskAlive`.

    Attributes:
        in_user_code: when the world has to end: the member's background thread has ended; the training thread computes, and
            has not noticed.
    """

    epoch: Number
    in_user_code: bool


class BoundaryReport(MembershipMessage, frozen=True):
    """The answer to `PrepareStop`: the boundaries that the member has passed in this world; it waits at the next one.

    The count begins at 0 in every world, because joiners have passed none of the earlier ones. When all have come out of
    `join()`, before which their counts may differ, it goes on at the next multiple of `JOIN`.
    """

    change: Number
    boundary: Number


class Listening(MembershipMessage, frozen=True):
    """Rank 0 of world `epoch` listens for the others at these addresses of its host (ranks on several hosts only)."""

    epoch: Number
    addresses: tuple[str, ...]
    port: Port


class MeetingFailed(MembershipMessage, frozen=True):
    """The member could not meet the others of world `epoch`; it sends `MemberIdle` next.

    Attributes:
        missing: from rank 0: the ranks that have not reached it. Empty from others: they have not reached rank 0.
    """

    epoch: Number
    reason: str
    missing: tuple[Number, ...] = ()


class Met(MembershipMessage, frozen=True):
    """The member has met all others of world `epoch`, and its background thread runs."""

    epoch: Number


class MemberFinished(MembershipMessage, frozen=True):
    """The training function has returned; the member waits for all others of world `epoch`, or for another world."""

    epoch: Number


class MemberNoticed(MembershipMessage, frozen=True):
    """The member got SIGTERM, which the script does not handle: it is to leave at the next boundary."""


# --- to a member -------------------------------------------------------------------------------------------------------


class StopNow(MembershipMessage, frozen=True):
    """End world `epoch` at once, in the middle of anything, a meeting included; then send `MemberIdle`."""

    epoch: int
    reason: str


class PrepareStop(MembershipMessage, frozen=True):
    """Report how many boundaries you have passed, and wait at the next one."""

    change: int


class StopAt(MembershipMessage, frozen=True):
    """Stop at this boundary of the world, counted from 1, where all members stop; those that wait before it go on.

    See docs/protocol.md#boundaries.

    Attributes:
        is_last: whether the job ends there, because all members were told to leave.
    """

    change: int
    boundary: int
    is_last: bool = False


class AskAlive(MembershipMessage, frozen=True):
    """Answer `Alive`: others wait for you. The link's thread does, whatever the script does; a stopped process does not."""

    epoch: int


class WorldOrder(MembershipMessage, frozen=True, kw_only=True):
    """A new world.

    Attributes:
        epoch: its number, 1, 2, 3, ...
        members: the members, by rank. Rank 0 has the state that counts.
        ranks_by_machine: the ranks that share a machine and its job directory, in the order of their first ranks.
        host_names: by rank, the name by which the hosts were given or discovered (`HOROVOD_HOSTNAME`).
        restore: whether members with a state go back to their last commit before the state is synchronised.
        commits: the commits of rank 0's state.
        boundaries: those that it has passed since. Without `restore`, members that stand there run its body again.
        reason: what has changed, in a line.
    """

    epoch: int
    members: tuple[int, ...]
    ranks_by_machine: tuple[tuple[int, ...], ...]
    host_names: tuple[str, ...]
    restore: bool
    commits: int
    boundaries: int = 0
    reason: str = ""


class CoordinatorAt(MembershipMessage, frozen=True):
    """Where rank 0 of world `epoch` listens (ranks on several hosts only)."""

    epoch: int
    host: str
    port: int


class AllFinished(MembershipMessage, frozen=True):
    """All members of the world have finished: `elastic.run` returns."""


class SaveState(MembershipMessage, frozen=True):
    """Too few members are left: while it waits, this one, which has the newest state, writes it to the disk if it can.

    Attributes:
        restore, commits, boundaries: as in the order of a world of which it would be rank 0.
    """

    restore: bool
    commits: int
    boundaries: int


class Dismissed(MembershipMessage, frozen=True):
    """The member is not needed any more: it exits with code 0."""

    reason: str


MemberMessage = (MemberHello | MemberReady | MemberIdle | BoundaryReport | Listening | MeetingFailed | Met | MemberFinished
                 | Alive | MemberNoticed)
MemberOrder = StopNow | AskAlive | PrepareStop | StopAt | WorldOrder | CoordinatorAt | AllFinished | SaveState | Dismissed

_ORDER_LIMIT: Final = 1 << 24
_MESSAGE_LIMIT: Final = 1 << 20
"""Bytes of a frame to a member, which may name all ranks, and of one from it."""
_ORDERS, _MESSAGES = msgspec.msgpack.Decoder(MemberOrder), msgspec.msgpack.Decoder(MemberMessage)


def frame(message: MembershipMessage) -> bytes:
    """Return a message as a frame.

    Raises:
        ProtocolError: when it is too long.
    """
    return to_frame(message, _MESSAGE_LIMIT if isinstance(message, MemberMessage) else _ORDER_LIMIT)


class MemberFrames(FrameReader):
    """Cuts a stream of bytes into messages.

    Args:
        orders: True at a member, which gets orders; False at the authority.
    """

    def __init__(self, *, orders: bool) -> None:
        super().__init__(_ORDERS if orders else _MESSAGES, _ORDER_LIMIT if orders else _MESSAGE_LIMIT)
