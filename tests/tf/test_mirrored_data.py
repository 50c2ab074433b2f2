"""Data in a `MirroredStrategy`: steps, small batches, shuffles, workers and datasets that are distributed already.

Every comparison is with one process. With a learning rate of zero, an epoch's loss is that of all samples only when every
sample was seen exactly once.
"""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_count_global_batches(backend: str) -> None:
    run(2, "mirrored_data:steps_count_global_batches", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_every_sample_is_seen_once_with_seeds_that_depend_on_the_rank(backend: str) -> None:
    run(2, "mirrored_data:every_sample_is_seen_once_with_seeds_that_depend_on_the_rank", KERAS_BACKEND=backend)


def test_datasets_that_are_distributed_already() -> None:
    run(2, "mirrored_data:datasets_that_are_distributed_already")
