"""A world whose ranks find each other through a key-value store: that of `torch.distributed`, say.

Every rank says on which host it is. Rank 0 answers with what they have in common: where the ranks of each host meet, and
for several hosts where it listens and a key. Who can read the store can join the world, as with torch's own backends;
with `HVDLITE_SECRET` on all ranks the key is that one, and does not go through the store.

A store may be used again by later worlds, as `torchrun` does. So a rank removes what it has said (a store that cannot
forget serves one world), and rank 0's answer repeats a random number of each rank: another one is of an earlier world.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from hvdlite.bootstrap.environments import LaunchInfo
from hvdlite.bootstrap.mpi import route_address, source_address
from hvdlite.bootstrap.rendezvous import host_identity, is_loopback
from hvdlite.core.errors import HvdliteError, LaunchError
from hvdlite.core.held_port import HeldPort
from hvdlite.core.world import Hosts
from hvdlite.negotiation.agreement import named_ranks

_log = logging.getLogger("hvdlite")

KEY_BYTES: Final = 32
LOOK_SECONDS: Final = 0.01
"""How often a rank looks for an answer, where there is one of an earlier world; and the shortest wait of a store."""


class Store(Protocol):
    """The part of torch's `Store` that is used. `delete_key`, `wait` and `check` are used where they exist."""

    def set(self, key: str, value: Any, /) -> object:
        """Store bytes under a key."""

    def get(self, key: str, /) -> bytes:
        """Return them, once they are there."""


class _Member(msgspec.Struct, array_like=True):
    """What a rank says of itself."""

    size: int
    host: str
    name: str
    directory: str
    has_key: bool
    can_share: str
    number: int


class _Answer(msgspec.Struct, array_like=True):
    """What rank 0 says to all."""

    problem: str = ""
    hosts: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()  # of each rank's host
    coordinator: tuple[str, int] | None = None
    key: bytes = b""
    shares: str = ""
    numbers: tuple[int, ...] = ()


def meet_in_store(store: Store, rank: int, size: int, key: bytes = b"", *, place: str = "", address: str = "",
                  can_share: str = "", timeout: float = math.inf, name: str = "the group", members: Sequence[int] = (),
                  patience: float = math.inf) -> tuple[LaunchInfo, str, str]:
    """Return the launch information of one rank of a world, what they share, and an id of the world; all of them call this.

    Args:
        store: of this world alone, the same for all ranks.
        key: the job's, if this process has one.
        place: tells ranks apart that are on different hosts although they share a machine.
        address: an IP address of this host for the others, if it is known.
        can_share: what this rank can have in common with the others; they share it if all say the same, else "".
        timeout: seconds that rank 0 has for its answer.
        name: of the world, for messages.
        members: for messages: the ranks of a larger world that are this one's, in its order.
        patience: seconds after which it is logged which ranks have not come.

    Raises:
        LaunchError: on all ranks, when they do not fit together; on one when rank 0 does not answer, or when a wait takes
            longer than the store's timeout.
    """
    own = _Member(size, f"{host_identity()}:{place}", address or socket.gethostname(), tempfile.gettempdir(), bool(key),
                  can_share, secrets.randbits(63))
    others, held = _Others(store, name, rank, members or range(size), patience), None
    try:
        store.set(_key(rank), msgspec.msgpack.encode(own))
        if rank == 0:
            found = _members(others, size)
            answer, held = _answer(found, address)
            answer.numbers = tuple(member.number for member in found)
            store.set("hvdlite/world", msgspec.msgpack.encode(answer))
        else:
            answer = _awaited_answer(others, rank, own.number, timeout)
    except HvdliteError:
        raise
    except RuntimeError as error:  # the store's
        raise LaunchError(others.in_vain(error)) from error
    _forget(store, _key(rank))
    if answer.problem:
        raise LaunchError(answer.problem)
    world = Hosts.of(answer.hosts).world(rank)
    return LaunchInfo("store", world, answer.directories[rank], answer.coordinator, key or answer.key, owns_directory=True,
                      held_port=held), answer.shares, f"{answer.numbers[0]:x}"


def _key(rank: int) -> str:
    """Return the key under which a rank says what it is."""
    return f"hvdlite/{rank}"


class _Others:
    """What the other ranks say in the store. While it waits long for them, it tells once who has not come.

    Args:
        patience: seconds from now that are not long.
    """

    def __init__(self, store: Any, name: str, rank: int, members: Sequence[int], patience: float) -> None:
        self._store, self._name, self._rank, self._members = store, name, rank, members
        self._patience, self._until = patience, time.monotonic() + patience
        self._is_to_tell = hasattr(store, "wait")

    def get(self, key: str) -> bytes:
        """Return the value of a key once it is there.

        Raises:
            RuntimeError: the store's, when its timeout is over.
        """
        seconds = max(LOOK_SECONDS, self._until - time.monotonic())
        if self._is_to_tell and seconds < self._store.timeout.total_seconds():
            try:
                self._store.wait([key], datetime.timedelta(seconds=seconds))
            except RuntimeError:
                self._is_to_tell = False
                self._tell()
        value: bytes = self._store.get(key)
        return value

    def in_vain(self, error: RuntimeError) -> str:
        """Return the text of the error of a wait that the store has ended."""
        missing = self._named(self._missing()) or "the others"
        return (f"{self._own()} has waited in vain for {missing}; all {len(self._members)} ranks must make the group, with "
                f"the same backend: {str(error).splitlines()[0]}")

    def _tell(self) -> None:
        missing = self._missing()
        if missing and set(range(1, self._rank)) <= set(missing):  # of the ranks that wait, the first one tells
            _log.warning("%s has waited %.0f s for %s to make the group", self._own(), self._patience, self._named(missing))

    def _own(self) -> str:
        return f"{self._name}: {self._named([self._rank])}"

    def _named(self, ranks: Sequence[int]) -> str:
        return named_ranks([self._members[rank] for rank in ranks]) if ranks else ""

    def _missing(self) -> list[int]:
        """Return the ranks that have not come; rank 0 only if no other is: in torch's `TCPStore` it waits for all."""
        try:
            absent = [rank for rank in range(len(self._members)) if not self._store.check([_key(rank)])]
        except (AttributeError, RuntimeError):  # the store cannot tell
            return []
        return [rank for rank in absent if rank] or absent


def _members(others: _Others, size: int) -> list[_Member]:
    """Return what the ranks say of themselves, in their order, up to the first one that says another size."""
    members: list[_Member] = []
    while len(members) < size and all(member.size == size for member in members[-1:]):
        members.append(msgspec.msgpack.decode(others.get(_key(len(members))), type=_Member))
    return members


def _awaited_answer(others: _Others, rank: int, number: int, timeout: float) -> _Answer:
    """Return rank 0's answer to what this rank has said."""
    until = time.monotonic() + timeout
    while True:
        answer = msgspec.msgpack.decode(others.get("hvdlite/world"), type=_Answer)
        if number in answer.numbers[rank:rank + 1]:
            return answer
        if time.monotonic() >= until:
            raise LaunchError(f"rank 0 of the group has not answered for {timeout:.0f} s: it has not joined the group, or "
                              "another group uses the same store (HVDLITE_START_TIMEOUT)")
        time.sleep(LOOK_SECONDS)


def _answer(members: list[_Member], address: str) -> tuple[_Answer, HeldPort | None]:
    sizes = sorted({member.size for member in members})
    if len(sizes) > 1:
        return _Answer(f"the ranks do not agree on their number: {sizes}"), None
    hosts = Hosts.of([member.host for member in members])
    directories = [""] * len(members)
    token = secrets.token_hex(8)
    for number, ranks in enumerate(hosts.ranks_by_host):
        for rank in ranks:
            directories[rank] = str(Path(members[ranks[0]].directory) / f"hvdlite-{os.geteuid()}-{token}-{number}")
    names, shared = tuple(member.host for member in members), {member.can_share for member in members}
    shares = shared.pop() if len(shared) == 1 else ""
    if len(hosts.ranks_by_host) == 1:
        return _Answer("", names, tuple(directories), shares=shares), None
    keyed = [rank for rank, member in enumerate(members) if member.has_key]
    if keyed and len(keyed) < len(members):
        lacking = next(rank for rank in range(len(members)) if rank not in keyed)
        return _Answer(f"rank {keyed[0]} has the job's key (HVDLITE_SECRET), and rank {lacking} has none: set it on all "
                       "ranks, or on none"), None
    held = HeldPort()
    where = address or route_address([member.name for member in members])
    key = b"" if keyed else secrets.token_bytes(KEY_BYTES)
    return _Answer("", names, tuple(directories), (where, held.port), key, shares), held


def own_address(environ: Mapping[str, str], store: Any) -> str:
    """Return the IP address of this host on the way to a host that all ranks reach, "" if none is known.

    That is torch's `MASTER_ADDR`, or where the store is.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    for host in (environ.get("MASTER_ADDR", ""), getattr(store, "host", "")):
        address = source_address(host) if host else ""
        if address and not is_loopback(address):
            return address
    return ""


def _forget(store: Any, key: str) -> None:
    """Remove a key, so that it is not taken for that of a later world in the same store."""
    with contextlib.suppress(Exception):  # some stores cannot, and it costs nothing to leave it
        store.delete_key(key)
