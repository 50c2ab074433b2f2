"""Ports that are held for rank 0."""

from __future__ import annotations

import contextlib
import socket

import pytest

from hvdlite.bootstrap.rendezvous import Address, listen
from hvdlite.core.sockets import HeldPort


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
@pytest.mark.parametrize("listens_at", ["", "127.0.0.1"])
def test_a_held_port_is_rank_0s_and_no_other_programs(host: str, listens_at: str) -> None:
    with contextlib.closing(HeldPort(host=host)) as held:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", held.port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", held.port))
        with listen(Address(host=listens_at, port=held.port, key=b"k" * 32)) as listener, \
                socket.create_connection(("127.0.0.1", held.port)):
            listener.accept()[0].close()
        HeldPort(held.port).close()
        held.close()
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        HeldPort(server.getsockname()[1])
