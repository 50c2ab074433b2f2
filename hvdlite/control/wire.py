"""Messages in frames on a stream socket: lengths, sequence numbers, and authentication by HMAC.

    length (4 bytes) | kind (1) | sequence (4) | body (length bytes) | HMAC-SHA256 (32, on TCP only)

Rules (docs/protocol.md#frames)
- The body is MessagePack, decoded by msgspec as the type of its kind, never pickled.
- The length is checked against a limit before anything is allocated.
- Sequence numbers count up from 0 in each direction; anything else (replay, loss) ends the connection.
- The MAC covers the whole number of the frame (64 bits, of which 32 travel), header and body, with a key of its own per
  connection and direction, made from both sides' nonces; see `control/handshake.py`.
- A Unix socket in a directory of mode 0700 whose peer has our user id needs no MAC.
- Any violation after authentication ends the connection: a dropped frame would be a lost decision.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
from typing import Final, NamedTuple

import msgspec

from hvdlite.core.errors import ProtocolError
from hvdlite.core.launch_contract import NO_STACK_DUMP, StackDumpTarget
from hvdlite.core.sockets import SEND_FLAGS
from hvdlite.core.texts import encodable, with_texts
from hvdlite.negotiation.messages import Decision, DirectMessages, HostReport, Message, Report

_HEADER = struct.Struct("!IBI")
_NUMBER = struct.Struct("!Q")
_MAC_BYTES = 32
_RECEIVE_BYTES = 1 << 16


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


class Connection:
    """One authenticated stream, non-blocking after `start`."""

    def __init__(self, sock: socket.socket, *, send_key: bytes = b"", receive_key: bytes = b"",
                 frame_limit: int = 64 << 20) -> None:
        self.socket = sock
        self.authenticated_by_key = bool(send_key)
        self._send_key = send_key
        self._receive_key = receive_key
        self._limit = frame_limit
        self._sent = self._received = 0  # frames, in each direction
        self._unsent = bytearray()
        self._unread = bytearray()
        self._early: list[Message] = []

    def start(self) -> None:
        """End the handshake: from now on nothing blocks."""
        self.socket.setblocking(False)

    def send(self, message: Message | Encoded) -> None:
        """Queue a message and hand as much as possible to the operating system, without blocking.

        Raises:
            OSError: when the connection is broken.
            ProtocolError: when the message is longer than the frame limit.
        """
        kind, body = message if isinstance(message, Encoded) else encode(message)
        if len(body) > self._limit:
            raise ProtocolError(f"a control message of {len(body)} bytes exceeds HVDLITE_FRAME_LIMIT={self._limit}")
        header = _HEADER.pack(len(body), kind, self._sent & 0xFFFFFFFF)
        self._unsent += header + body + self._mac(self._send_key, self._sent, header, body)
        self._sent += 1
        self.push()

    def push(self) -> None:
        """Hand queued bytes to the operating system, without blocking."""
        while self._unsent:
            try:
                written = self.socket.send(self._unsent, SEND_FLAGS)
            except BlockingIOError:
                return
            del self._unsent[:written]

    @property
    def wants_to_send(self) -> bool:
        """Whether bytes are queued that the operating system did not take yet."""
        return bool(self._unsent)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without blocking.

        Raises:
            EOFError: when the peer closed the connection and nothing is left to read.
            ProtocolError: for a frame that is too long, out of order, forged or malformed.
            OSError: when the connection is broken.
        """
        ended = False
        while True:
            try:
                piece = self.socket.recv(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                piece = b""
            if not piece:
                ended = True
                break
            self._unread += piece
            if len(piece) < _RECEIVE_BYTES:
                break
        messages = self._early + self._frames()
        self._early = []
        if ended and not messages:
            raise EOFError("connection closed")
        return messages

    def unreceive(self, messages: list[Message]) -> None:
        """Put messages back: the next `receive` returns them first."""
        self._early = [*messages, *self._early]

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.socket.fileno()

    def close(self) -> None:
        """End the connection; the peer can still read what was sent."""
        with contextlib.suppress(EOFError, OSError, ProtocolError):
            self.socket.shutdown(socket.SHUT_WR)
            self.receive()  # unread bytes would turn TCP's close into a reset, which destroys what is under way
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close this process's descriptor only; the connection lives on in the process it was forked from."""
        self.socket.close()

    def _frames(self) -> list[Message]:
        messages = []
        mac_bytes = _MAC_BYTES if self._receive_key else 0
        while len(self._unread) >= _HEADER.size:
            header = bytes(self._unread[:_HEADER.size])
            length, kind, sequence = _HEADER.unpack(header)
            if length > self._limit:
                raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {self._limit}")
            if sequence != self._received & 0xFFFFFFFF:  # now: noise may begin with a length for which nobody sends the rest
                raise ProtocolError(f"frame {sequence} arrived where {self._received} was due")
            end = _HEADER.size + length
            if len(self._unread) < end + mac_bytes:
                break
            body, mac = bytes(self._unread[_HEADER.size:end]), bytes(self._unread[end:end + mac_bytes])
            del self._unread[:end + mac_bytes]
            if mac_bytes and not hmac.compare_digest(mac, self._mac(self._receive_key, self._received, header, body)):
                raise ProtocolError("a frame is not signed with the job's key")
            self._received += 1
            messages.append(decode(kind, body))
        return messages

    @staticmethod
    def _mac(key: bytes, number: int, header: bytes, body: bytes) -> bytes:
        return hmac.digest(key, _NUMBER.pack(number) + header + body, "sha256") if key else b""
