"""Ranks that find each other through a key-value store: what they agree on, and a store that is used again."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hvdlite.bootstrap import store as store_module
from hvdlite.bootstrap.environments import LaunchInfo
from hvdlite.bootstrap.job_directory import host_identity, network_identity
from hvdlite.bootstrap.store import meet_in_store, own_address
from hvdlite.bootstrap.store_texts import sealed
from hvdlite.core.errors import LaunchError
from hvdlite.core.sockets import HeldPort
from tests.bootstrap.stores import HANGS_SECONDS, KEY, DictStore, said, signer


class KeepingStore(DictStore):
    def forget(self, key: str) -> None:
        pass


def meet(store: DictStore, *ranks: dict[str, Any]) -> list[tuple[LaunchInfo, str]]:
    """Let ranks meet, each with its own arguments; raise the first error."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(meet_in_store, store, rank, len(ranks), **given)
                 for rank, given in enumerate(ranks)]
        met = [call.result(HANGS_SECONDS) for call in calls]
    for info, _ in met:
        if info.held_port is not None:
            info.held_port.close()
    return met


def test_ranks_of_one_host() -> None:
    met = [info for info, _ in meet(DictStore(), {}, {}, {})]
    assert [(info.world.rank, info.world.size, info.world.local_rank, info.world.local_size) for info in met] == [
        (0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]
    assert len({info.job_directory for info in met}) == 1 and all(info.owns_directory for info in met)
    assert {(info.coordinator, info.key) for info in met} == {(None, b"")}
    assert len({info.job for info in met}) == 1
    again, = {info.job_directory for info, _ in meet(DictStore(), {}, {})}
    assert again != met[0].job_directory and Path(again).parent == Path(met[0].job_directory).parent


def test_ranks_of_several_hosts_without_a_key_are_refused() -> None:
    store = DictStore()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(meet_in_store, store, rank, 2, place="ab"[rank], allows_insecure_store=not rank)
                 for rank in range(2)]
        errors = [str(call.exception(HANGS_SECONDS)) for call in calls]
    assert errors[0] == errors[1] and errors[0].startswith("rank 1 has no key, and the group has ranks on several hosts")
    assert "HVDLITE_SECRET" in errors[0] and "HVDLITE_ALLOW_INSECURE_STORE=1" in errors[0]
    assert not store.texts


def test_ranks_of_several_hosts_get_an_address_and_a_key_if_that_is_allowed() -> None:
    store, allowed = DictStore(), {"allows_insecure_store": True}
    met = [info for info, _ in meet(store, {"place": "a", "address": "192.0.2.7", **allowed}, {"place": "b", **allowed},
                                    {"place": "a", **allowed})]
    assert [info.world.local_rank for info in met] == [0, 0, 1]
    assert len({info.job_directory for info in met}) == 2 and met[0].job_directory == met[2].job_directory
    (key,), (coordinator,) = {info.key for info in met}, {info.coordinator for info in met}
    assert len(key) == 32 and coordinator is not None and coordinator[0] == "192.0.2.7" and coordinator[1] > 0
    assert len({info.job for info in met}) == 1
    assert meet(store, {"place": "a", **allowed}, {"place": "b", **allowed})[0][0].key != key


def test_the_jobs_own_key_does_not_go_through_the_store() -> None:
    store = KeepingStore()
    key = bytes(range(32))
    met = [info for info, _ in meet(store, {"place": "a", "key": key}, {"place": "b", "key": key})]
    assert [info.key for info in met] == [key] * 2
    assert not any(key in value for value in store.texts.values())


@pytest.mark.parametrize("keys", [(b"", b"k" * 32), (b"k" * 32, b""), (b"a" * 32, b"b" * 32)])
def test_ranks_with_different_keys_all_raise(keys: tuple[bytes, bytes]) -> None:
    store = DictStore()
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(meet_in_store, store, rank, 2, key) for rank, key in enumerate(keys)]
        errors = [str(call.exception(HANGS_SECONDS)) for call in calls]
    for rank, (own, others) in enumerate(zip(keys, keys[::-1], strict=True)):
        told = (f"rank {rank} has the job's key (HVDLITE_SECRET), and rank {1 - rank} has none" if own and not others else
                f"what rank {1 - rank} has written to the store is not signed with the key of rank {rank}" if own else
                f"what rank {1 - rank} has written to the store is not signed as rank {rank} does, which has no key")
        assert errors[rank].startswith(told)
    assert not store.texts


def test_ranks_of_a_host_with_different_directories_for_temporary_files_are_told() -> None:
    store = DictStore()
    host = f"{host_identity()}:{network_identity()}:"
    store.put("hvdlite/1", sealed("hvdlite/1", 1, 7, [2, host, "h", "/other", False, ""], signer()))
    with pytest.raises(LaunchError, match=r"ranks 0 and 1 of one host .* /other: set TMPDIR"):
        meet_in_store(store, 0, 2)


@pytest.mark.parametrize("sizes", [(2, 3), (2, 3, 3), (3, 2, 3), (4, 2, 4, 4), (3, 2)])
def test_ranks_that_say_different_sizes_all_raise(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rank is the odd one, and although rank 0 expects one of which the others know nothing (3, 2)."""
    if len(sizes) < max(sizes):
        monkeypatch.setattr(store_module, "LATE_SECONDS", 0.02)
    store = DictStore(seconds=5.0)
    with ThreadPoolExecutor(len(sizes)) as pool:
        calls = [pool.submit(meet_in_store, store, rank, size) for rank, size in enumerate(sizes)]
        errors = [str(call.exception(HANGS_SECONDS)) for call in calls]
    assert errors == [f"the ranks do not agree on their number: {sorted(set(sizes))}"] * len(sizes)
    assert not store.texts


@pytest.mark.parametrize(("rank", "came", "missing"), [(0, (), "ranks 17, 19"), (0, (1,), "rank 19"), (1, (), "rank 19"),
                                                       (1, (2,), "rank 13"), (1, (0, 2), "the others")])
def test_ranks_that_do_not_come_are_named(rank: int, came: tuple[int, ...], missing: str,
                                          caplog: pytest.LogCaptureFixture) -> None:
    store = DictStore(seconds=0.1)
    for each in came:
        store.put(f"hvdlite/{each}", said(each, 3, name="group 5"))
    own = (13, 17, 19)[rank]
    with pytest.raises(LaunchError) as raised, caplog.at_level(logging.WARNING, "hvdlite"):
        meet_in_store(store, rank, 3, name="group 5", members=(13, 17, 19), patience=0.02)
    assert str(raised.value) == (f"group 5: rank {own} has waited in vain for {missing}; all 3 ranks must make the group, "
                                 "with the same backend: wait timeout after 0.1 s")
    told = [f"group 5: rank {own} has waited 0 s for {missing} to make the group"] if missing != "the others" else []
    assert [record.getMessage() for record in caplog.records] == told


@pytest.mark.parametrize("waiting", [(0, 1, 2), (1, 2)])
def test_one_of_several_ranks_that_wait_tells(waiting: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    store = KeepingStore(seconds=0.05)
    for rank in waiting:
        store.put(f"hvdlite/{rank}", said(rank, 4))
    with caplog.at_level(logging.WARNING, "hvdlite"):
        for rank in waiting:
            with pytest.raises(LaunchError, match="in vain for rank 3"):
                meet_in_store(store, rank, 4, patience=0.01)
    (record,) = caplog.records
    assert record.getMessage() == f"the group: rank {waiting[0]} has waited 0 s for rank 3 to make the group"


def test_the_timeout_of_the_store_counts_from_the_start() -> None:
    """Not from the first look for each of the keys."""
    class Late(DictStore):
        def get(self, key: str, seconds: float) -> bytes | None:
            if key == "hvdlite/1":
                time.sleep(0.15)
                self.put(key, said(1, 3))
            if key == "hvdlite/2":
                waits.append(seconds)
            return super().get(key, seconds)

    waits: list[float] = []
    with pytest.raises(LaunchError, match="in vain for rank 2"):
        meet_in_store(Late(seconds=0.2), 0, 3)
    assert max(waits) < 0.05


def test_a_store_that_cannot_look_once() -> None:
    """So nobody is called absent, and a wait lasts as long as the store lets it."""
    class Waits(DictStore):
        def get(self, key: str, seconds: float) -> bytes | None:
            if not seconds:
                raise RuntimeError("not implemented")
            return super().get(key, self.seconds)

    store = Waits()
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(meet_in_store, store, 1, 2, patience=0.01)
        assert meet_in_store(store, 0, 2)[0].identity == late.result(HANGS_SECONDS)[0].identity
    with pytest.raises(LaunchError, match="in vain for the others"):
        meet_in_store(Waits(seconds=0.05), 1, 2, patience=0.01)


def test_a_rank_that_fails_leaves_nothing() -> None:
    store = DictStore(seconds=0.02)
    for rank in range(2):
        with pytest.raises(LaunchError, match="in vain"):
            meet_in_store(store, rank, 2)
        assert not store.texts


def test_who_has_come_and_failed_is_not_called_absent() -> None:
    """The ranks' timeouts end one after the other, and each removes what it has said."""
    store = DictStore(seconds=0.2)
    store.put("hvdlite/1", said(1, 4))

    class Fails(DictStore):
        def get(self, key: str, seconds: float) -> bytes | None:
            found = super().get(key, seconds)
            self.texts.pop("hvdlite/1" if key == "hvdlite/1" else "", None)
            return found

    store.__class__ = Fails
    with pytest.raises(LaunchError, match="rank 2 has waited in vain for rank 3;"):
        meet_in_store(store, 2, 4)


def test_a_store_that_fails_leaves_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = []

    class Port(HeldPort):
        def __init__(self) -> None:
            super().__init__()
            ports.append(self)

    class Fails(DictStore):
        def put(self, key: str, value: bytes) -> None:
            if "answer" in key:
                raise RuntimeError("connection reset")
            super().put(key, value)

    monkeypatch.setattr(store_module, "HeldPort", Port)
    store = Fails()
    store.put("hvdlite/1", said(1, 2, "another host", KEY))
    with pytest.raises(LaunchError, match="connection reset"):
        meet_in_store(store, 0, 2, KEY, address="192.0.2.8")
    (port,) = ports
    assert port._socket.fileno() == -1


def test_they_share_what_all_can_share() -> None:
    assert [shared for _, shared in meet(DictStore(), {"can_share": "x"}, {"can_share": "x"})] == ["x", "x"]
    assert [shared for _, shared in meet(DictStore(), {"can_share": "x"}, {"can_share": "y"})] == ["", ""]
    assert [shared for _, shared in meet(DictStore(), {"can_share": "x"}, {})] == ["", ""]


def test_a_store_can_be_used_again() -> None:
    store, seen = DictStore(), set()
    for place in ("a", "b", "c"):
        met = meet(store, {"can_share": place}, {"can_share": place}, {"can_share": place})
        assert {shared for _, shared in met} == {place}, "an answer of an earlier world"
        (directory,) = {info.job_directory for info, _ in met}
        seen.add(directory)
        assert not store.texts, "nothing is left"
    assert len(seen) == 3


def test_a_rank_waits_for_an_answer_to_itself() -> None:
    """Not to itself in an earlier world, and as long as the store waits."""
    store = KeepingStore()
    meet(store, {}, {})
    del store.texts["hvdlite/0"]
    store.seconds = 0.05
    with pytest.raises(LaunchError, match="rank 1 has waited in vain for rank 0"):
        meet_in_store(store, 1, 2)


def test_the_address_for_other_hosts_is_never_a_loopback_address() -> None:
    class Tcp(DictStore):
        host = "localhost"

    assert own_address({"MASTER_ADDR": "127.0.0.1"}, Tcp()) == ""
    assert own_address({}, DictStore()) == "" and own_address({"MASTER_ADDR": "no.such.host.invalid"}, DictStore()) == ""
