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
POLL_SECONDS: Final = 0.001, 0.5
"""The shortest and the longest pause between two looks into the store."""
POLL_SHARE: Final = 0.1
"""Between them, the pause is this share of the time that the rank has waited."""
LAST_LOOK: Final = 0.9
"""The share of the store's timeout after which a rank has looked who is there: ranks that fail remove what they said."""
LATE_SECONDS: Final = 1.0
"""How long rank 0 waits for the others when it knows that they do not agree on their number, so that all are told."""


class Store(Protocol):
    """The part of torch's `Store` that is used. `delete_key`, `wait`, `check` and `timeout` are used where they exist."""

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
            answer, held = _answer_all(store, _members(others, size), address)
        else:
            answer = msgspec.msgpack.decode(others.get(_answer_key(own.number)), type=_Answer)
            _forget(store, _answer_key(own.number))
    except HvdliteError:
        raise
    except RuntimeError as error:  # the store's
        raise LaunchError(others.in_vain(error)) from error
    finally:
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
        self._store, self._name, self._rank, self._members, self._patience = store, name, rank, members, patience
        start, timeout = time.monotonic(), getattr(store, "timeout", None)
        seconds = math.inf if timeout is None else timeout.total_seconds()
        self._deadline, self._look_at = start + seconds, start + min(patience, LAST_LOOK * seconds)
        self._is_to_tell = patience <= LAST_LOOK * seconds
        self._is_to_look = self._look_at < math.inf
        self._absent: Sequence[int] = range(len(members))

    def get(self, key: str) -> bytes:
        """Return the value of a key once it is there.

        Raises:
            RuntimeError: the store's, when its timeout is over; it counts from the start, not for each key.
        """
        if not self._is_soon_there(key):
            self._wait(key)
        value: bytes = self._store.get(key)
        return value

    def member(self, rank: int) -> _Member:
        """Return what a rank says of itself, once it does; see `get`."""
        return msgspec.msgpack.decode(self.get(_key(rank)), type=_Member)

    def has(self, key: str) -> bool:
        """Return whether a key is there; False if the store cannot tell."""
        try:
            return bool(self._store.check([key]))
        except (AttributeError, RuntimeError):
            return False

    def in_vain(self, error: RuntimeError) -> str:
        """Return the text of the error of a wait that the store has ended."""
        self._look()
        return (f"{self._own()} has waited in vain for {self._missing() or 'the others'}; all {len(self._members)} ranks "
                f"must make the group, with the same backend: {str(error).splitlines()[0]}")

    def _is_soon_there(self, key: str) -> bool:
        """Look for a key until it is time to tell who is absent. (torch's `TCPStore.wait` writes to stderr if in vain.)"""
        start = time.monotonic()
        try:
            while self._is_to_look:
                if self._store.check([key]):
                    return True
                now = time.monotonic()
                if now >= self._look_at:
                    self._is_to_look = False
                    self._look()
                    self._tell()
                else:
                    time.sleep(min(_pause(now - start), self._look_at - now))
        except (AttributeError, RuntimeError):  # the store cannot tell
            self._is_to_look = False
        return False

    def _wait(self, key: str) -> None:
        """Wait for a key, if the store can, for what is left of its timeout."""
        if not hasattr(self._store, "wait") or self._deadline == math.inf:
            return
        rest = max(SHORTEST_SECONDS, self._deadline - time.monotonic())
        try:
            self._store.wait([key], datetime.timedelta(seconds=rest))
        except RuntimeError:
            if time.monotonic() > self._deadline - SHORTEST_SECONDS:
                raise
            # else it cannot, as many a store that is written in Python

    def _look(self) -> None:
        """Find out who has not come. Who was there once is not absent: it may have failed, and removed what it has said."""
        try:
            self._absent = [rank for rank in self._absent if not self._store.check([_key(rank)])]
        except (AttributeError, RuntimeError):  # the store cannot tell
            self._absent = []

    def _tell(self) -> None:
        is_first = set(range(self._rank)) <= set(self._absent)  # of the ranks that wait, the first one tells
        if self._is_to_tell and self._absent and is_first:
            _log.warning("%s has waited %.0f s for %s to make the group", self._own(), self._patience, self._missing())

    def _own(self) -> str:
        return f"{self._name}: {named_ranks([self._members[self._rank]])}"

    def _missing(self) -> str:
        """Return who has not come; rank 0 only if no other is absent: in torch's `TCPStore` it waits for all."""
        ranks = [rank for rank in self._absent if rank] or self._absent
        return named_ranks([self._members[rank] for rank in ranks]) if ranks else ""


def _pause(waited: float) -> float:
    """Return the seconds until the next look into the store: who waits long looks rarely, and does not load it."""
    shortest, longest = POLL_SECONDS
    return min(max(shortest, POLL_SHARE * waited), longest)


def _members(others: _Others, size: int) -> list[_Member]:
    """Return what the ranks say of themselves, in their order; if they say several sizes, without those that do not come."""
    found: dict[int, _Member] = {}
    while len(found) < size and all(member.size == size for member in found.values()):
        found[len(found)] = others.member(len(found))
    start = time.monotonic()
    while len(found) < (largest := max(member.size for member in found.values())):
        found |= {rank: others.member(rank) for rank in range(largest) if rank not in found and others.has(_key(rank))}
        waited = time.monotonic() - start
        if waited > LATE_SECONDS:
            break
        time.sleep(_pause(waited))
    return list(found.values())


def _answer_all(store: Store, members: list[_Member], address: str) -> tuple[_Answer, HeldPort | None]:
    """Answer the other ranks; return rank 0's own answer, and the port at which it will listen."""
    (own, *answers), held = _answers(members, address)
    try:
        for member, answer in zip(members[1:], answers, strict=True):
            store.set(_answer_key(member.number), msgspec.msgpack.encode(answer))
    except BaseException:
        if held is not None:
            held.close()
        raise
    return own, held


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
        address = address or route_address([member.name for member in members])
        held = HeldPort()
        answer.coordinator = address, held.port
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
