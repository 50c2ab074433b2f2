"""The server of an elastic job's members, with processes of the same user that are no members."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from pathlib import Path

import msgspec
import pytest

from hvdlite.membership.messages import Alive, MemberHello, MemberReady, frame
from hvdlite_runner.host.member_server import MOST_BYTES, MOST_MESSAGES, STRANGERS, MemberServer
from tests.worlds import HANGS_SECONDS


def test_connections_that_say_nothing_give_way_to_members(tmp_path: Path) -> None:
    heard: list[int] = []
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as held:
        server = MemberServer(selector, str(tmp_path), lambda member, message, problem: heard.append(member))
        held.callback(server.close)

        def connected() -> socket.socket:
            sock = held.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(tmp_path / "member.sock"))
            for key, _ in selector.select(0):
                key.data()
            return sock

        first, *_ = [connected() for _ in range(STRANGERS + 10)]
        member = connected()
        member.sendall(frame(MemberHello(3, 1000)))
        while not heard:
            for key, _ in selector.select(HANGS_SECONDS):
                key.data()
        first.settimeout(HANGS_SECONDS)
        assert heard == [3] and first.recv(1) == b""


def packed(**fields: object) -> bytes:
    """Return a frame with any fields; `frame` does not refuse numbers either."""
    body = msgspec.msgpack.encode(fields)
    return struct.pack("!I", len(body)) + body


LIES = [packed(type="BoundaryReport", change=1, boundary=2**64 - 1),
        packed(type="BoundaryReport", change=-5, boundary=1),
        packed(type="MemberIdle", epoch=1, state_report={"commits": 2**64 - 1}),
        packed(type="Listening", epoch=1, addresses=["a"], port=-7)]


@pytest.mark.parametrize("content", LIES)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, content: bytes) -> None:
    heard = server_hears(tmp_path, content + frame(MemberReady()))
    assert [(member, problem[:20]) for member, _, problem in heard] == [(3, ""), (3, "not a message: Expec")], heard


def test_few_messages_of_too_many_bytes_are_a_flood_too(tmp_path: Path) -> None:
    heard: list[tuple[int, object, str]] = []
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as member, contextlib.closing(MemberServer(
            selector, str(tmp_path), lambda *each: heard.append(each), lambda: 0.0)):
        member.connect(str(tmp_path / "member.sock"))
        member.sendall(frame(MemberHello(3, 1000)))
        large = packed(type="Alive", epoch=1, in_user_code=False, unknown="x" * 60_000)
        thread = threading.Thread(target=send_all, args=(member, large * (MOST_BYTES // len(large) + 2)))
        thread.start()
        while not any(problem for _, _, problem in heard):
            turn(selector)
        member.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert f"the limit is {MOST_BYTES:,}" in heard[-1][2] and len(heard) < MOST_MESSAGES


def send_all(sock: socket.socket, content: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(content)


def test_a_member_that_floods_is_not_heard_any_more_and_others_are_heard_meanwhile(tmp_path: Path) -> None:
    heard: list[tuple[int, str]] = []
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as held:
        server = MemberServer(selector, str(tmp_path), lambda member, message, problem: heard.append((member, problem)),
                              lambda: 0.0)
        held.callback(server.close)
        flooder, quiet = (held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        for number, sock in enumerate((flooder, quiet)):
            sock.connect(str(tmp_path / "member.sock"))
            sock.sendall(frame(MemberHello(number, 1000)))
        while len(heard) < 2:
            turn(selector)
        thread = threading.Thread(target=flood, args=(flooder,))
        thread.start()
        quiet.sendall(frame(MemberReady()))
        while heard.count((1, "")) < 2 or not any(problem for _, problem in heard):
            assert len(heard) <= MOST_MESSAGES + 10
            turn(selector)
        thread.join()  # its connection is closed
        (problem,) = [each for each in heard if each[1]]
        assert problem[0] == 0 and f"the limit is {MOST_MESSAGES:,}" in problem[1]


def flood(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(frame(Alive(1, False)) * 2000)


def server_hears(folder: Path, content: bytes) -> list[tuple[int, object, str]]:
    """Return what is heard of a member that sends some bytes."""
    heard: list[tuple[int, object, str]] = []
    with selectors.DefaultSelector() as selector, contextlib.closing(MemberServer(
            selector, str(folder), lambda *each: heard.append(each))), socket.socket(socket.AF_UNIX) as member:
        member.connect(str(folder / "member.sock"))
        for part in (frame(MemberHello(3, 1000)), content):
            count = len(heard)
            member.sendall(part)
            while len(heard) == count:
                turn(selector)
    return heard


def turn(selector: selectors.BaseSelector) -> None:
    ready = selector.select(HANGS_SECONDS)
    assert ready
    for key, _ in ready:
        key.data()
