"""A world whose ranks find each other through a key-value store, such as that of `torch.distributed`.

Every rank writes on which host it is. Rank 0 answers each of them with its place in the world, an id of the world, and for
several hosts where rank 0 listens.

Whoever can reach the store can write to it, so nothing in it decides who joins:

- With a job's key, all texts are signed with it (`store_texts.py`), and ranks on several hosts prove to each other that they
  know it.
- Without one, the ranks of a host meet at a Unix socket in a directory of their user, and check the peer's user id. The
  store brings a token from which the directory's name is derived, and no path. Ranks on several hosts are refused, unless
  `HVDLITE_ALLOW_INSECURE_STORE` is set on all of them: then rank 0 sends a key through the store.

A store may be used again by later worlds, as `torchrun` does. So a rank removes its request and the reply (a
store that cannot forget serves one world), and the answer's key is a random number in the rank's request.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final, Protocol

import msgspec

from hvdlite.bootstrap.environments import MAKE_A_KEY, LaunchInfo
from hvdlite.bootstrap.job_directory import agreed_prefix, host_identity, network_identity, temporary_directory
from hvdlite.bootstrap.rendezvous import is_loopback, route_address
from hvdlite.bootstrap.store_texts import SECRET_ON_ALL, Signer, Text, opened, sealed
from hvdlite.core.config import environment_name
from hvdlite.core.errors import HvdliteError, LaunchError
from hvdlite.core.sockets import HeldPort, routes_to
from hvdlite.core.texts import printable, shortened
from hvdlite.core.world import Hosts, World
from hvdlite.negotiation.agreement import named_ranks

_log = logging.getLogger("hvdlite")

KEY_BYTES: Final = 32
LAST_LOOK: Final = 0.9
"""The share of the store's timeout after which a rank has looked who is there: ranks that fail remove what they said."""
LATE_SECONDS: Final = 1.0
"""How long rank 0 waits for the others when it knows that there will be no world, so that all are told."""
OWN_SECONDS: Final = 2.0
"""After so long, a rank that waits looks whether the store still has what it has said."""
LATE_LOOKS: Final = 4096
"""For how many of them it looks at a time."""
SHORTEST_SECONDS: Final = 0.01
"""Between two such looks, and of a wait: not every store can look once."""
MOST_RANKS: Final = 1 << 20
"""No world has more: a larger number is noise."""
LONGEST_PROBLEM: Final = 900
"""Characters, about, of the reason that rank 0 answers, so that it fits into a text, whatever strangers have written."""
INSECURE: Final = environment_name("allow_insecure_store")


class KeyValues(Protocol):
    """A store in which ranks meet.

    Attributes:
        seconds: the longest wait for other ranks; math.inf for no limit.
        host: where the store is, "" if that is not known.
        where: distinguishes it from other stores of its host, on all ranks alike.
    """

    seconds: float
    host: str
    where: str

    def put(self, key: str, value: bytes) -> None:
        """Store bytes under a key."""

    def get(self, key: str, seconds: float) -> bytes | None:
        """Return them; None if they are not there after so many seconds. 0 looks once.

        Raises:
            RuntimeError: when the store fails, or cannot look once.
        """

    def forget(self, key: str) -> None:
        """Remove a key, so that it is not taken for that of a later world; never raise: it costs nothing to leave it."""


class _JoinRequest(msgspec.Struct, array_like=True):
    """A rank's request to join."""

    size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    host: str
    name: str
    directory: str  # for temporary files
    allows_insecure_store: bool
    can_share: str


class _JoinReply(msgspec.Struct, array_like=True):
    """Rank 0's reply to a rank."""

    problem: str = ""
    world: World = World()
    token: str = ""
    coordinator: tuple[str, int] | None = None
    key: bytes = b""
    shares: str = ""


def meet_in_store(store: KeyValues, rank: int, size: int, key: bytes = b"", *, place: str = "", address: str = "",
                  can_share: str = "", name: str = "the group", members: Sequence[int] = (), patience: float = math.inf,
                  allows_insecure_store: bool = False,
                  how_to_have_a_key: str = SECRET_ON_ALL) -> tuple[LaunchInfo, str]:
    """Return the launch information of one rank of a world, and what the ranks share; all of them call this.

    Args:
        store: of this world alone, the same for all ranks.
        key: the job's, if this process has one.
        place: distinguishes ranks that are on different hosts although they share a machine.
        address: an IP address of this host for the others, if it is known.
        can_share: what this rank can have in common with the others; they share it if it is the same for all, else "".
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
    own = _JoinRequest(size, host, address or socket.gethostname(), temporary_directory(), allows_insecure_store, can_share)
    text = sealed(_key(rank), rank, number, own, signer)
    others, held = _Others(store, rank, members or range(size), patience, signer, text), None
    try:
        store.put(_key(rank), text)
        if rank == 0:
            answer, held = _answer_all(store, _collected(others, size), size, address, signer)
        else:
            found = others.answer(number)
            store.forget(_answer_key(number))
            answer = _checked(found, own, rank, key)
    except HvdliteError:
        raise
    except RuntimeError as error:  # the store's
        raise LaunchError(others.in_vain(error)) from error
    finally:
        store.forget(_key(rank))
    if answer.problem:  # it may be about what anybody has written
        raise LaunchError(printable(answer.problem))
    directory = agreed_prefix("store", answer.token, host, name, store.where)
    return LaunchInfo("store", answer.world, directory, answer.coordinator, key or answer.key, owns_directory=True,
                      held_port=held, identity=answer.token), answer.shares


def _checked(answer: Text[_JoinReply], own: _JoinRequest, rank: int, key: bytes) -> _JoinReply:
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
        own: this rank's request.
    """

    def __init__(self, store: KeyValues, rank: int, members: Sequence[int], patience: float, signer: Signer,
                 own: bytes) -> None:
        self._store = store
        self._rank = rank
        self._members = members
        self._patience = patience
        self._signer = signer
        self._own_text, start, last_look = own, time.monotonic(), LAST_LOOK * store.seconds
        self._deadline, self._look_at = start + store.seconds, start + min(patience, last_look)
        self._reports_absent = patience <= last_look
        self._absent: Sequence[int] = range(len(members))

    def member(self, rank: int) -> Text[_JoinRequest]:
        """Return what a rank says of itself, once it does; see `_get`."""
        return self._member(rank, self._get(_key(rank)))

    def answer(self, number: int) -> Text[_JoinReply]:
        """Return what rank 0 answers to this rank, which has said this number, once it does; see `_get`."""
        where = _answer_key(number)
        return opened(self._get(where), where, 0, self._rank, self._signer, _JoinReply)

    def come(self, ranks: Iterable[int]) -> dict[int, Text[_JoinRequest]]:
        """Return what those of these ranks that have come say of themselves; nothing if the store cannot look."""
        try:
            found = {rank: self._store.get(_key(rank), 0.0) for rank in ranks}
        except RuntimeError:
            return {}
        return {rank: self._member(rank, text) for rank, text in found.items() if text is not None}

    def in_vain(self, error: RuntimeError) -> str:
        """Return the text of the error of a wait that is over, or has failed."""
        self._look()
        return (f"{self._own()} has waited in vain for {self._missing() or 'the others'}; all {len(self._members)} ranks "
                f"must make the group, with the same backend: {str(error).splitlines()[0]}")

    def _get(self, key: str) -> bytes:
        """Return the value of a key once it is there.

        Raises:
            RuntimeError: when the store's timeout is over, which counts from the start, not for each key; or the store's.
        """
        while True:
            now = time.monotonic()
            if now >= self._look_at:
                self._look_at = math.inf
                self._look()
                self._report_absent()
            until = min(now + OWN_SECONDS, self._look_at, self._deadline)
            text = self._store.get(key, max(SHORTEST_SECONDS, until - now))
            if text is not None:
                return text
            self._check_own()
            if min(time.monotonic(), self._look_at) >= self._deadline:  # it has looked, and reported
                raise RuntimeError(f"wait timeout after {self._store.seconds:g} s")

    def _member(self, rank: int, text: bytes) -> Text[_JoinRequest]:
        return opened(text, _key(rank), rank, self._rank, self._signer, _JoinRequest)

    def _check_own(self) -> None:
        """Check that the store still has what this rank has said: without it, nobody answers.

        Raises:
            LaunchError: when another program has changed or removed it.
        """
        own = _key(self._rank)
        try:
            text = self._store.get(own, 0.0)
        except RuntimeError:  # it cannot look
            return
        if text != self._own_text:
            raise LaunchError(f"{self._own()} does not find in the store what it has written there ({own}): another program "
                              "writes to the store, too")

    def _look(self) -> None:
        """Find out who has not come. Who was there once is not absent: it may have failed, and removed what it has said."""
        try:
            self._absent = [rank for rank in self._absent if self._store.get(_key(rank), 0.0) is None]
        except RuntimeError:  # it cannot look
            self._absent = []

    def _report_absent(self) -> None:
        is_first = set(range(self._rank)) <= set(self._absent)  # of the ranks that wait, the first one reports
        if self._reports_absent and self._absent and is_first:
            _log.warning("%s has waited %.0f s for %s to make the group", self._own(), self._patience, self._missing())

    def _own(self) -> str:
        return f"{self._signer.group}: {named_ranks([self._members[self._rank]])}"

    def _missing(self) -> str:
        """Return who has not come; rank 0 only if no other is absent: in torch's `TCPStore` it waits for all."""
        ranks = [rank for rank in self._absent if rank] or self._absent
        return named_ranks([self._members[rank] for rank in ranks]) if ranks else ""


def _collected(others: _Others, size: int) -> list[Text[_JoinRequest]]:
    """Return what the ranks say of themselves, in their order; if they do not fit together, of those that have come."""
    found: dict[int, Text[_JoinRequest]] = {}
    while len(found) < size and not _misfit(found.values(), size):
        found[len(found)] = others.member(len(found))
    if _misfit(found.values(), size):
        until = time.monotonic() + LATE_SECONDS
        while time.monotonic() < until:
            absent = [rank for rank in range(max([size, *_sizes(found.values())])) if rank not in found]
            if not absent:
                break
            found |= others.come(absent[:LATE_LOOKS])
            time.sleep(SHORTEST_SECONDS)
    return [found[rank] for rank in sorted(found)]


def _sizes(texts: Iterable[Text[_JoinRequest]]) -> list[int]:
    return sorted({text.content.size for text in texts if text.content is not None})


def _misfit(texts: Iterable[Text[_JoinRequest]], size: int) -> str:
    """Return why ranks that say this cannot be a world; "" if they can."""
    texts = list(texts)
    sizes = sorted({size, *_sizes(texts)})
    if len(sizes) > 1:
        return f"the ranks do not agree on their number: {sizes}"
    return next((text.problem for text in texts if text.problem), "")


def _answer_all(store: KeyValues, texts: list[Text[_JoinRequest]], size: int, address: str,
                signer: Signer) -> tuple[_JoinReply, HeldPort | None]:
    """Answer the other ranks; return rank 0's own answer, and the port at which it will listen."""
    problem, held = _misfit(texts, size), None
    if problem:
        answers = _refusals(problem, len(texts))
    else:
        answers, held = _answers([text.content for text in texts if text.content is not None], address, signer.key)
    try:
        for text, answer in list(zip(texts, answers, strict=True))[1:]:
            if text.number is not None:
                where = _answer_key(text.number)
                store.put(where, sealed(where, 0, text.number, answer, signer))
    except BaseException:
        if held is not None:
            held.close()
        raise
    return answers[0], held


def _answers(members: list[_JoinRequest], address: str, key: bytes) -> tuple[list[_JoinReply], HeldPort | None]:
    """Return what rank 0 says to each rank, and the port at which it will listen."""
    hosts, held = Hosts.of([member.host for member in members]), None
    shared = {member.can_share for member in members}
    answer = _JoinReply(token=secrets.token_hex(KEY_BYTES // 2), shares=shared.pop() if len(shared) == 1 else "")
    problem = _different_directories(members, hosts)
    if not problem and len(hosts.ranks_by_host) > 1:
        strict = [rank for rank, member in enumerate(members) if not member.allows_insecure_store]
        if key or not strict:
            held = HeldPort()
            answer.coordinator = address or route_address(member.name for member in members), held.port
            answer.key = b"" if key else secrets.token_bytes(KEY_BYTES)
        else:
            problem = _without_key(strict[0])
    if problem:
        return _refusals(problem, len(members)), None
    return [msgspec.structs.replace(answer, world=hosts.world(rank)) for rank in range(len(members))], held


def _refusals(problem: str, count: int) -> list[_JoinReply]:
    return [_JoinReply(shortened(problem, LONGEST_PROBLEM))] * count


def _different_directories(members: list[_JoinRequest], hosts: Hosts) -> str:
    """Return which ranks of a host would not find each other."""
    for first, *others in hosts.ranks_by_host:
        for rank in others:
            if members[rank].directory != members[first].directory:
                return (f"ranks {first} and {rank} of one host have different directories for temporary files, "
                        f"{members[first].directory} and {members[rank].directory}: set TMPDIR to the same on both")
    return ""


def own_address(environ: Mapping[str, str], store: KeyValues) -> str:
    """Return the IP address of this host on the way to a host that all ranks reach, "" if none is known.

    That is torch's `MASTER_ADDR`, or where the store is.
    """
    routes: list[str] = []
    for host in filter(None, (environ.get("MASTER_ADDR", ""), store.host)):
        with contextlib.suppress(OSError):  # a name may have "::1" beside the address at which others reach it
            routes += routes_to([socket.gethostbyname(host)])
    return next((address for address in routes if not is_loopback(address)), "")
