"""The ranks of a group, as one of them sees them."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence

from hvdlite.core.errors import ForkedProcessError
from hvdlite.core.world import Hosts


@dataclasses.dataclass(frozen=True)
class GroupMembers:
    """Ranks are indices in the group, but for those of the runtime on which it lives.

    Attributes:
        name: the group's; the same on all its ranks, and for messages.
        rank: this one.
        of_runtime: the rank in the runtime of each.
        hosts: which ranks share a host.
        names: of each rank, for messages.
    """

    name: str
    rank: int
    of_runtime: tuple[int, ...]
    hosts: Hosts
    names: tuple[str, ...]

    @classmethod
    def of(cls, name: str, ranks: Sequence[int], own: int, hosts: Hosts, names: Sequence[str] = ()) -> GroupMembers:
        """Return the members of a group.

        Args:
            ranks: of the runtime: those of the group, in its order.
            own: this rank of the runtime.
            hosts: of the runtime.
            names: by default the ranks' numbers in the runtime.
        """
        host_of = {rank: str(host) for host, local in enumerate(hosts.ranks_by_host) for rank in local}
        return cls(name, list(ranks).index(own), tuple(ranks), Hosts.of([host_of[rank] for rank in ranks]),
                   tuple(names) or tuple(map(str, ranks)))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.of_runtime)

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return self.hosts.local_ranks(self.rank)

    @functools.cached_property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def check_other(self, verb: str, rank: int) -> None:
        """Raise ValueError unless `rank` is another rank of the group."""
        if rank == self.rank or not 0 <= rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.name} cannot {verb} rank {rank}: the group has ranks 0 to "
                             f"{self.size - 1}, and a rank exchanges messages with other ranks only")

    def forked_error(self, process: int) -> ForkedProcessError:
        """Return the error of a call in a forked child of a process."""
        return ForkedProcessError(f"{self.name}: this process (pid {os.getpid()}) was forked from rank {self.rank} (pid "
                                  f"{process}), to which the group belongs; start workers with the spawn method")

    def named(self, ranks: Sequence[int]) -> str:
        """Return a text that names ranks: "rank 3", "ranks 1, 2"."""
        found = [self.names[rank] for rank in ranks]
        return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
