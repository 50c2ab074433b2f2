"""Starting ranks that run programs, and finding out which seeds fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.fuzzing import cause, job
from tests.torch.fuzz.program import FEATURES, draw
from tests.worlds import TORCH

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
            source = f"from tests.torch.fuzz.rank import main\nmain({rest}, {list(features)})\n"
            fine, ended = job(size, rest, source, {**environment, **stalled}, TORCH, SECONDS_A_SEED)
            tell(f"{size} ranks, {dict(environment)}: {fine} of {len(rest)} seeds are fine")
            if fine == len(rest):
                break
            first = cause(ended)
            yield Failure(rest[fine], size, first.rank, f"with {dict(environment)}\n{first.stderr[-5000:]}",
                          draw(rest[fine], size, features).told())
            rest = rest[fine + 1:]
