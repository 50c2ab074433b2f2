"""Starting ranks that run programs, and finding out which seeds fail."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence

from tests.fuzzing import Failure, Tell, failures
from tests.torch.distributed.fuzz.program import STEPS, draw
from tests.torch.distributed.fuzz.rank import main
from tests.worlds import TORCH

SECONDS_A_SEED = 5.0
"""For a job on a busy machine."""


def fuzz(seeds: Sequence[int], size: int, calls: Sequence[str] = (), steps: range = range(STEPS),
         tell: Tell = lambda text: None) -> Iterator[Failure]:
    """Run the programs of some seeds, many in one job, and yield those that fail.

    Args:
        calls, steps: see `draw`.
        tell: gets a line a job.
    """
    with tempfile.TemporaryDirectory(prefix="hvdlite-fuzz-") as folder:
        yield from failures(seeds, size, main, [folder, list(calls), [steps.start, steps.stop]],
                            lambda seed: "\n".join(map(str, draw(seed, size, calls, steps))), {}, TORCH, SECONDS_A_SEED, tell)
