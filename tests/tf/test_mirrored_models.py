"""Models and data in a `MirroredStrategy`, compared with one process: outputs, types of arrays, models without `call`."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_losses_of_single_outputs(backend: str) -> None:
    run(2, "mirrored_models:losses_of_single_outputs", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_floats_are_cast(backend: str) -> None:
    run(2, "mirrored_models:floats_are_cast", KERAS_BACKEND=backend)


def test_models_that_keras_cannot_build_before_the_first_step() -> None:
    run(2, "mirrored_models:models_that_keras_cannot_build_before_the_first_step")


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_data(backend: str) -> None:
    pytest.importorskip("scipy")
    run(2, "mirrored_models:sparse_data", timeout=400.0, KERAS_BACKEND=backend)  # TensorFlow compiles long on a busy machine


def test_ragged_data() -> None:
    run(2, "mirrored_models:ragged_data")


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_weights_and_states(backend: str) -> None:
    run(2, "mirrored_models:batches_weights_and_states", KERAS_BACKEND=backend)
