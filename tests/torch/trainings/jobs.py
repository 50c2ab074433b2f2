"""Starting ranks that carry out trainings, and finding out which seeds fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.fuzzing import Failure, Tell, failures
from tests.torch.trainings.draws import draw
from tests.torch.trainings.rank import main
from tests.worlds import TORCH

SETTINGS: Sequence[Mapping[str, str]] = (
    {}, {"HVDLITE_BUCKET_SIZE": "1K", "HVDLITE_BUCKET_EDGE": "1K", "HVDLITE_BUCKET_LAYOUTS": "1"})
"""Environments of jobs; seeds are dealt out to them in turn."""
STALLED = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "5", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "9"}
SECONDS_A_SEED = 10.0
"""For a job on a busy machine."""


def fuzz(seeds: Sequence[int], size: int = 2, *, device: str = "cpu", stalled: Mapping[str, str] = STALLED,
         settings: Sequence[Mapping[str, str]] = SETTINGS, tell: Tell = lambda text: None) -> Iterator[Failure]:
    """Carry out the trainings of some seeds, many in one job, and yield those that fail.

    Args:
        stalled: after how long a job that hangs reports it and ends.
        tell: gets a line a job.
    """
    for number, environment in enumerate(settings):
        yield from failures(seeds[number::len(settings)], size, main, [device], lambda seed: draw(seed, size, device),
                            {**environment, **stalled}, TORCH, SECONDS_A_SEED, tell)
