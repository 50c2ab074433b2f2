"""Ranks meet over Unix sockets and TCP; strangers do not get in and do not disturb."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import msgspec
import pytest

from hvdlite.bootstrap.refused_connections import LOGGED_REFUSALS, RefusedConnections
from hvdlite.bootstrap.rendezvous import Address
from hvdlite.control.codec import RankInfo
from hvdlite.core.errors import LaunchError, ProtocolError
from tests.bootstrap.meeting import SETTINGS, meet, rank_info


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
    (RankInfo(rank=1, size=3, pid=1, host="host", version="1", epoch=2), "membership epoch 2"),
    (rank_info(1, size=4), "rank 1 of 4"), (rank_info(0), "rank 0 of 3"), (rank_info(1, version="2"), "runs hvdlite 2"),
    (msgspec.structs.replace(rank_info(1), settings=(SETTINGS[0], ("HVDLITE_CPU_OPERATIONS", "gloo"))),
     "rank 1 has HVDLITE_CPU_OPERATIONS=gloo, rank 0 auto"),
])
def test_a_rank_that_does_not_fit_is_refused_everywhere(address: Address, other: RankInfo, told: str) -> None:
    for error in meet(address, [rank_info(0), other]):
        assert isinstance(error, LaunchError) and told in str(error)


def test_two_processes_of_one_rank_are_named(address: Address) -> None:
    results = meet(address, [rank_info(0), rank_info(1), rank_info(1)])
    assert "are rank 1" in str(results[0])


def test_strangers_are_refused_and_the_job_starts(caplog: pytest.LogCaptureFixture) -> None:
    """Each reason is logged once per peer."""
    def stranger(address: Address) -> None:
        for noise in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 64, *[b"x" * 96] * 1000):
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
    first, second = sorted(reasons)  # connections are heard in any order
    assert "from 127.0.0.1 to 127.0.0.1:" in first and "was refused: closed during the handshake" in first
    assert "was refused: the peer does not know the job's key" in second
    assert "1001 more connections to 127.0.0.1:" in rest


def test_a_peer_with_many_reasons_and_many_peers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """See docs/protocol.md#frames."""
    refused = RefusedConnections(Address(path="/socket"))
    for number in range(300):
        refused.note(f"10.0.0.{number % 150}", ProtocolError(f"reason {number % 2}"))
    refused.log_rest()
    refused.log_rest()
    assert len(caplog.records) == LOGGED_REFUSALS + 1
    assert caplog.records[-1].message == "200 more connections to /socket were refused"


def test_a_silent_stranger_delays_nobody() -> None:
    held: list[socket.socket] = []

    def stranger(address: Address) -> None:
        held.extend(socket.create_connection((address.host, address.port)) for _ in range(5))

    results = meet(Address(host="127.0.0.1", port=0, key=b"secret" * 6), [rank_info(rank) for rank in range(3)],
                   stranger=stranger)
    assert all(welcome.pids == (1000, 1001, 1002) for welcome in results)
    for sock in held:
        sock.close()


def test_tcp_without_a_key_says_how_to_make_one() -> None:
    with pytest.raises(LaunchError, match="HVDLITE_SECRET"):
        Address(host="127.0.0.1", port=1)


def test_the_key_is_never_shown() -> None:
    assert "secret" not in repr(Address(host="h", port=1, key=b"secret" * 6))
