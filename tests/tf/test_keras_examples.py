"""Examples and guides of keras.io, in a `MirroredStrategy` or distributed as they say, compared with one process."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "every"), [
    ("tensorflow", False), ("torch", False),
    *(pytest.param(backend, True, marks=pytest.mark.long) for backend in ("tensorflow", "torch", "jax"))])
def test_examples_train_as_in_one_process(backend: str, every: bool) -> None:
    run(2, "keras_examples:train_as_in_one_process", every, timeout=300, KERAS_BACKEND=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_guide_to_distributed_training(backend: str) -> None:
    run(2, f"keras_guides:{backend}_guide", KERAS_BACKEND=backend)
