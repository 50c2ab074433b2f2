"""Starting ranks that carry out trainings, and finding out which seeds fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.fuzzing import cause, job
from tests.tf.fuzz.draws import draw
from tests.tf.support import ENVIRONMENT, imported

STALLED = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "10", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "20"}
SECONDS_A_SEED = 40.0
"""For a job on a busy machine."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A training that failed.

    Attributes:
        rank: the first rank that says why.
        error: the end of its standard error.
    """

    seed: int
    backend: str
    rank: int
    error: str

    def __str__(self) -> str:
        return f"{draw(self.seed, self.backend)}\nseed {self.seed} failed on rank {self.rank}:\n{self.error}"


def fuzz(seeds: Sequence[int], backend: str, *, stalled: Mapping[str, str] = STALLED,
         tell: Callable[[str], object] = lambda text: None) -> Iterator[Failure]:
    """Carry out the trainings of some seeds on two ranks, many in one job, and yield those that fail.

    Args:
        stalled: after how long a job that hangs reports it and ends.
        tell: gets a line a job.
    """
    rest = list(seeds)
    while rest:
        source = f"from tests.tf.fuzz.rank import main\nmain({rest}, {backend!r})\n"
        environment = {**ENVIRONMENT, "KERAS_BACKEND": backend, **stalled}
        fine, ended = job(2, rest, source, environment, imported(backend), SECONDS_A_SEED)
        tell(f"{backend}: {fine} of {len(rest)} seeds have ended")
        for rank in ended:
            for line in rank.stdout.splitlines():
                if line.startswith("wrong "):
                    _, seed, error = line.split(" ", 2)
                    yield Failure(int(seed), backend, rank.rank, error)
        if fine == len(rest):
            break
        first = cause(ended)
        yield Failure(rest[fine], backend, first.rank, first.stderr[-5000:])
        rest = rest[fine + 1:]
