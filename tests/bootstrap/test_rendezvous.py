"""Ranks meet over Unix sockets and TCP; strangers do not get in and do not disturb."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from hvdlite.bootstrap import admission, rendezvous
from hvdlite.bootstrap.admission import HALF_OPEN_LIMIT, accept_ranks
from hvdlite.bootstrap.rendezvous import Address, connect_to_rank_0
from hvdlite.control.handshake import Greeting
from hvdlite.control.wire import RankInfo
from hvdlite.core.errors import LaunchError, ProtocolError
from hvdlite.core.sockets import LOGGED_REFUSALS, RefusedConnections
from tests.bootstrap.meeting import LIMIT, SETTINGS, meet, rank_info
from tests.worlds import HANGS_SECONDS


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "unix":
        return Address(path=str(tmp_path / "control.sock"))
    return Address(host="127.0.0.1", port=0, key=b"secret" * 6)


def test_all_ranks_learn_who_is_there(address: Address) -> None:
    for welcome in meet(address, [rank_info(rank) for rank in range(3)]):
        assert welcome.pids == (1000, 1001, 1002) and welcome.hosts == ("host",) * 3


def test_a_missing_rank_is_named_on_all_ranks(address: Address) -> None:
    for error in meet(address, [rank_info(0), rank_info(2)], timeout=0.5):
        assert isinstance(error, LaunchError) and "ranks [1] did not connect" in str(error)


@pytest.mark.parametrize(("other", "told"), [
    (msgspec.structs.replace(rank_info(1), epoch=2), "membership epoch 2"),
    (rank_info(1, size=4), "rank 1 of 4"), (rank_info(0), "rank 0 of 3"),
    (msgspec.structs.replace(rank_info(1), settings=(SETTINGS[0], ("HVDLITE_CPU_OPERATIONS", "gloo"))),
     "rank 1 has HVDLITE_CPU_OPERATIONS=gloo, rank 0 auto"),
])
def test_a_rank_that_does_not_fit_is_refused_everywhere(address: Address, other: RankInfo, told: str) -> None:
    for error in meet(address, [rank_info(0), other]):
        assert isinstance(error, LaunchError) and told in str(error)


def test_two_processes_of_one_rank_are_named(address: Address) -> None:
    results = meet(address, [rank_info(0), rank_info(1), rank_info(1)])
    assert "are rank 1" in str(results[0])


def test_a_rank_of_another_job_is_refused_and_the_job_starts(address: Address) -> None:
    """It hears why; whatever the launcher, and although it has the same rank, size and key."""
    told: list[str] = []

    def of_another_job(address: Address) -> None:
        with pytest.raises(LaunchError) as raised:
            connect_to_rank_0(address, rank_info(1, job="another"), timeout=HANGS_SECONDS, frame_limit=LIMIT)
        told.append(str(raised.value))

    results = meet(address, [rank_info(rank) for rank in range(3)], stranger=of_another_job)
    assert all(welcome.pids == (1000, 1001, 1002) for welcome in results)
    assert told == ["rank 1 (process 1001) has reached rank 0 of another job: their launchers' ids, keys or job directories "
                    "differ"]


def test_strangers_are_refused_and_the_job_starts(caplog: pytest.LogCaptureFixture) -> None:
    """Each reason is logged once per peer."""
    greeting = Greeting(1, "1").encode()

    def stranger(address: Address) -> None:
        for noise in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, *[greeting + b"x" * 64] * 1000):
            with socket.create_connection((address.host, address.port)) as sock:
                try:
                    sock.sendall(noise)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
                except OSError:
                    pass  # refused in mid-sentence

    with caplog.at_level(logging.WARNING, "hvdlite"):
        results = meet(Address(host="127.0.0.1", port=0, key=b"secret" * 6), [rank_info(rank) for rank in range(3)],
                       stranger=stranger)
    assert all(welcome.pids == (1000, 1001, 1002) for welcome in results)
    *reasons, rest = (record.message for record in caplog.records)
    closed, greets_not, knows_not = sorted(reasons)  # connections are heard in any order
    assert "from 127.0.0.1 to 127.0.0.1:" in closed and "was refused: closed during the handshake" in closed
    assert "was refused: the peer does not greet: it is another program" in greets_not
    assert "was refused: the peer does not know the job's key" in knows_not
    assert "1000 more connections to 127.0.0.1:" in rest


def test_a_peer_with_many_reasons_and_many_peers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """See docs/protocol.md#frames."""
    refused = RefusedConnections(Address(path="/socket"))
    assert not str(refused)
    for number in range(300):
        refused.note(f"10.0.0.{number % 150}", ProtocolError(f"reason {number % 2}"))
    refused.log_rest()
    refused.log_rest()
    assert len(caplog.records) == LOGGED_REFUSALS + 1
    assert caplog.records[-1].message == "290 more connections to /socket were refused"
    assert str(refused) == " 300 connections were refused, one of them from 10.0.0.149: reason 1", "for rank 0's error"
    refused.note("10.0.0.1", ConnectionError("closed during the handshake"))
    assert str(refused) == " 301 connections were refused, one of them from 10.0.0.149: reason 1", "it says more"


def test_a_wrong_key_is_named_although_the_last_attempt_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter([ProtocolError("is HVDLITE_SECRET the same?"), ConnectionResetError("reset"), TimeoutError("too long")])
    now = [0.0]

    def greet(*_: object) -> None:
        error = next(attempts)
        if isinstance(error, TimeoutError):
            now[0] = math.inf
        raise error

    monkeypatch.setattr(rendezvous, "greet_rank_0", greet)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None))
    with (socket.create_server(("127.0.0.1", 0)) as listener,
          pytest.raises(LaunchError, match=r"could not join .* is HVDLITE_SECRET the same")):
        connect_to_rank_0(Address(host="127.0.0.1", port=listener.getsockname()[1], key=b"secret" * 6), rank_info(1),
                          timeout=HANGS_SECONDS, frame_limit=LIMIT)


@pytest.mark.parametrize("said", [b"", b"h", Greeting(1, "1").encode() + bytes(63)], ids=["silent", "a byte", "almost all"])
def test_many_strangers_that_begin_a_handshake_delay_nobody(said: bytes) -> None:
    """The oldest one gives way."""
    held: list[socket.socket] = []

    def stranger(address: Address) -> None:
        for _ in range(3 * HALF_OPEN_LIMIT):
            held.append(socket.create_connection((address.host, address.port)))
            held[-1].sendall(said)

    results = meet(Address(host="127.0.0.1", port=0, key=b"secret" * 6), [rank_info(rank) for rank in range(3)],
                   stranger=stranger)
    assert all(welcome.pids == (1000, 1001, 1002) for welcome in results)
    for sock in held:
        sock.close()


def test_one_deadline_holds_for_a_whole_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides: a peer that sends a byte now and then is dropped before the ranks have met."""
    monkeypatch.setattr(admission, "HANDSHAKE_SECONDS", 0.3)
    monkeypatch.setattr(rendezvous, "HANDSHAKE_SECONDS", 0.3)
    greeting = Greeting(1, "1").encode()

    def trickle(sock: socket.socket) -> None:
        sock.settimeout(0.02)
        with sock, contextlib.suppress(OSError):
            for position in itertools.count():
                sock.send(greeting[position % 31:][:1])
                with contextlib.suppress(TimeoutError):
                    if sock.recv(4096) == b"":
                        return

    def stranger(address: Address) -> None:
        trickle(socket.create_connection((address.host, address.port)))

    assert meet(Address(host="127.0.0.1", port=0, key=b"secret" * 6), [rank_info(0, 2), rank_info(1, 2)], stranger=stranger)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=lambda: trickle(listener.accept()[0]))
        server.start()
        with pytest.raises(LaunchError, match="this rank could not join the job"):
            connect_to_rank_0(Address(host="127.0.0.1", port=listener.getsockname()[1], key=b"secret" * 6), rank_info(1),
                              timeout=0.1, frame_limit=LIMIT)
        server.join(30)


def test_another_version_is_told_on_both_sides_and_its_messages_are_not_decoded(address: Address,
                                                                                caplog: pytest.LogCaptureFixture) -> None:
    rank_0, rank_1 = meet(address, [rank_info(0, 2), rank_info(1, 2, version="2")])
    assert "rank 1 (at " in str(rank_0) and "runs hvdlite 2, rank 0 runs 1; install the same version" in str(rank_0)
    assert "rank 1 runs hvdlite 2, rank 0 (at " in str(rank_1) and "runs 1; install the same version" in str(rank_1)


def test_another_program_at_rank_0s_port_is_tried_until_the_deadline() -> None:
    """Rank 0 may come later; a stranger that happens to be there first is no reason to give up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(host="127.0.0.1", port=listener.getsockname()[1], key=b"secret" * 6)
        results: list[object] = []
        rank_1 = threading.Thread(target=lambda: results.append(connect_to_rank_0(address, rank_info(1, 2), timeout=30,
                                                                                  frame_limit=LIMIT)))
        rank_1.start()
        for noise in (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9, b"", Greeting(0, "1").encode() + bytes(64)):
            with listener.accept()[0] as sock, contextlib.suppress(OSError):
                sock.sendall(noise)
        connections, _ = accept_ranks(listener, address, rank_info(0, 2), timeout=30, frame_limit=LIMIT)
        rank_1.join(30)
        for connection in [*connections.values(), results[0][0]]:  # type: ignore[index]
            connection.close()


def test_a_rank_that_was_refused_says_so_when_rank_0_has_given_up() -> None:
    """A connection that nobody accepts afterwards would hide that its key is another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address(host="127.0.0.1", port=listener.getsockname()[1], key=b"secret" * 6)

        def refuse() -> None:
            with listener.accept()[0] as sock:
                listener.close()  # before rank 1 tries again
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9)

        rank_0 = threading.Thread(target=refuse)
        rank_0.start()
        with pytest.raises(LaunchError, match=r"could not join the job at .* it is another program"):
            connect_to_rank_0(address, rank_info(1, 2), timeout=1.0, frame_limit=LIMIT)
        rank_0.join()


def test_tcp_without_a_key_says_how_to_make_one() -> None:
    with pytest.raises(LaunchError, match="HVDLITE_SECRET"):
        Address(host="127.0.0.1", port=1)


def test_the_key_is_never_shown() -> None:
    assert "secret" not in repr(Address(host="h", port=1, key=b"secret" * 6))
