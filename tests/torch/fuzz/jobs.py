"""Starting ranks that run programs, and finding out which seeds fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.torch.fuzz.program import FEATURES, draw
from tests.worlds import TORCH, Ended, Processes

SETTINGS: Sequence[Mapping[str, str]] = (
    {},
    {"HVDLITE_BUCKET_SIZE": "4K", "HVDLITE_BUCKET_EDGE": "1K"},
    {"HVDLITE_BUCKET_SIZE": "0"},
    {"HVDLITE_BUCKET_SIZE": "1K", "HVDLITE_BUCKET_EDGE": "1K", "HVDLITE_BUCKET_LAYOUTS": "1", "HVDLITE_DETERMINISTIC": "1"},
)
"""Environments of jobs; seeds are dealt out to them in turn."""
STALLED = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "5", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "9"}
SECONDS_A_SEED = 20.0
"""For a job on a busy machine."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A seed whose program failed.

    Attributes:
        rank: the first rank that says why.
        error: the end of its standard error.
        program: what was drawn.
    """

    seed: int
    size: int
    rank: int
    error: str
    program: str

    def __str__(self) -> str:
        return f"{self.program}\nseed {self.seed} failed on {self.size} ranks, on rank {self.rank}:\n{self.error}"


def fuzz(seeds: Sequence[int], size: int, features: Sequence[str] = FEATURES, *, stalled: Mapping[str, str] = STALLED,
         settings: Sequence[Mapping[str, str]] = SETTINGS,
         tell: Callable[[str], object] = lambda text: None) -> Iterator[Failure]:
    """Run the programs of some seeds, many in one job, and yield those that fail.

    Args:
        stalled: after how long a job that hangs reports it and ends.
        tell: gets a line a job.
    """
    for number, environment in enumerate(settings):
        rest = list(seeds[number::len(settings)])
        while rest:
            fine, ended = _job(rest, size, features, {**environment, **stalled})
            tell(f"{size} ranks, {dict(environment)}: {fine} of {len(rest)} seeds are fine")
            if fine == len(rest):
                break
            cause = _cause(ended)
            yield Failure(rest[fine], size, cause.rank, f"with {dict(environment)}\n{cause.stderr[-5000:]}",
                          draw(rest[fine], size, features).told())
            rest = rest[fine + 1:]


def _job(seeds: Sequence[int], size: int, features: Sequence[str],
         environment: Mapping[str, str]) -> tuple[int, list[Ended]]:
    """Return how many of the seeds every rank has finished, and how the ranks ended."""
    source = f"from tests.torch.fuzz.rank import main\nmain({list(seeds)}, {list(features)})\n"
    with Processes(size, source, environment=dict(environment), imported=TORCH) as world:
        try:
            ended = world.wait(60.0 + SECONDS_A_SEED * len(seeds))
        except AssertionError:
            ended = [world._ended(rank) for rank in range(size)]
    if all(rank.code == 0 for rank in ended):
        return len(seeds), ended
    return min(min(rank.stdout.count("fine ") for rank in ended), len(seeds) - 1), ended


def _cause(ended: Sequence[Ended]) -> Ended:
    """Return the rank whose error is not merely what another rank told it."""
    failed = [rank for rank in ended if rank.code != 0]
    return next((rank for rank in failed if "PeerFailedError" not in rank.stderr), failed[0])
