"""The handshake of a connection: both sides greet with their version, and over TCP prove that they know the job's key.

    client: greeting (32)                      server: greeting (32) | nonce (32, on TCP only)
    client: nonce (32) | proof (32)            server: proof (32)                              on TCP only

Rules (docs/protocol.md#frames)
- A greeting has the same form in every version. It is compared before any message is decoded; the proofs cover it.
- The server never blocks. One deadline holds for a whole handshake, on both sides.
- Nothing of the peer's is allocated or decoded before its proof is checked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import Final

from hvdlite.control.wire import Connection
from hvdlite.core.errors import ProtocolError
from hvdlite.core.sockets import SEND_FLAGS

_MAGIC: Final = b"hvdlite\n"
_GREETING: Final = struct.Struct("!8sI20s")
GREETING_BYTES: Final = _GREETING.size
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_NO_GREETING: Final = "the peer does not greet: it is another program, or an older version of hvdlite"


@dataclasses.dataclass(frozen=True)
class Greeting:
    """The first message of a process, in both directions."""

    rank: int
    version: str  # of at most 20 bytes

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.version[:20])

    def encode(self) -> bytes:
        """Return the greeting's bytes."""
        return _GREETING.pack(_MAGIC, self.rank, self.version.encode()[:20])

    @classmethod
    def decode(cls, content: bytes) -> Greeting:
        """Return a greeting.

        Raises:
            ProtocolError: when it is none.
        """
        magic, rank, version = _GREETING.unpack(content)
        text = version.rstrip(b"\0").decode("ascii", "replace")
        if magic != _MAGIC or not text.isprintable():  # it is shown to users
            raise ProtocolError(_NO_GREETING)
        return cls(rank, text)


class ServerHandshake:
    """A connection to rank 0 that is not authenticated yet.

    Args:
        sock: just accepted.
        own: rank 0's greeting.
        key: the job's; none on a Unix socket.

    Attributes:
        peer: the client's greeting, once `advance` has returned a connection.

    Raises:
        OSError: when the client is gone already.
    """

    def __init__(self, sock: socket.socket, own: Greeting, key: bytes, frame_limit: int) -> None:
        self.peer = Greeting(0, "")
        self._sock = sock
        self._key = key
        self._frame_limit = frame_limit
        self._sent = own.encode() + (secrets.token_bytes(_NONCE_BYTES) if key else b"")
        self._received = b""
        self._due = _GREETING.size + (_NONCE_BYTES + _PROOF_BYTES if key else 0)
        sock.setblocking(False)
        self._send(self._sent)

    def advance(self) -> Connection | None:
        """Read what has come; return the connection as soon as the client has proved that it knows the key.

        Raises:
            ProtocolError: when it does not know the key.
            OSError: when it has closed the connection.
        """
        try:
            piece = self._sock.recv(self._due - len(self._received))
        except BlockingIOError:
            return None
        if not piece:
            raise ConnectionError("closed during the handshake")
        self._received += piece
        if not _MAGIC.startswith(self._received[:len(_MAGIC)]):
            raise ProtocolError(_NO_GREETING)
        if len(self._received) < self._due:
            return None
        received, proof = self._received[:self._due - _PROOF_BYTES], self._received[self._due - _PROOF_BYTES:]
        if not self._key:
            self.peer = Greeting.decode(self._received)
            return Connection(self._sock, frame_limit=self._frame_limit)
        if not hmac.compare_digest(proof, _proof(self._key, b"client", self._sent, received)):
            raise ProtocolError("the peer does not know the job's key")
        self.peer = Greeting.decode(self._received[:_GREETING.size])
        self._send(_proof(self._key, b"server", self._sent, received))
        return Connection(self._sock, send_key=_proof(self._key, b"server to client", self._sent, received),
                          receive_key=_proof(self._key, b"client to server", self._sent, received),
                          frame_limit=self._frame_limit)

    def _send(self, content: bytes) -> None:
        """Send a few bytes, for which the buffer of a new connection has room."""
        if self._sock.send(content, SEND_FLAGS) < len(content):
            raise ConnectionError("the peer does not read")


def greet_rank_0(sock: socket.socket, own: Greeting, key: bytes, frame_limit: int,
                 deadline: float) -> tuple[Connection, Greeting]:
    """Return an authenticated connection to rank 0, and its greeting; blocks until the deadline at most.

    Args:
        key: the job's; none on a Unix socket.

    Raises:
        ProtocolError: when the server does not greet, or does not know the key, or closes the connection after this side's
            proof.
        OSError: when it closes the connection, or is too slow.
    """
    sent = own.encode()
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    sock.sendall(sent)
    received = _exactly(sock, _GREETING.size, deadline)
    peer = Greeting.decode(received)
    if not key:
        return Connection(sock, frame_limit=frame_limit), peer
    received += _exactly(sock, _NONCE_BYTES, deadline)
    sent += secrets.token_bytes(_NONCE_BYTES)
    sock.sendall(sent[_GREETING.size:] + _proof(key, b"client", received, sent))
    try:
        answer = _exactly(sock, _PROOF_BYTES, deadline)
    except ConnectionError as error:
        raise ProtocolError(f"{error}, after this rank's proof: is HVDLITE_SECRET the same on both sides?") from None
    if not hmac.compare_digest(answer, _proof(key, b"server", received, sent)):
        raise ProtocolError("whoever listens at the coordinator's address does not know the job's key")
    return Connection(sock, send_key=_proof(key, b"client to server", received, sent),
                      receive_key=_proof(key, b"server to client", received, sent), frame_limit=frame_limit), peer


def _proof(key: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    """Return a MAC over what both sides have sent before."""
    return hmac.digest(key, role + b"|" + server + client, hashlib.sha256)


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake takes too long")
        sock.settimeout(left)
        piece = sock.recv(count - len(received))
        if not piece:
            raise ConnectionError("closed during the handshake")
        received += piece
    return received
