"""Strangers at every listener of a job: what they send, and what the listener does with it.

Ray and Spark drivers have no listener of ours: functions and results travel over Ray's and Spark's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdlite._version import __version__
from hvdlite.bootstrap.rendezvous import Address
from hvdlite.control.handshake import Greeting
from hvdlite.control.wire import KINDS, Connection, Heartbeat, Welcome, decode
from hvdlite.core.errors import ProtocolError
from hvdlite.core.types import Collective
from hvdlite.diagnostics.report_server import ReportServer
from hvdlite.diagnostics.stall_inspector import Receiver
from hvdlite.membership.messages import MemberFrames, MemberHello, frame
from hvdlite.negotiation.messages import Decision, Message, Report, Request, Response
from hvdlite.planes.base import Plan
from hvdlite_runner import messages as runner_messages
from hvdlite_runner.agents.host_probe import ProbeServer, probe
from hvdlite_runner.host.member_server import MemberServer
from tests.bootstrap.meeting import meet, rank_info
from tests.chaos.rows import Row, Trouble
from tests.planes import makers
from tests.worlds import HANGS_SECONDS

LIMIT = 1 << 16
VERSION = "1"
"""Of the ranks that `meet`."""
FRAMES = 300
"""MemberFrames in a round."""
MESSAGES: Sequence[Message] = (
    Heartbeat(), Welcome(pids=(1, 2), hosts=("a", "b")),
    Report(epoch=3, applied=7, items=(Request("x", Collective.ALLREDUCE, "float32", (2, 3)),)),
    Decision(epoch=0, sequence=1,
             responses=(Response(names=("a",), collective=Collective.ALLGATHER, dtype="int8", rows=(1,)),)),
)


def damaged(chance: random.Random, content: bytes) -> bytes:
    """Return bytes with some of them changed, lost, doubled, exchanged or invented."""
    begin, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    match chance.randrange(7):
        case 0:
            position = chance.randrange(len(content))
            return content[:position] + bytes([content[position] ^ 1 << chance.randrange(8)]) + content[position + 1:]
        case 1:
            return content[:begin] + content[end:]
        case 2:
            return content[:end] + content[begin:]
        case 3:
            return content[:begin] + chance.randbytes(chance.randrange(1, 100)) + content[begin:]
        case 4:
            return struct.pack("!I", chance.getrandbits(32)) + content[4:]
        case 5:
            return content[end:] + content[begin:end] + content[:begin]
        case _:
            return chance.randbytes(chance.randrange(1, 500))


def noise(chance: random.Random, versions: Sequence[str] = (__version__, VERSION, "9.9", "")) -> bytes:
    """Return what a stranger may send first.

    Args:
        versions: that it may pretend to have.
    """
    version = chance.choice(versions)
    greeting = Greeting(chance.getrandbits(32), version).encode()
    return chance.choice([
        b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\0\x01", b"\xff" * 64, b"12345678",
        greeting, greeting[:chance.randrange(32)], greeting + chance.randbytes(64), greeting + chance.randbytes(5000),
        frame(MemberHello(chance.getrandbits(31), 1))[:chance.randrange(20)], chance.randbytes(chance.randrange(1, 3000))])


def disturb(chance: random.Random, connect: Callable[[], socket.socket], count: int, held: list[socket.socket],
            versions: Sequence[str] = (__version__, VERSION, "9.9", "")) -> None:
    """Connect so often, and send noise; some connections are kept open, or broken."""
    for _ in range(count):
        with contextlib.suppress(OSError):
            sock = connect()
            held.append(sock)
            sock.settimeout(0.02)
            sock.sendall(noise(chance, versions))
            match chance.randrange(4):
                case 0:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
                    sock.close()
                case 1:
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(4096)
                case 2:
                    sock.close()


def frames(chance: random.Random, row: Row) -> None:
    """Damage what authenticated ranks send: nothing else than what was sent is received, and in order."""
    for _ in range(FRAMES):
        left, right = socket.socketpair()
        key = chance.randbytes(32) if chance.random() < 0.7 else b""
        sender, receiver = (Connection(sock, send_key=key, receive_key=key, frame_limit=LIMIT) for sock in (left, right))
        sender.start()
        receiver.start()
        sent = [chance.choice(MESSAGES) for _ in range(chance.randrange(1, 4))]
        for message in sent:
            sender.send(message)
        content = damaged(chance, right.recv(1 << 16))
        left.sendall(content)
        left.close()
        received: list[Message] = []
        try:
            while True:
                received += receiver.receive()
        except (ProtocolError, EOFError):
            row.refused += 1
        if key:
            assert received == sent[:len(received)], (received, sent)
        receiver.close()
        row.tried += 1
    row.survived += 1


def bodies(chance: random.Random, row: Row) -> None:
    """Decode what is no message, in each of the languages of a job: refused, or a message of a known type."""
    for _ in range(FRAMES):
        row.tried += 1
        body = bytes([0x90 | chance.randrange(16)]) + chance.randbytes(chance.randrange(60))
        if chance.random() < 0.1:
            body = body[:chance.randrange(1, 30)] + b"\x91" * 10_000  # an array in an array in an array
        try:
            match chance.randrange(3):
                case 0:
                    decode(chance.choice([*KINDS.values(), chance.randrange(256)]), body)
                case 1:
                    length = struct.pack("!I", chance.choice([len(body), 1 << 31]))
                    MemberFrames(orders=chance.random() < 0.5).feed(length + body)
                case _:
                    reader = runner_messages.AgentFrames(events=chance.random() < 0.5)
                    reader.feed(struct.pack("!I", len(body)) + body)
        except ProtocolError:
            row.refused += 1
    row.survived += 1


def meeting(chance: random.Random, row: Row, address: Address) -> None:
    """Disturb ranks that meet."""
    held: list[socket.socket] = []
    versions = (VERSION,) if address.path else (VERSION, "9.9", "")  # a process of the same user is believed

    def stranger(where: Address) -> None:
        disturb(chance, lambda: connected(where), chance.randrange(10, 200), held, versions)

    try:
        welcomes = meet(address, [rank_info(rank) for rank in range(3)], timeout=HANGS_SECONDS, stranger=stranger)
    finally:
        for sock in held:
            sock.close()
    assert all(getattr(welcome, "pids", ()) == (1000, 1001, 1002) for welcome in welcomes), welcomes
    row.tried += len(held)
    row.refused += len(held)
    row.survived += 1


def connected(address: Address) -> socket.socket:
    """Connect with rank 0."""
    family, target = address.resolved()
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.connect(target)
    return sock


def meeting_over_tcp(chance: random.Random, row: Row) -> None:
    meeting(chance, row, Address(host="127.0.0.1", key=chance.randbytes(32)))


def meeting_on_one_host(chance: random.Random, row: Row) -> None:
    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as folder:
        meeting(chance, row, Address(path=f"{folder}/control.sock"))


@contextlib.contextmanager
def noises(chance: random.Random, row: Row, connect: Callable[[], socket.socket]) -> Iterator[None]:
    """Disturb a server; inside the block some strangers are still connected, and the server must answer others."""
    held: list[socket.socket] = []
    disturb(chance, connect, chance.randrange(10, 150), held)
    try:
        yield
    finally:
        for sock in held:
            sock.close()
    row.tried += len(held)
    row.refused += len(held)
    row.survived += 1


def probe_server(chance: random.Random, row: Row) -> None:
    with contextlib.closing(ProbeServer()) as server, \
            noises(chance, row, lambda: socket.create_connection(("127.0.0.1", server.port))):
        assert probe(["127.0.0.1"], server.port) == {"127.0.0.1": ""}


class _NoReport:
    """A report about nothing."""

    def text(self) -> str:
        return "fine"

    def as_dict(self) -> dict[str, Any]:
        return {}


def report_server(chance: random.Random, row: Row) -> None:
    def demand(receive: Receiver) -> None:
        receive(_NoReport())  # type: ignore[arg-type]

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{folder}/report.sock")
        return sock

    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as folder, \
            contextlib.closing(ReportServer(folder, demand)), noises(chance, row, connect), connect() as asking:
        asking.settimeout(HANGS_SECONDS)
        answer = b"".join(iter(lambda: asking.recv(4096), b""))
        assert json.loads(answer)["text"] == "fine"


def member_server(chance: random.Random, row: Row) -> None:
    heard: list[int] = []
    number = chance.getrandbits(30)

    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{folder}/member.sock")
        turn(0)
        return sock

    def turn(seconds: float) -> None:
        for key, _ in selector.select(seconds):
            if selector.get_map().get(key.fd) is key:
                key.data()

    with tempfile.TemporaryDirectory(prefix="hvdlite-chaos-") as folder, selectors.DefaultSelector() as selector, \
            contextlib.closing(MemberServer(selector, folder, lambda member, *_: heard.append(member))), \
            noises(chance, row, connect), connect() as member:
        member.sendall(frame(MemberHello(number, 1)))
        while number not in heard:
            turn(HANGS_SECONDS)


def gloo(chance: random.Random, row: Row) -> None:
    """Connect to Gloo while its ranks connect, and afterwards: results are right, and no descriptors are kept afterwards."""
    from hvdlite.planes.gloo_listener import listeners
    size = chance.choice([2, 3])
    before = {address for address in listeners().values()}
    wakes = [threading.Event() for _ in range(size)]
    planes = makers.gloo(size, lambda rank: wakes[rank].set())
    held: list[socket.socket] = []
    over = threading.Event()

    def ports() -> list[int]:
        return [int.from_bytes(address[2:4], "big") for address in listeners().values() if address not in before]

    def stranger() -> None:
        while not over.is_set():
            for port in ports():
                disturb(chance, lambda port=port: socket.create_connection(("127.0.0.1", port), 0.02), 5, held)  # type: ignore[misc]

    disturbing = threading.Thread(target=stranger)
    disturbing.start()
    try:
        for turn in range(3):
            reduce_with(planes, wakes, turn)
        over.set()
        disturbing.join()
        kept = len(os.listdir("/proc/self/fd")) - sum(sock.fileno() >= 0 for sock in held)
        for port in ports():
            disturb(chance, lambda port=port: socket.create_connection(("127.0.0.1", port), 0.02), 20, held)  # type: ignore[misc]
        assert len(os.listdir("/proc/self/fd")) - sum(sock.fileno() >= 0 for sock in held) <= kept + 5 * size
    finally:
        over.set()
        disturbing.join()
        for sock in held:
            sock.close()
        for plane in planes:
            plane.close()
    row.tried += len(held) + 20 * size
    row.refused += 20 * size
    row.survived += 1


def reduce_with(planes: Sequence[Any], wakes: Sequence[threading.Event], turn: int) -> None:
    """Let the ranks of planes gather something, as threads."""
    size = len(planes)
    ranks = tuple(range(size))
    outputs = [np.empty(size, np.float32) for _ in ranks]
    failures: list[BaseException] = []

    def step(rank: int) -> None:
        def wait_until(predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
            while not predicate():
                wakes[rank].wait(0.05)
                wakes[rank].clear()

        response = Response(names=("x",), collective=Collective.ALLGATHER, dtype="float32", rows=(1,) * size, row_elements=1,
                            contributors=ranks)
        try:
            given = np.full(1, rank + turn, np.float32)
            planes[rank].execute(Plan(1, ranks, response, [given], [outputs[rank]]), wait_until)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=step, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_SECONDS)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
    assert all(output.tolist() == [rank + turn for rank in ranks] for output in outputs), outputs


STRANGERS = (
    Trouble("damaged frames between ranks", frames), Trouble("bytes that are no message", bodies),
    Trouble("connections to rank 0 over TCP", meeting_over_tcp),
    Trouble("connections to rank 0 on one host", meeting_on_one_host),
    Trouble("connections to the probe server", probe_server), Trouble("connections to the report server", report_server),
    Trouble("connections to the members' server", member_server), Trouble("connections to Gloo", gloo),
)
