"""The server of an elastic job's members, with processes of the same user that are no members."""

from __future__ import annotations

import contextlib
import selectors
import socket
from pathlib import Path

from hvdlite.membership.messages import MemberHello, frame
from hvdlite_runner.member_server import STRANGERS, MemberServer
from tests.worlds import HANGS_SECONDS


def test_connections_that_say_nothing_give_way_to_members(tmp_path: Path) -> None:
    heard: list[int] = []
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as held:
        server = MemberServer(selector, str(tmp_path), lambda member, content: heard.append(member))
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
