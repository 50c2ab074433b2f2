"""Starting ranks that carry out trainings, and finding out which seeds fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.tf.fuzz.draws import draw
from tests.tf.support import ENVIRONMENT, imported
from tests.worlds import Ended, Processes

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
        fine, ended = _job(rest, backend, stalled)
        tell(f"{backend}: {fine} of {len(rest)} seeds have ended")
        for rank in ended:
            for line in rank.stdout.splitlines():
                if line.startswith("wrong "):
                    _, seed, error = line.split(" ", 2)
                    yield Failure(int(seed), backend, rank.rank, error)
        if fine == len(rest):
            break
        failed = [rank for rank in ended if rank.code != 0]
        cause = next((rank for rank in failed if "PeerFailedError" not in rank.stderr), failed[0])
        yield Failure(rest[fine], backend, cause.rank, cause.stderr[-5000:])
        rest = rest[fine + 1:]


def _job(seeds: Sequence[int], backend: str, stalled: Mapping[str, str]) -> tuple[int, list[Ended]]:
    """Return how many of the seeds both ranks have come to the end of, and how the ranks ended."""
    source = f"from tests.tf.fuzz.rank import main\nmain({list(seeds)}, {backend!r})\n"
    environment = {**ENVIRONMENT, "KERAS_BACKEND": backend, **stalled}
    with Processes(2, source, environment=environment, imported=imported(backend)) as world:
        try:
            ended = world.wait(60.0 + SECONDS_A_SEED * len(seeds))
        except AssertionError:
            ended = [world._ended(rank) for rank in range(2)]
    if all(rank.code == 0 for rank in ended):
        return len(seeds), ended
    return min(min(rank.stdout.count("fine ") for rank in ended), len(seeds) - 1), ended
