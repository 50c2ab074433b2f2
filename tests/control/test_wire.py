"""Frames and handshakes: what is accepted, and that everything else ends the connection."""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from hvdlite.control.handshake import Greeting, ServerHandshake, greet_rank_0
from hvdlite.control.wire import KINDS, Connection, Heartbeat, Welcome, decode, encode
from hvdlite.core.errors import ProtocolError
from hvdlite.core.types import Collective
from hvdlite.negotiation.messages import Decision, FailureNotice, Message, Report, Request, Response

LIMIT = 1 << 16
KEY = b"k" * 32


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def keyed(left: socket.socket, right: socket.socket, right_key: bytes = KEY) -> tuple[Connection, Connection]:
    made: list[Connection] = []
    errors: list[Exception] = []

    def serve() -> None:
        handshake = ServerHandshake(left, Greeting(0, "1"), KEY, LIMIT)
        try:
            while not made:
                select.select([left], [], [])
                made.extend(filter(None, [handshake.advance()]))
        except (ProtocolError, OSError) as error:
            errors.append(error)
            left.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        client, peer = greet_rank_0(right, Greeting(1, "1"), right_key, LIMIT, time.monotonic() + 30)
    finally:
        server.join()
    if errors:
        raise errors[0]
    assert peer == Greeting(0, "1")
    for connection in (made[0], client):
        connection.start()
    return made[0], client


MESSAGES: list[Message] = [
    Report(epoch=3, applied=7, items=(Request("x", Collective.ALLREDUCE, "float32", (2, 3)),), leaving=True,
           failure=FailureNotice(1, "ValueError", "text", "traceback")),
    Decision(epoch=0, sequence=1,
             responses=(Response(names=("a", "b"), collective=Collective.ALLGATHER, dtype="int8", rows=(1, 2)),), left=(1,)),
    Heartbeat(), Welcome(pids=(1, 2), hosts=("a", "b")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(sockets: tuple[socket.socket, socket.socket], message: Message) -> None:
    left, right = keyed(*sockets)
    for _ in range(3):
        left.send(message)
    assert right.receive() == [message] * 3


def test_a_peer_without_the_key_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises((ProtocolError, ConnectionError)):
        keyed(*sockets, right_key=b"x" * 32)


def test_a_replayed_frame_ends_the_connection(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = keyed(*sockets)
    left.send(Heartbeat())
    frame = sockets[1].recv(1 << 16)
    sockets[0].sendall(frame + frame)
    with pytest.raises(ProtocolError, match="arrived where 1 was due"):
        right.receive()


def test_a_frame_is_not_valid_again_when_its_32_bit_number_returns(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = keyed(*sockets)
    left.send(Heartbeat())
    frame = sockets[1].recv(1 << 16)
    right._received = 1 << 32
    sockets[0].sendall(frame)
    with pytest.raises(ProtocolError, match="key"):
        right.receive()


def test_a_changed_bit_ends_the_connection(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = keyed(*sockets)
    left.send(MESSAGES[0])
    frame = bytearray(sockets[1].recv(1 << 16))
    frame[20] ^= 1
    sockets[0].sendall(frame)
    with pytest.raises(ProtocolError, match="key"):
        right.receive()


def test_frames_of_one_direction_are_not_valid_in_the_other(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = keyed(*sockets)
    left.send(Heartbeat())
    sockets[1].sendall(sockets[1].recv(1 << 16))  # reflected to its sender
    with pytest.raises(ProtocolError, match="key"):
        left.receive()
    right.close()


# docs/protocol.md#frames
def test_a_length_over_the_limit_is_refused_before_it_is_read(sockets: tuple[socket.socket, socket.socket]) -> None:
    right = Connection(sockets[1], frame_limit=LIMIT)
    right.start()
    sockets[0].sendall(struct.pack("!IBI", LIMIT + 1, 3, 0))
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        right.receive()


def test_a_message_over_the_limit_is_refused_by_its_sender(sockets: tuple[socket.socket, socket.socket]) -> None:
    left = Connection(sockets[0], frame_limit=100)
    with pytest.raises(ProtocolError, match="HVDLITE_FRAME_LIMIT"):
        left.send(Welcome(refusal="x" * 200))


def test_a_slow_reader_does_not_block_the_sender(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = (Connection(sock, frame_limit=LIMIT) for sock in sockets)
    left.start()
    right.start()
    message = Welcome(refusal="x" * 60_000)
    for _ in range(50):
        left.send(message)
    assert left.wants_to_send
    received = 0
    while received < 50:
        received += len(right.receive())
        left.push()
    assert not left.wants_to_send


def test_random_bytes_never_get_through(sockets: tuple[socket.socket, socket.socket]) -> None:
    generator = random.Random(1)
    for _ in range(200):
        left, right = socket.socketpair()
        connection = Connection(right, frame_limit=LIMIT)
        connection.start()
        left.sendall(generator.randbytes(generator.randrange(1, 2000)))
        left.close()
        with pytest.raises((ProtocolError, EOFError)):
            while True:
                assert connection.receive() == []
        connection.close()


@pytest.mark.parametrize(("kind", "body"), [(99, b"\x90"), (KINDS[Report], b"\x90"), (KINDS[Report], b"garbage"),
                                            (KINDS[Decision], encode(Heartbeat())[1])])
def test_a_body_that_does_not_match_its_type_is_refused(kind: int, body: bytes) -> None:
    with pytest.raises(ProtocolError, match="not valid"):
        decode(kind, body)
