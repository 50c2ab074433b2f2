"""Encoding messages as MessagePack with msgspec, and decoding them with validation of types; never pickle."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import msgspec

from hvdlite.core.errors import ProtocolError
from hvdlite.core.stack_dump import NO_STACK_DUMP, StackDumpTarget
from hvdlite.core.texts import encodable, with_texts
from hvdlite.negotiation.messages import Decision, DirectMessages, HostReport, Message, Report


class RankInfo(Message, frozen=True, kw_only=True):
    """A rank's description of itself, sent when its connection is authenticated."""

    rank: int
    size: int
    pid: int
    host: str  # equal for ranks that share a kernel and a process table
    version: str
    job: str = ""  # equal on all ranks of a job: one that another job has started is no rank of this one
    stack_dump: StackDumpTarget = NO_STACK_DUMP  # where it writes its stacks; see `diagnostics.process_probe`
    settings: tuple[tuple[str, str], ...] = ()  # knobs in which no two ranks may differ, and their values
    unavailable: tuple[tuple[str, str], ...] = ()  # backends that it cannot use, and why
    epoch: int = 0


class Welcome(Message, frozen=True, kw_only=True):
    """Rank 0's answer when all ranks are there: who they are, indexed by rank; or why the job cannot start."""

    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    stack_dumps: tuple[StackDumpTarget, ...] = ()
    advertised_address: str = ""  # rank 0's IP address, as most other hosts know it; "" when there are none
    clock: float = 0.0  # rank 0's monotonic clock, in seconds
    unavailable: tuple[tuple[str, str], ...] = ()  # backends that some rank cannot use, and why
    use_leaders: bool = False  # whether each host's first rank speaks for all of its ranks from here on
    refusal: str = ""
    epoch: int = 0


class Heartbeat(Message, frozen=True):
    """Says that the sender's background thread is alive; only on TCP."""


class Kind(enum.IntEnum):
    """The frame's type byte."""

    RANK_INFO = 1
    WELCOME = 2
    REPORT = 3
    DECISION = 4
    HEARTBEAT = 5
    HOST_REPORT = 6
    DIRECT_MESSAGES = 7


class Encoded(NamedTuple):
    """A message as bytes: what goes to many peers is encoded once."""

    kind: Kind
    body: bytes


_TYPES: dict[Kind, type[Message]] = {
    Kind.RANK_INFO: RankInfo, Kind.WELCOME: Welcome, Kind.REPORT: Report, Kind.DECISION: Decision, Kind.HEARTBEAT: Heartbeat,
    Kind.HOST_REPORT: HostReport, Kind.DIRECT_MESSAGES: DirectMessages,
}
_KINDS = {kind_type: kind for kind, kind_type in _TYPES.items()}
_DECODERS: dict[Kind, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind_type) for kind, kind_type in _TYPES.items()
}
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> Encoded:
    """Return a message as bytes."""
    try:
        return Encoded(_KINDS[type(message)], _encode(message))
    except UnicodeEncodeError:  # the names of files in a stack, for instance
        return Encoded(_KINDS[type(message)], _encode(with_texts(message, encodable)))


def decode(kind: int, body: bytes) -> Message:
    """Return the message in `body`.

    Raises:
        ProtocolError: for an unknown kind or a body that does not match its type.
    """
    try:
        return _DECODERS[Kind(kind)].decode(body)  # type: ignore[no-any-return]
    except (ValueError, msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise ProtocolError(f"message of kind {kind} is not valid: {error}") from None
