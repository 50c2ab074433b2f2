"""Where a rank stands among the others."""

from __future__ import annotations

import dataclasses

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
