"""torch's stores, and stores for torch that are written in Python, as those in which ranks meet."""

from __future__ import annotations

import datetime
import math
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hvdlite.bootstrap import store as meeting
from hvdlite.bootstrap.store import meet_in_store, own_address
from hvdlite.core.errors import LaunchError
from hvdlite.core.sockets import HeldPort
from hvdlite_torch.distributed import store as store_module
from hvdlite_torch.distributed.store import TorchStore
from tests.bootstrap.stores import HANGS_SECONDS, KEY, said

TIMEOUT = datetime.timedelta(seconds=HANGS_SECONDS)


def tcp_store(seconds: float = HANGS_SECONDS) -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    store.set_timeout(datetime.timedelta(seconds=seconds))  # not that of its connection
    return store


class Gets(dist.Store):
    """A store that is written in Python, with as little as torch's documentation asks for: `set`, and a `get` that waits."""

    def __init__(self, seconds: float = HANGS_SECONDS) -> None:
        super().__init__()
        self.set_timeout(datetime.timedelta(seconds=seconds))
        self.texts: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.texts[key] = value

    def get(self, key: str) -> bytes:
        until = time.monotonic() + self.timeout.total_seconds()
        while key not in self.texts:
            if time.monotonic() > until:
                raise RuntimeError(f"no {key}")
            time.sleep(0.001)
        return self.texts[key]


class Looks(Gets):
    def check(self, keys: list[str]) -> bool:
        return all(key in self.texts for key in keys)


class Waits(Gets):
    def __init__(self, seconds: float = HANGS_SECONDS) -> None:
        super().__init__(seconds)
        self.waits: list[float] = []

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:  # type: ignore[override]
        self.waits.append(timeout.total_seconds())
        until = time.monotonic() + timeout.total_seconds()
        while not all(key in self.texts for key in keys):
            if time.monotonic() > until:
                raise RuntimeError(f"wait timeout\nkeys: {keys}")
            time.sleep(0.001)


@pytest.fixture(params=["tcp", "file", "hash", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = {"tcp": tcp_store, "file": lambda: dist.FileStore(str(tmp_path / "store"), 2), "hash": dist.HashStore,
            "prefix": lambda: dist.PrefixStore("a", dist.PrefixStore("b", tcp_store()))}
    return made[request.param]()


def meet(store: Any, **given: Any) -> list[str]:
    """Let two ranks meet, the second one late; return what they know as the world's identity."""
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(meet_in_store, TorchStore(store), 1, 2, **given)
        time.sleep(0.05)  # patience is over
        met = [meet_in_store(TorchStore(store), 0, 2, **given), late.result(HANGS_SECONDS)]
    return [info.identity for info, _ in met]


def test_torchs_own_stores(store: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A wait in vain writes nothing to stderr, as `TCPStore.wait` does."""
    adapted = TorchStore(store)
    for seconds in (0.0, 0.05):
        assert adapted.get("key", seconds) is None
    adapted.put("key", b"\xff\0")
    assert adapted.get("key", 0.0) == adapted.get("key", HANGS_SECONDS) == b"\xff\0"
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(TorchStore(store).get, "late", HANGS_SECONDS)
        adapted.put("late", b"it")
        assert late.result(HANGS_SECONDS) == b"it"
    for _ in range(2):
        adapted.forget("key")
        assert adapted.get("key", 0.0) is None
    assert capfd.readouterr().err == ""


def test_ranks_meet_in_torchs_own_stores_again_and_again(store: Any) -> None:
    worlds = [meet(store, patience=0.01) for _ in range(3)]
    assert all(first == second for first, second in worlds) and len({first for first, _ in worlds}) == 3
    assert not any(store.check([f"hvdlite/{rank}"]) for rank in range(2)), "nothing is left"


@pytest.mark.parametrize("kind", [Gets, Looks, Waits])
def test_ranks_meet_in_stores_that_are_written_in_python(kind: type[Gets], monkeypatch: pytest.MonkeyPatch) -> None:
    """What they do not have is a pure virtual function of C++, in a `PrefixStore` around them, too."""
    monkeypatch.setattr(meeting, "OWN_SECONDS", 0.02)
    store = kind()
    for without, method, call in ((Looks, "check", store.check), (Waits, "wait", store.wait)):
        if not isinstance(store, without):
            with pytest.raises(RuntimeError, match=f'pure virtual function ".*Store::{method}"'):
                call(["key"], *[TIMEOUT] * (method == "wait"))  # type: ignore[operator]
    for each, prefix in ((store, ""), (dist.PrefixStore("a", store), "a/")):
        first, second = meet(each, patience=0.01)
        assert first == second
        assert {f"{prefix}hvdlite/{rank}" for rank in range(2)} <= set(store.texts), "it cannot forget"


def test_a_store_that_cannot_look_once_says_so() -> None:
    for store in (Gets(), Waits()):
        store.set("key", b"value")
        adapted = TorchStore(store)
        with pytest.raises(RuntimeError, match=r'pure virtual function ".*Store::check"'):
            adapted.get("key", 0.0)
        assert adapted.get("key", 0.05) == b"value"


def test_timeouts(capfd: pytest.CaptureFixture[str]) -> None:
    """A meeting takes as long as the store lets it, from the start, however that waits; nothing is written to stderr."""
    waits, told = Waits(seconds=0.1), "wait timeout after 0.1 s"
    for store, missing, words in ((tcp_store(0.1), "rank 0", told), (Looks(seconds=0.1), "rank 0", told),
                                  (waits, "the others", told), (Gets(seconds=0.1), "the others", "")):
        with pytest.raises(LaunchError) as raised:
            meet_in_store(TorchStore(store), 1, 2, patience=0.05)
        assert str(raised.value).startswith(f"the group: rank 1 has waited in vain for {missing}; all 2 ranks must make the "
                                            f"group, with the same backend: {words}")
    assert sum(waits.waits) < 0.15 and min(waits.waits) > 0.0, "0 is for ever"
    assert TorchStore(waits).get("key", 0.001) is None
    assert capfd.readouterr().err == ""
    assert TorchStore(tcp_store(0.1)).seconds == TorchStore(dist.PrefixStore("a", tcp_store(0.1))).seconds == 0.1
    assert TorchStore(Gets(seconds=0.0)).seconds == math.inf


def test_who_waits_long_looks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the meeting does something else every few seconds."""
    now, pauses = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(store_module, "time", types.SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    store = TorchStore(Looks())
    for key in ("hvdlite/1", "hvdlite/2"):
        pauses.clear()
        for _ in range(30):
            assert store.get(key, 2.0) is None and store.get("hvdlite/0", 0.0) is None
        assert pauses[0] == 0.001 and max(pauses) == 0.5 and len(pauses) < 230


def test_a_store_that_fails() -> None:
    server = tcp_store()
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)
    adapted = TorchStore(client)
    del server
    with pytest.raises(LaunchError, match="rank 1 has waited in vain for the others"):
        meet_in_store(adapted, 1, 2)
    adapted.forget("key")


def test_a_store_that_fails_later_leaves_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []

    class Port(HeldPort):
        def __init__(self) -> None:
            super().__init__()
            ports.append(self)

    class Fails(Looks):
        def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
            if "answer" in key:
                raise RuntimeError("connection reset")
            super().set(key, value)

    monkeypatch.setattr(meeting, "HeldPort", Port)
    store = Fails()
    store.set("hvdlite/1", said(1, 2, "another host", KEY))
    with pytest.raises(LaunchError, match="connection reset"):
        meet_in_store(TorchStore(store), 0, 2, KEY, address="192.0.2.8")
    (port,) = ports
    assert port._socket.fileno() == -1


def test_where_a_store_is(tmp_path: Path) -> None:
    file, tcp = dist.FileStore(str(tmp_path / "store"), 2), tcp_store()
    assert (TorchStore(file).host, TorchStore(file).where) == ("", f" {tmp_path / 'store'}")
    for store in (tcp, dist.PrefixStore("a", dist.PrefixStore("b", tcp))):
        assert (TorchStore(store).host, TorchStore(store).where) == ("127.0.0.1", f"{tcp.port} ")
        assert own_address({}, TorchStore(store)) == "", "never a loopback address"
    assert (TorchStore(dist.HashStore()).host, TorchStore(Gets()).where) == ("", " ")
