"""Frames on a stream socket: lengths, sequence numbers, and authentication by HMAC.

    length (4 bytes) | kind (1) | sequence (4) | body (length bytes) | HMAC-SHA256 (32, on TCP only)

Rules (docs/protocol.md#frames)
- The length is checked against a limit before anything is allocated.
- Sequence numbers count up from 0 in each direction; anything else (replay, loss) ends the connection.
- The MAC covers the whole number of the frame (64 bits, of which 32 travel), header and body, with a key of its own per
  connection and direction, made from both sides' nonces; see `control/handshake.py`.
- A Unix socket in a directory of mode 0700 whose peer has our user id needs no MAC.
- Any violation after authentication ends the connection: a dropped frame would be a lost decision.
"""

from __future__ import annotations

import hmac
import socket
import struct

from hvdlite.control.codec import Encoded, decode, encode
from hvdlite.core.errors import ProtocolError
from hvdlite.negotiation.messages import Message

_HEADER = struct.Struct("!IBI")
_NUMBER = struct.Struct("!Q")
_MAC_BYTES = 32
_RECEIVE_BYTES = 1 << 16


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
                written = self.socket.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
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
        try:
            self.socket.shutdown(socket.SHUT_WR)
            self.receive()  # unread bytes would turn TCP's close into a reset, which destroys what is under way
        except (EOFError, OSError, ProtocolError):
            pass
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
