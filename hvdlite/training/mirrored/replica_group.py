"""The replicas of one strategy: this rank's id among them, and the objects and flags that they exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training import objects


class ReplicaGroup:
    """This rank's place among the replicas, and their collectives, which do nothing where there is one replica.

    Calls are matched by strategy, kind and order, so strategies on several threads do not disturb each other.

    Args:
        process_set: id of the ranks that have replicas; a rank outside is alone.
        kind: the first part of the label.

    Attributes:
        replica_id: from 0 to `size` - 1, in rank order.
        root: the rank of replica 0.
        label: the name of the strategy, or of another use, in this job.
    """

    def __init__(self, runtime: Runtime, process_set: int, kind: str = "mirrored") -> None:
        members = runtime.members(process_set)
        if runtime.world.rank not in members:
            members = (runtime.world.rank,)
        self.runtime = runtime
        self.process_set = process_set
        self.replica_id = members.index(runtime.world.rank)
        self.size = len(members)
        self.root = members[0]
        self.label = runtime.names.label(kind, process_set)

    def name(self, kind: str) -> str:
        """Return the next name for one kind of call."""
        return self.runtime.names.unnamed(self.label, kind, self.process_set)

    def broadcast_object(self, value: Any, kind: str) -> Any:
        """Return replica 0's picklable object."""
        if self.size == 1:
            return value
        return objects.broadcast_object(self.runtime, value, self.root, self.name(kind), self.process_set)

    def allgather_object(self, value: Any, kind: str) -> list[Any]:
        """Return every replica's picklable object."""
        if self.size == 1:
            return [value]
        return objects.allgather_object(self.runtime, value, self.name(kind), self.process_set)

    def ask(self, kind: str, flag: bool) -> Callable[[], bool]:
        """Begin to find out whether a flag is set on some replica; the function that is returned waits for the answer.

        The question travels with the next collective.
        """
        if self.size == 1:
            return lambda: flag
        array = np.array([flag], np.uint8)
        handle = self.runtime.allreduce(self.name(kind), array, array, ReduceOp.MAX, process_set=self.process_set,
                                        at_once=False)

        def answer() -> bool:
            handle.wait()
            return bool(array[0])
        return answer
