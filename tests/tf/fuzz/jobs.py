"""Starting ranks that carry out trainings, and finding out which seeds fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.fuzzing import Failure, Tell, failures
from tests.tf.fuzz.draws import draw
from tests.tf.fuzz.rank import main
from tests.tf.support import ENVIRONMENT, imported

STALLED = {"HVDLITE_STALL_CHECK_TIME_SECONDS": "60", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "120"}
"""After how long a job that hangs reports it and ends. Rank 1 waits while rank 0 trains in one process."""
SECONDS_A_SEED = 40.0
"""For a job on a busy machine."""


def fuzz(seeds: Sequence[int], backend: str, *, device: str = "cpu", tell: Tell = lambda text: None) -> Iterator[Failure]:
    """Carry out the trainings of some seeds on two ranks, many in one job, and return those that fail.

    Args:
        device: "cpu", or "cuda": Keras then uses the GPU that it finds, which the ranks may share; without training steps of
            the user's own on batches of a DataLoader, which stay on the host.
        tell: gets a line a job.
    """
    environment = {**ENVIRONMENT, "KERAS_BACKEND": backend, **STALLED}
    if device == "cuda":
        del environment["CUDA_VISIBLE_DEVICES"], environment["JAX_PLATFORMS"]
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if device == "cuda":
        drawn = [draw(seed, backend) for seed in seeds]
        seeds = [each.seed for each in drawn if (each.model, each.data) != ("own train_step", "DataLoader")]
    return failures(seeds, 2, main, [backend, device], lambda seed: draw(seed, backend), environment,
                    imported(backend) if device == "cpu" else [], SECONDS_A_SEED, tell)
