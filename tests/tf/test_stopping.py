"""`stop_training` and the number of steps in an epoch are agreed on by all ranks, in a scope and outside."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_stop_together(backend: str) -> None:
    run(2, "stopping:ranks_stop_together", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_signal_to_one_rank_stops_all(backend: str) -> None:
    run(2, "stopping:a_signal_to_one_rank_stops_all", KERAS_BACKEND=backend)
