"""Strangers and meddlers against a real job over TCP: it finishes its work, or says who broke which connection."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hvdlite._version import __version__
from hvdlite.control.handshake import Greeting, greet_rank_0
from hvdlite.core.errors import HvdliteError
from tests.control.programs.fuzz import reduce_until_told
from tests.worlds import HANGS_SECONDS, Processes, free_port, over_tcp


@contextlib.contextmanager
def job(*, is_late: bool) -> Iterator[tuple[Processes, int, bytes]]:
    port = free_port()
    environment = over_tcp(port)
    with Processes(3, reduce_until_told, is_late, environment=environment) as world:
        yield world, port, bytes.fromhex(environment["HVDLITE_SECRET"])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{world.directory}/go")


def connected(port: int, seconds: float = HANGS_SECONDS) -> socket.socket:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def overheard(port: int, key: bytes) -> bytes:
    """Return what a client with the key would send: to be replayed."""
    said = bytearray()

    class Recorder(socket.socket):
        def sendall(self, data: bytes, *rest: int) -> None:  # type: ignore[override]
            said.extend(data)
            super().sendall(data, *rest)

    plain = connected(port)
    sock = Recorder(plain.family, plain.type, fileno=plain.detach())
    with sock, contextlib.suppress(HvdliteError, OSError, EOFError):
        greet_rank_0(sock, Greeting(1, __version__), key, 1 << 20, time.monotonic() + 5)
    return bytes(said)


def test_strangers_while_the_ranks_meet_and_while_they_work() -> None:
    generator = random.Random(7)
    with job(is_late=True) as (world, port, key):
        world.wait_for(2, "late")
        connected(port).close()  # a port scan
        replay = overheard(port, key)
        assert replay
        payloads = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8, b"\xff\xff\xff\x7f" + b"x" * 1000, replay,
                    replay[:7], replay * 3, *(generator.randbytes(generator.randrange(1, 5000)) for _ in range(20))]
        held = [connected(port) for _ in range(20)]  # half-open: they say nothing
        for payload in payloads:
            with connected(port) as sock, contextlib.suppress(OSError):
                sock.sendall(payload)
                sock.settimeout(0.2)
                while sock.recv(4096):
                    pass
        with connected(port) as sock, pytest.raises((HvdliteError, OSError, EOFError)):
            greet_rank_0(sock, Greeting(1, __version__), secrets.token_bytes(32), 1 << 20, time.monotonic() + 5)
        open(f"{world.directory}/join", "w").close()
        world.wait_for_all("ready")
        for sock in held:
            sock.close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=2)  # nobody listens once the ranks have met
        open(f"{world.directory}/go", "w").close()
        ended = world.wait()
        assert [rank.code for rank in ended] == [0, 0, 0], ended
        logged = ended[0].stderr.count("was refused")
        (rest,) = re.findall(r"(\d+) more connections to \S+ were refused", ended[0].stderr)
        assert len(payloads) <= logged + int(rest) <= len(payloads) + len(held) + 3, ended[0].stderr
        assert logged < 10, ended[0].stderr  # each reason once
        assert not ended[1].stderr and not ended[2].stderr


class Proxy:
    """Stands between rank 1 and rank 0, and meddles with what rank 1 says once it is told to."""

    def __init__(self, target: int, meddle: Callable[[bytes], bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.armed = threading.Event()
        self._target, self._meddle = target, meddle
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        far = connected(self._target)
        threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()
        self._pump(near, far, True)

    def _pump(self, source: socket.socket, target: socket.socket, meddles: bool) -> None:
        source.settimeout(None)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if meddles and self.armed.is_set():
                    self.armed.clear()
                    data = self._meddle(data)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


MEDDLING: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a replayed frame": lambda data: data + data,
    "a lost frame": lambda data: b"",
    "a forged length": lambda data: b"\xff\xff\xff\x7f" + data[4:],
    "random bytes": lambda data: secrets.token_bytes(len(data)),
    "a long frame of noise": lambda data: b"\0\xff\0\0" + secrets.token_bytes(len(data)),
    "bytes in between": lambda data: b"\0" * 64 + data,
}


@pytest.mark.parametrize("kind", MEDDLING)
def test_a_meddler_in_the_middle_ends_that_connection_only_with_a_reason(kind: str) -> None:
    port = free_port()
    proxy = Proxy(port, MEDDLING[kind])
    environment = {**over_tcp(port), "HVDLITE_SILENCE_CHECK_SECONDS": "1"}
    with Processes(3, reduce_until_told, False, proxy.port, environment=environment) as world:
        world.wait_for_all("ready")
        proxy.armed.set()
        for ended in world.wait(HANGS_SECONDS):
            assert (ended.code == 1 and "PeerLostError: rank 1 was lost: its connection is corrupt:" in ended.stderr) or (
                ended.rank == 1 and "PeerLostError" in ended.stderr), ended
