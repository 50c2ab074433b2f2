"""A rank's numbers (rank, size, local and cross ranks), and the ranks of each host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvdlite.core.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class World:
    """A rank's coordinates, fixed for one membership epoch.

    `local_*` count the ranks of one host; `cross_*` count the hosts that have a rank with this local rank.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1

    def __post_init__(self) -> None:
        for part in ("", "local_", "cross_"):
            rank, size = getattr(self, f"{part}rank"), getattr(self, f"{part}size")
            if not 0 <= rank < size:
                raise LaunchError(f"{part}rank {rank} is not in 0..{size - 1} ({part}size is {size})")
        if self.local_size > self.size:
            raise LaunchError(f"local_size {self.local_size} exceeds size {self.size}")


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Which ranks share a host.

    Attributes:
        groups: the ranks of each host, ascending; hosts in the order of their first ranks.
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Hosts:
        """Return the hosts of ranks 0, 1, ..., given by what their processes share."""
        groups: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            groups.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, groups.values())))

    def around(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of a rank's host."""
        return next(group for group in self.groups if rank in group)

    def within(self, ranks: Sequence[int]) -> Hosts:
        """Return the hosts of a process set, with its ranks only."""
        members = set(ranks)
        return Hosts(tuple(kept for group in self.groups if (kept := tuple(rank for rank in group if rank in members))))

    def world(self, rank: int) -> World:
        """Return a rank's coordinates."""
        here = self.around(rank)
        local_rank = here.index(rank)
        peers = [group[local_rank] for group in self.groups if len(group) > local_rank]
        return World(rank, sum(map(len, self.groups)), local_rank, len(here), peers.index(rank), len(peers))

    @property
    def is_homogeneous(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len(set(map(len, self.groups))) == 1
