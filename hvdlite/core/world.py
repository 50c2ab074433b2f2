"""The coordinates of a rank, and the ranks of each host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvdlite.core.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class World:
    """A rank's coordinates, fixed for one membership epoch.

    `local_*` refer to the ranks of one host; `cross_*` to the hosts that have a rank with this local rank.

    Attributes:
        epoch: in an elastic job, the number of this world: 1, 2, 3, ...; 0 in other jobs.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    epoch: int = 0

    def __post_init__(self) -> None:
        for part in ("", "local_", "cross_"):
            rank, size = getattr(self, f"{part}rank"), getattr(self, f"{part}size")
            if not 0 <= rank < size:
                raise LaunchError(f"{part}rank {rank} is not in 0..{size - 1} ({part}size is {size})")
        if self.local_size > self.size:
            raise LaunchError(f"local_size {self.local_size} exceeds size {self.size}")


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The ranks of each host.

    Attributes:
        ranks_by_host: the ranks of each host, ascending; hosts in the order of their first ranks.
    """

    ranks_by_host: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Hosts:
        """Return the hosts of ranks 0, 1, ..., given an identifier of each rank's host."""
        groups: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            groups.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, groups.values())))

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """Return all ranks on the host of a rank."""
        return next(group for group in self.ranks_by_host if rank in group)

    def restrict_to(self, ranks: Sequence[int]) -> Hosts:
        """Return the hosts that have a rank of a process set, with only these ranks."""
        members = set(ranks)
        return Hosts(tuple(kept for group in self.ranks_by_host
                           if (kept := tuple(rank for rank in group if rank in members))))

    def world(self, rank: int, epoch: int = 0) -> World:
        """Return a rank's coordinates."""
        local_ranks = self.local_ranks(rank)
        local_rank = local_ranks.index(rank)
        peers = [group[local_rank] for group in self.ranks_by_host if len(group) > local_rank]
        return World(rank, sum(map(len, self.ranks_by_host)), local_rank, len(local_ranks), peers.index(rank), len(peers),
                     epoch)

    @property
    def is_homogeneous(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len(set(map(len, self.ranks_by_host))) == 1
