"""Batch normalization over the batches of all ranks equals one process that has them all, on every backend of Keras."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_and_models_equal_one_process_with_all_batches(backend: str) -> None:
    run(2, "sync_batch_norm:layers_and_models_equal_one_process_with_all_batches", KERAS_BACKEND=backend)
