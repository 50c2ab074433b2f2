"""The placement of ranks on hosts. Pure, except `is_local`, which calls the resolver."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Callable, Iterable, Sequence

from hvdlite.core.errors import LaunchError

LOCAL = "localhost"
"""The name of the launcher's own host."""
LOCAL_NAMES = frozenset({LOCAL, "127.0.0.1", "::1"})
MOST_SLOTS = 1 << 20
"""Slots of a host, and ranks of a job, that are accepted: more are a mistake."""
_DIGITS = 20


@dataclasses.dataclass(frozen=True)
class Host:
    """A machine and its number of slots for ranks."""

    name: str  # as for ssh: user@name is possible, and an IPv6 address has no brackets
    slots: int = 1

    @property
    def address(self) -> str:
        """The name or address without a user."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of `a:2,user@b:4,[fd00::2]:1`; the default is one slot, and a repeated host has the sum.

    Raises:
        LaunchError: for an empty list or a number of slots that is not positive.
    """
    hosts = merged(_host(part) for part in filter(None, (piece.strip() for piece in text.split(","))))
    if not hosts:
        raise LaunchError("the list of hosts is empty")
    return hosts


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Return the hosts of a file: a line each, `name slots=2` (Open MPI, Horovod), `name:2` (MPICH) or `name`; # comments.

    Raises:
        LaunchError: with the line that has another form.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        unknown = [word for word in words[1:] if not word.startswith(("slots=", "max_slots=", "max-slots="))]
        try:
            if unknown:
                raise LaunchError(f"{unknown[0]!r} is not slots=N")
            bare = words[0].count(":") > 1 and not words[0].startswith("[")  # an IPv6 address
            hosts.append(_host(f"[{words[0].strip('[]')}]:{slots[0] if slots else 1}" if slots or bare else words[0]))
        except LaunchError as error:
            raise LaunchError(f"{path}, line {number}: {error}") from None
    if not hosts:
        raise LaunchError(f"{path} names no host")
    return merged(hosts)


def merged(hosts: Iterable[Host]) -> list[Host]:
    """Return each host once, with all its slots, in the order of first mention."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def _host(text: str) -> Host:
    name, slots = parse_host(text)
    if slots == 0:
        raise LaunchError(f"{text!r} has no slots")
    return Host(name, 1 if slots is None else slots)


def parse_host(text: str) -> tuple[str, int | None]:
    """Return the name of a host and its slots, None if `text` has none.

    Raises:
        LaunchError: for another form.
    """
    match = re.fullmatch(r"(?P<user>[\w.-]+@)?(?:\[(?P<quoted>[^][\s]+)\]|(?P<name>[^][:\s@]+))"
                         r"(?::(?P<slots>[0-9]+))?", text)
    if match is None:
        raise LaunchError(f"{text!r} is not host:slots (such as localhost:4, or [fd00::2]:4 for an IPv6 address)")
    name = (match["user"] or "") + (match["quoted"] or match["name"])
    if name.startswith("-"):
        raise LaunchError(f"{text!r} is not the name of a host")
    digits = match["slots"]
    if digits is not None and (len(digits) > _DIGITS or int(digits) > MOST_SLOTS):
        shown = digits if len(digits) <= _DIGITS else f"{digits[:_DIGITS]}..."
        raise LaunchError(f"{name} cannot have {shown} slots; at most {MOST_SLOTS:,}")
    return name, None if digits is None else int(digits)


def assign_slots(size: int | None, hosts: Sequence[Host]) -> dict[str, int]:
    """Fill the hosts' slots in order; return the slots of each host that are filled, without hosts that have none.

    Args:
        size: the number of ranks; None for one on each slot.

    Raises:
        LaunchError: when there are fewer slots than ranks.
    """
    count = sum(host.slots for host in hosts)
    if size is not None and size > count:
        offered = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(f"-np {size} is more than the {count} slots of {offered}")
    if (size or count) > MOST_SLOTS:
        raise LaunchError(f"the hosts have {count:,} slots, and a job at most {MOST_SLOTS:,} ranks: pass -np N")
    left, filled = size or count, {}
    for host in hosts:
        taken = min(left, host.slots)
        left -= taken
        if taken:
            filled[host.name] = taken
    return filled


def rename_local_hosts(hosts: Sequence[Host], local: Callable[[str], bool]) -> list[Host]:
    """Return the hosts with every name of this machine replaced by `LOCAL`, so that its ranks share a host."""
    return merged(Host(LOCAL, host.slots) if local(host.name) else host for host in hosts)


def is_local(name: str) -> bool:
    """Return whether a name or address is this machine's: whether a socket can listen there."""
    if "@" in name:
        return False  # another user's processes need a remote shell
    if name in LOCAL_NAMES or name == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # the remote shell may know the name, and reports an error otherwise
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def cores_for(rank: int, size: int, cores: list[int]) -> list[int]:
    """Return the cores that `rank` is bound to: an equal share, or one core in turn when there are too few."""
    share = len(cores) // size
    return cores[rank * share:(rank + 1) * share] if share else [cores[rank % len(cores)]]


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: 0-3,5."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
