"""A world whose ranks find each other through a key-value store: that of `torch.distributed`, say.

Every rank says on which host it is. Rank 0 answers each of them with its place in the world, an id of the world, and for
several hosts where rank 0 listens.

Whoever can reach the store can write to it, so nothing in it decides who joins:

- With a job's key, all texts are signed with it (`store_texts.py`), and ranks on several hosts prove to each other that they
  know it.
- Without one, the ranks of a host meet at a Unix socket in a directory of their user, and check the peer's user id. The
  store brings a token from which the directory's name is derived, and no path. Ranks on several hosts are refused, unless
  `HVDLITE_ALLOW_INSECURE_STORE` is set on all of them: then rank 0 sends a key through the store.

A store may be used again by later worlds, as `torchrun` does. So a rank removes what it has said and what it was answered (a
store that cannot forget serves one world), and the answer's key is a random number that the rank has said.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol

import msgspec

from hvdlite.bootstrap.environments import MAKE_A_KEY, LaunchInfo
from hvdlite.bootstrap.job_directory import agreed_prefix, host_identity, network_identity, temporary_directory
from hvdlite.bootstrap.mpi import route_address, source_address
from hvdlite.bootstrap.rendezvous import is_loopback
from hvdlite.bootstrap.store_texts import SECRET_ON_ALL, Signer, Text, opened, sealed
from hvdlite.core.config import environment_name
from hvdlite.core.errors import HvdliteError, LaunchError
from hvdlite.core.held_port import HeldPort
from hvdlite.core.texts import printable, shortened
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
"""How long rank 0 waits for the others when it knows that there will be no world, so that all are told."""
OWN_SECONDS: Final = 2.0
"""After so long, a rank that waits looks whether the store still has what it has said."""
LATE_LOOKS: Final = 4096
"""For how many of them it looks at a time."""
MOST_RANKS: Final = 1 << 20
"""No world has more: a larger number is noise."""
LONGEST_PROBLEM: Final = 2000
"""Characters of rank 0's reason that are shown: without a key, anybody may have written it."""
INSECURE: Final = environment_name("allow_insecure_store")


class Store(Protocol):
    """The part of torch's `Store` that is used. `delete_key`, `wait`, `check` and `timeout` are used where they exist."""

    def set(self, key: str, value: Any, /) -> object:
        """Store bytes under a key."""

    def get(self, key: str, /) -> bytes:
        """Return them, once they are there."""


class _Member(msgspec.Struct, array_like=True):
    """What a rank says of itself."""

    size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    host: str
    name: str
    directory: str  # for temporary files
    allows_insecure_store: bool
    can_share: str


class _Answer(msgspec.Struct, array_like=True):
    """What rank 0 says to a rank."""

    problem: str = ""
    world: World = World()
    token: str = ""
    coordinator: tuple[str, int] | None = None
    key: bytes = b""
    shares: str = ""


def meet_in_store(store: Store, rank: int, size: int, key: bytes = b"", *, place: str = "", address: str = "",
                  can_share: str = "", name: str = "the group", members: Sequence[int] = (), patience: float = math.inf,
                  allows_insecure_store: bool = False,
                  how_to_have_a_key: str = SECRET_ON_ALL) -> tuple[LaunchInfo, str]:
    """Return the launch information of one rank of a world, and what the ranks share; all of them call this.

    Args:
        store: of this world alone, the same for all ranks.
        key: the job's, if this process has one.
        place: tells ranks apart that are on different hosts although they share a machine.
        address: an IP address of this host for the others, if it is known.
        can_share: what this rank can have in common with the others; they share it if all say the same, else "".
        name: of the world, for messages.
        members: for messages: the ranks of a larger world that are this one's, in its order.
        patience: seconds after which it is logged which ranks have not come.
        allows_insecure_store: whether ranks on several hosts without a key get one through the store.
        how_to_have_a_key: the end of an error's text, if this process has none.

    Raises:
        LaunchError: on all ranks, when they do not fit together; on one when it waits longer than the store's timeout,
            finds an answer that is not rank 0's, or has no directory for temporary files.
    """
    host, number = f"{host_identity()}:{network_identity()}:{place}", secrets.randbits(63)
    signer = Signer(key, name, how_to_have_a_key)
    own = _Member(size, host, address or socket.gethostname(), temporary_directory(), allows_insecure_store, can_share)
    text = sealed(_key(rank), rank, number, own, signer)
    others, held = _Others(store, rank, members or range(size), patience, signer, text), None
    try:
        store.set(_key(rank), text)
        if rank == 0:
            answer, held = _answer_all(store, _collected(others, size), size, address, signer)
        else:
            found = others.answer(number)
            _forget(store, _answer_key(number))
            answer = _checked(found, own, rank, key)
    except HvdliteError:
        raise
    except RuntimeError as error:  # the store's
        raise LaunchError(others.in_vain(error)) from error
    finally:
        _forget(store, _key(rank))
    if answer.problem:  # it may be about what anybody has written
        raise LaunchError(printable(shortened(answer.problem, LONGEST_PROBLEM)))
    directory = agreed_prefix("store", answer.token, host, name, _where(store))
    return LaunchInfo("store", answer.world, directory, answer.coordinator, key or answer.key, owns_directory=True,
                      held_port=held, identity=answer.token), answer.shares


def _checked(answer: Text[_Answer], own: _Member, rank: int, key: bytes) -> _Answer:
    """Return an answer that this rank can follow, whoever has written it.

    Raises:
        LaunchError: when there is none.
    """
    content = answer.content
    if content is None:
        raise LaunchError(answer.problem)
    if content.problem:
        return content
    world, is_on_several_hosts = content.world, content.world.local_size < content.world.size
    if ((world.rank, world.size, world.epoch) != (rank, own.size, 0) or content.shares not in ("", own.can_share)
            or is_on_several_hosts != (content.coordinator is not None) or (content.key and not is_on_several_hosts)):
        raise LaunchError(f"rank {rank} has found the answer to another rank, or an invalid one, in the store, as rank "
                          f"{world.rank} of {world.size}: another program writes to the store")
    if content.coordinator is not None and not key and not own.allows_insecure_store:
        raise LaunchError(_without_key(rank))
    return content


def _without_key(rank: int) -> str:
    return (f"rank {rank} has no key, and the group has ranks on several hosts: whoever can connect to the store could "
            f"become one of them. Set HVDLITE_SECRET (or HVDLITE_SECRET_FILE) to the same value on all ranks "
            f"({MAKE_A_KEY}); or, if you trust everybody who can connect to the store, {INSECURE}=1 on all ranks")


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
        own: what this rank says of itself.
    """

    def __init__(self, store: Any, rank: int, members: Sequence[int], patience: float, signer: Signer, own: bytes) -> None:
        self._store, self._rank, self._members, self._patience, self._signer = store, rank, members, patience, signer
        self._own_text = own
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

    def member(self, rank: int) -> Text[_Member]:
        """Return what a rank says of itself, once it does; see `get`."""
        return opened(self.get(_key(rank)), _key(rank), rank, self._rank, self._signer, _Member)

    def answer(self, number: int) -> Text[_Answer]:
        """Return what rank 0 answers to this rank, which has said this number, once it does; see `get`."""
        where = _answer_key(number)
        return opened(self.get(where), where, 0, self._rank, self._signer, _Answer)

    def has_come(self, rank: int) -> bool:
        """Return whether a rank has said what it is; False if the store cannot tell."""
        try:
            return bool(self._store.check([_key(rank)]))
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
                if now - start >= OWN_SECONDS:
                    self._check_own()
                if now >= self._look_at:
                    self._is_to_look = False
                    self._look()
                    self._tell()
                else:
                    time.sleep(min(_pause(now - start), self._look_at - now))
        except HvdliteError:
            raise
        except (AttributeError, RuntimeError):  # the store cannot tell
            self._is_to_look = False
        return False

    def _check_own(self) -> None:
        """Check that the store still has what this rank has said: without it, nobody answers.

        Raises:
            LaunchError: when another program has changed or removed it.
        """
        own = _key(self._rank)
        if not self._store.check([own]) or self._store.get(own) != self._own_text:
            raise LaunchError(f"{self._own()} does not find in the store what it has written there ({own}): another program "
                              "writes to the store, too")

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
        return f"{self._signer.group}: {named_ranks([self._members[self._rank]])}"

    def _missing(self) -> str:
        """Return who has not come; rank 0 only if no other is absent: in torch's `TCPStore` it waits for all."""
        ranks = [rank for rank in self._absent if rank] or self._absent
        return named_ranks([self._members[rank] for rank in ranks]) if ranks else ""


def _pause(waited: float) -> float:
    """Return the seconds until the next look into the store: who waits long looks rarely, and does not load it."""
    shortest, longest = POLL_SECONDS
    return min(max(shortest, POLL_SHARE * waited), longest)


def _collected(others: _Others, size: int) -> list[Text[_Member]]:
    """Return what the ranks say of themselves, in their order; if they do not fit together, of those that have come."""
    found: dict[int, Text[_Member]] = {}
    while len(found) < size and not _misfit(found.values(), size):
        found[len(found)] = others.member(len(found))
    if _misfit(found.values(), size):
        start = time.monotonic()
        while (waited := time.monotonic() - start) < LATE_SECONDS:
            absent = [rank for rank in range(max([size, *_sizes(found.values())])) if rank not in found]
            for rank in absent[:LATE_LOOKS]:
                if others.has_come(rank):
                    found[rank] = others.member(rank)
            if not absent:
                break
            time.sleep(_pause(waited))
    return [found[rank] for rank in sorted(found)]


def _sizes(texts: Iterable[Text[_Member]]) -> list[int]:
    return sorted({text.content.size for text in texts if text.content is not None})


def _misfit(texts: Iterable[Text[_Member]], size: int) -> str:
    """Return why ranks that say this cannot be a world; "" if they can."""
    texts = list(texts)
    sizes = sorted({size, *_sizes(texts)})
    if len(sizes) > 1:
        return f"the ranks do not agree on their number: {sizes}"
    return next((text.problem for text in texts if text.problem), "")


def _answer_all(store: Store, texts: list[Text[_Member]], size: int, address: str,
                signer: Signer) -> tuple[_Answer, HeldPort | None]:
    """Answer the other ranks; return rank 0's own answer, and the port at which it will listen."""
    problem, held = _misfit(texts, size), None
    answers = [_Answer(problem)] * len(texts)
    if not problem:
        answers, held = _answers([text.content for text in texts if text.content is not None], address, signer.key)
    try:
        for text, answer in list(zip(texts, answers, strict=True))[1:]:
            if text.number is not None:
                where = _answer_key(text.number)
                store.set(where, sealed(where, 0, text.number, answer, signer))
    except BaseException:
        if held is not None:
            held.close()
        raise
    return answers[0], held


def _answers(members: list[_Member], address: str, key: bytes) -> tuple[list[_Answer], HeldPort | None]:
    """Return what rank 0 says to each rank, and the port at which it will listen."""
    hosts, held = Hosts.of([member.host for member in members]), None
    shared = {member.can_share for member in members}
    answer = _Answer(token=secrets.token_hex(KEY_BYTES // 2), shares=shared.pop() if len(shared) == 1 else "")
    problem = _different_directories(members, hosts)
    if not problem and len(hosts.ranks_by_host) > 1:
        strict = [rank for rank, member in enumerate(members) if not member.allows_insecure_store]
        if key or not strict:
            held = HeldPort()
            answer.coordinator = address or route_address([member.name for member in members]), held.port
            answer.key = b"" if key else secrets.token_bytes(KEY_BYTES)
        else:
            problem = _without_key(strict[0])
    if problem:
        return [_Answer(problem)] * len(members), None
    return [msgspec.structs.replace(answer, world=hosts.world(rank)) for rank in range(len(members))], held


def _different_directories(members: list[_Member], hosts: Hosts) -> str:
    """Return which ranks of a host would not find each other."""
    for first, *others in hosts.ranks_by_host:
        for rank in others:
            if members[rank].directory != members[first].directory:
                return (f"ranks {first} and {rank} of one host have different directories for temporary files, "
                        f"{members[first].directory} and {members[rank].directory}: set TMPDIR to the same on both")
    return ""


def own_address(environ: Mapping[str, str], store: Any) -> str:
    """Return the IP address of this host on the way to a host that all ranks reach, "" if none is known.

    That is torch's `MASTER_ADDR`, or where the store is.
    """
    for host in (environ.get("MASTER_ADDR", ""), getattr(_underlying(store), "host", "")):
        address = source_address(host) if host else ""
        if address and not is_loopback(address):
            return address
    return ""


def _where(store: Any) -> str:
    """Return what tells a store from others of this host, as each rank knows it itself: a port or a file."""
    found = _underlying(store)
    return f"{getattr(found, 'port', '')} {getattr(found, 'path', '')}"


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _forget(store: Any, key: str) -> None:
    """Remove a key, so that it is not taken for that of a later world in the same store."""
    with contextlib.suppress(Exception):  # some stores cannot, and it costs nothing to leave it
        store.delete_key(key)
