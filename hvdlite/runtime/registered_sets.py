"""The process sets that this process has registered; in an elastic job they outlive a world."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from hvdlite.bootstrap.launch_info import lowest_rank
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID, ProcessSet
from hvdlite.core.world import World
from hvdlite.runtime.runtime import Runtime


class RegisteredSets:
    """The registered process sets, in the order of their registration, which is the same on all ranks.

    Elastic jobs (docs/protocol.md#elastic-process-sets): a set consists of members, not of ranks. In a new world it has
    those that are left, with their new ranks, and another id; it is unregistered when none is left. A member that joins gets
    the ranks of its sets from rank 0. A set that was registered inside the training function ends with the world, because
    the function is called again. Sets that have lost members may be equal to others; then they share an id.
    """

    def __init__(self) -> None:
        self._members: dict[ProcessSet, tuple[int, ...]] = {}  # empty for a communicator, and before a joiner has a world
        self._of_call: set[ProcessSet] = set()  # registered inside the training function
        self._awaiting: set[ProcessSet] = set()  # a world, in which rank 0 has their members
        self._world: tuple[int, ...] = ()  # the members of an elastic job's world, by rank; of world 1: ranks

    def add(self, made: ProcessSet, runtime: Runtime, *, in_call: bool) -> None:
        """Register a process set on all ranks.

        Args:
            in_call: whether the training function of an elastic job is being called.

        Raises:
            UnsupportedError, MismatchError: see `api.add_process_set`.
        """
        members: tuple[int, ...] = ()
        if made.mpi_comm is None:
            ranks = made.ranks or []
            equal = next((other for other in self._members if other.ranks == ranks), None) if self._world else None
            made.register(runtime.add_process_set(ranks).wait() if equal is None else equal.process_set_id,
                          runtime.world.rank)
            members = tuple(self._world[rank] if self._world else rank for rank in ranks)
        elif runtime.world.epoch:
            raise UnsupportedError("a process set of an elastic job is a list of ranks: a communicator ends with its first "
                                   "member")
        else:
            _register_split(made, runtime)
        self._members[made] = members
        if in_call:
            self._of_call.add(made)

    def add_later(self, made: ProcessSet, world: World) -> None:
        """Register a process set when this process, which joins an elastic job, is admitted; alone until then."""
        if made.mpi_comm is not None:
            raise UnsupportedError("a process set of an elastic job is a list of ranks, not a communicator")
        self._members[made] = ()
        self._awaiting.add(made)
        made.register(GLOBAL_PROCESS_SET_ID, world.rank)

    def remove(self, made: ProcessSet, runtime: Runtime | None) -> None:
        """Remove a process set on all ranks; without a runtime on this one."""
        shared = {other.process_set_id for other in self._members if other is not made} | {GLOBAL_PROCESS_SET_ID}
        if runtime is not None:
            for set_id in made.registered_ids:
                if set_id not in shared:
                    runtime.remove_process_set(set_id).wait()
        made.register(None, None)
        self._members.pop(made, None)
        self._of_call.discard(made)
        self._awaiting.discard(made)

    def clear(self) -> None:
        """Unregister all: the runtime has ended."""
        for made in self._members:
            made.register(None, None)
        self._members.clear()
        self._of_call.clear()
        self._awaiting.clear()

    def world_ended(self) -> None:
        """The world of an elastic job has ended: unregister the sets that the training function will register again."""
        for made in self._of_call:
            made.register(None, None)
            del self._members[made]
        self._of_call.clear()

    def world_began(self, runtime: Runtime, members: Sequence[int]) -> None:
        """Register all sets in the world of `runtime`.

        Args:
            members: of the world, by rank.

        Raises:
            UnsupportedError: when this process has not registered as many sets as rank 0.
        """
        self._world = tuple(members)
        everybodys = self._of_rank_0(runtime)
        if len(everybodys) != len(self._members):
            raise UnsupportedError(
                f"rank {runtime.world.rank} has registered {len(self._members)} process sets before elastic.run, rank 0 "
                f"{len(everybodys)}: all ranks register the same ones, in the same order")
        ids: dict[tuple[int, ...], int] = {tuple(range(runtime.world.size)): GLOBAL_PROCESS_SET_ID}
        for made, ranks in zip(self._members, everybodys, strict=True):
            if made in self._awaiting:
                self._members[made] = tuple(members[rank] for rank in ranks)
            made.ranks = ranks
            if not ranks:
                made.register(None, None)
                continue
            if tuple(ranks) not in ids:
                ids[tuple(ranks)] = runtime.add_process_set(ranks).wait()
            made.register(ids[tuple(ranks)], runtime.world.rank)
        self._awaiting.clear()

    def _of_rank_0(self, runtime: Runtime) -> list[list[int]]:
        """Return the ranks of each set as rank 0 has them."""
        own = b""
        if runtime.world.rank == 0:
            rank_of = {member: rank for rank, member in enumerate(self._world)}
            own = json.dumps([sorted(rank_of[member] for member in members if member in rank_of)
                              for members in self._members.values()]).encode()
        gathered = runtime.allgather("elastic.process_sets", np.frombuffer(own, dtype=np.uint8)).wait()
        return [list(ranks) for ranks in json.loads(gathered.tobytes())]


def _register_split(own: ProcessSet, runtime: Runtime) -> None:
    """Register the communicators that the ranks are in; each is known by its least rank."""
    rank = runtime.world.rank
    least = lowest_rank(own.mpi_comm, rank)
    everybodys = runtime.allgather(runtime.names.unnamed("process_set", "split"), np.array([least])).wait().tolist()
    parts = {each: [member for member, other in enumerate(everybodys) if other == each]
             for each in sorted(set(everybodys)) if each >= 0}
    ids = {each: runtime.add_process_set(members).wait() for each, members in parts.items()}
    own.ranks = parts.get(least, [])
    own.register(ids.get(least), rank, list(ids.values()))
