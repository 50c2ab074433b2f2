"""Starting ranks that carry out trainings, and finding out which seeds fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.fuzzing import Failure, Tell, failures
from tests.tf.fuzz.draws import draw
from tests.tf.fuzz.rank import main
from tests.tf.support import ENVIRONMENT, imported

STALLED = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "10", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "20"}
SECONDS_A_SEED = 40.0
"""For a job on a busy machine."""


def fuzz(seeds: Sequence[int], backend: str, *, stalled: Mapping[str, str] = STALLED,
         tell: Tell = lambda text: None) -> Iterator[Failure]:
    """Carry out the trainings of some seeds on two ranks, many in one job, and return those that fail.

    Args:
        stalled: after how long a job that hangs reports it and ends.
        tell: gets a line a job.
    """
    return failures(seeds, 2, main, [backend], lambda seed: draw(seed, backend),
                    {**ENVIRONMENT, "KERAS_BACKEND": backend, **stalled},
                    imported(backend), SECONDS_A_SEED, tell)
