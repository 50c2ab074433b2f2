"""`MirroredStrategy`: any loss, any share, any way of making a model: two ranks equal one process, or there is an error."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_loss_is_the_global_batchs(backend: str) -> None:
    run(2, "mirrored_losses:every_loss_is_the_global_batchs", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_variable_is_rank_0s(backend: str) -> None:
    run(2, "mirrored_losses:every_variable_is_rank_0s", KERAS_BACKEND=backend)
