"""The processes of a job: where they run, which ranks they are, and how they have ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvdlite.core.launch_contract import FailureRecord
from hvdlite_runner.job.ending import Exit


@dataclasses.dataclass
class WorkerProcess:
    """A process of the job.

    Attributes:
        rank: in the last world that it was in; -1 for none.
        record: of its failure, if it has written one.
        problem: why it was ended; "" if it was not.
    """

    machine: str
    host: str
    rank: int = -1
    record: FailureRecord | None = None
    problem: str = ""


class WorkerProcesses(dict[int, WorkerProcess]):
    """All processes that there have been, by their keys.

    Attributes:
        running: the keys of those that have not ended.
        exits: their ends, in the order in which they were seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: set[int] = set()
        self.exits: list[Exit] = []

    def begin_world(self, world: Sequence[int]) -> dict[int, str]:
        """Give processes new ranks; return the host of each."""
        for rank, key in enumerate(world):
            self[key].rank = rank
        return {rank: self[key].host for rank, key in enumerate(world)}

    def on(self, machine: str) -> list[int]:
        """Return the processes that run on a machine."""
        return sorted(key for key in self.running if self[key].machine == machine)

    def records(self) -> dict[int, FailureRecord]:
        """Return the records of failures."""
        return {key: process.record for key, process in self.items() if process.record is not None}

    def rank_of(self, key: int) -> int:
        """Return a process's rank in the last world that it was in; -1 for none."""
        return self[key].rank

    def name(self, key: int) -> str:
        """Return how a process is called in a message; its host is named if there are several."""
        process = self[key]
        where = f" on {process.host}" if len({each.host for each in self.values()}) > 1 else ""
        return (f"rank {process.rank}" if process.rank >= 0 else f"new process {key}") + where
