"""Encoding messages as MessagePack with msgspec, and decoding them with validation of types; never pickle."""

from __future__ import annotations

from typing import Final, NamedTuple

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
    """Shows that the sender's background thread is alive; only on TCP."""


class Encoded(NamedTuple):
    """A message as bytes: what goes to many peers is encoded once."""

    kind: int
    body: bytes


_TYPES: Final[tuple[type[Message], ...]] = (RankInfo, Welcome, Report, Decision, Heartbeat, HostReport, DirectMessages)
KINDS: Final = {message_type: kind for kind, message_type in enumerate(_TYPES, 1)}
"""The type byte of each message's frames."""
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(message_type) for message_type, kind in KINDS.items()}
_encode = msgspec.msgpack.Encoder().encode


def encode(message: Message) -> Encoded:
    """Return a message as bytes."""
    try:
        return Encoded(KINDS[type(message)], _encode(message))
    except UnicodeEncodeError:  # the names of files in a stack, for instance
        return Encoded(KINDS[type(message)], _encode(with_texts(message, encodable)))


def decode(kind: int, body: bytes) -> Message:
    """Return the message in `body`.

    Raises:
        ProtocolError: for an unknown kind or a body that does not match its type.
    """
    try:
        return _DECODERS[kind].decode(body)
    except (KeyError, ValueError, msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise ProtocolError(f"message of kind {kind} is not valid: {error}") from None
