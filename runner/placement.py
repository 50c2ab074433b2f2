"""Which rank runs where. Pure."""

from __future__ import annotations

import socket
from collections.abc import Iterable

from hvdlite.core.errors import LaunchError
from hvdlite.core.world import World


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Return (host, slots) pairs of `a:2,b:4`; a host without a number has one slot.

    Raises:
        LaunchError: for an empty list or a number of slots that is not positive.
    """
    hosts = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        host, _, slots = part.rpartition(":") if ":" in part else (part, "", "1")
        if not host or not slots.isdigit() or int(slots) == 0:
            raise LaunchError(f"{part!r} is not host:slots (such as localhost:4)")
        hosts.append((host, int(slots)))
    if not hosts:
        raise LaunchError("the list of hosts is empty")
    return hosts


def check_local(hosts: Iterable[tuple[str, int]]) -> int:
    """Return the slots of this host.

    Raises:
        LaunchError: for any other host: this version starts ranks on one host.
    """
    names = {"localhost", "127.0.0.1", "::1", socket.gethostname()}
    remote = [host for host, _ in hosts if host not in names]
    if remote:
        raise LaunchError(f"cannot start ranks on {', '.join(remote)}: several hosts are not implemented yet")
    return sum(slots for _, slots in hosts)


def local_worlds(size: int) -> list[World]:
    """Return the coordinates of `size` ranks on one host."""
    return [World(rank, size, rank, size) for rank in range(size)]


def cores_for(rank: int, size: int, cores: list[int]) -> list[int]:
    """Return the cores that `rank` is bound to: an equal share, or one core in turn when there are too few."""
    share = len(cores) // size
    return cores[rank * share:(rank + 1) * share] if share else [cores[rank % len(cores)]]
