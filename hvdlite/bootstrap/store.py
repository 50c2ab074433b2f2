"""A world whose ranks find each other through a key-value store: that of `torch.distributed`, say.

Every rank says on which host it is. Rank 0 answers each of them: where the ranks of its host meet, and for several hosts
where rank 0 listens and a key. Who can read the store can join the world, as with torch's own backends; with
`HVDLITE_SECRET` on all ranks the key is that one, and does not go through the store.

A store may be used again by later worlds, as `torchrun` does. So a rank removes what it has said and what it was answered (a
store that cannot forget serves one world), and the answer's key is a random number that the rank has said.
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
from hvdlite.core.world import Hosts, World
from hvdlite.negotiation.agreement import named_ranks

_log = logging.getLogger("hvdlite")

KEY_BYTES: Final = 32
SHORTEST_SECONDS: Final = 0.01
"""The shortest wait of a store: 0 is for ever."""


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
    """What rank 0 says to a rank."""

    problem: str = ""
    world: World = World()
    directory: str = ""
    coordinator: tuple[str, int] | None = None
    key: bytes = b""
    shares: str = ""
    identity: int = 0


def meet_in_store(store: Store, rank: int, size: int, key: bytes = b"", *, place: str = "", address: str = "",
                  can_share: str = "", name: str = "the group", members: Sequence[int] = (),
                  patience: float = math.inf) -> tuple[LaunchInfo, str, str]:
    """Return the launch information of one rank of a world, what they share, and an id of the world; all of them call this.

    Args:
        store: of this world alone, the same for all ranks.
        key: the job's, if this process has one.
        place: tells ranks apart that are on different hosts although they share a machine.
        address: an IP address of this host for the others, if it is known.
        can_share: what this rank can have in common with the others; they share it if all say the same, else "".
        name: of the world, for messages.
        members: for messages: the ranks of a larger world that are this one's, in its order.
        patience: seconds after which it is logged which ranks have not come.

    Raises:
        LaunchError: on all ranks, when they do not fit together; on one when it waits longer than the store's timeout.
    """
    own = _Member(size, f"{host_identity()}:{place}", address or socket.gethostname(), tempfile.gettempdir(), bool(key),
                  can_share, secrets.randbits(63))
    others, held = _Others(store, name, rank, members or range(size), patience), None
    try:
        store.set(_key(rank), msgspec.msgpack.encode(own))
        if rank == 0:
            found = _members(others, size)
            (answer, *answers), held = _answers(found, address)
            for member, each in zip(found[1:], answers, strict=True):
                store.set(_answer_key(member.number), msgspec.msgpack.encode(each))
        else:
            answer = msgspec.msgpack.decode(others.get(_answer_key(own.number)), type=_Answer)
            _forget(store, _answer_key(own.number))
    except HvdliteError:
        raise
    except RuntimeError as error:  # the store's
        raise LaunchError(others.in_vain(error)) from error
    _forget(store, _key(rank))
    if answer.problem:
        raise LaunchError(answer.problem)
    return LaunchInfo("store", answer.world, answer.directory, answer.coordinator, key or answer.key, owns_directory=True,
                      held_port=held), answer.shares, f"{answer.identity:x}"


def _key(rank: int) -> str:
    """Return the key under which a rank says what it is."""
    return f"hvdlite/{rank}"


def _answer_key(number: int) -> str:
    """Return the key under which the rank that has said this number is answered."""
    return f"hvdlite/answer/{number:x}"


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
        seconds = max(SHORTEST_SECONDS, self._until - time.monotonic())
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


def _answers(members: list[_Member], address: str) -> tuple[list[_Answer], HeldPort | None]:
    """Return what rank 0 says to each rank, and the port at which it will listen."""
    sizes = sorted({member.size for member in members})
    if len(sizes) > 1:
        return [_Answer(f"the ranks do not agree on their number: {sizes}")] * len(members), None
    hosts = Hosts.of([member.host for member in members])
    token, shared = secrets.token_hex(8), {member.can_share for member in members}
    answer = _Answer(shares=shared.pop() if len(shared) == 1 else "", identity=members[0].number)
    held = None
    if len(hosts.ranks_by_host) > 1:
        keyed = [rank for rank, member in enumerate(members) if member.has_key]
        if keyed and len(keyed) < len(members):
            lacking = next(rank for rank in range(len(members)) if rank not in keyed)
            problem = (f"rank {keyed[0]} has the job's key (HVDLITE_SECRET), and rank {lacking} has none: set it on all "
                       "ranks, or on none")
            return [_Answer(problem)] * len(members), None
        held = HeldPort()
        answer.coordinator = address or route_address([member.name for member in members]), held.port
        answer.key = b"" if keyed else secrets.token_bytes(KEY_BYTES)
    answers = [answer] * len(members)
    for number, ranks in enumerate(hosts.ranks_by_host):
        directory = str(Path(members[ranks[0]].directory) / f"hvdlite-{os.geteuid()}-{token}-{number}")
        for rank in ranks:
            answers[rank] = msgspec.structs.replace(answer, world=hosts.world(rank), directory=directory)
    return answers, held


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
