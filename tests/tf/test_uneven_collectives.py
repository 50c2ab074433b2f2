"""Collectives inside a loss of `fit` in a scope: in unequal shards, gradients from other ranks have those ranks' weights."""

from __future__ import annotations

import pytest

from tests.tf.support import run


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_collectives_in_a_loss_equal_one_process(backend: str) -> None:
    run(2, "uneven_collectives:collectives_in_a_loss_equal_one_process", KERAS_BACKEND=backend)


@pytest.mark.long
def test_jax_has_no_collectives_in_a_loss() -> None:
    run(2, "uneven_collectives:jax_has_no_collectives_in_a_loss", KERAS_BACKEND="jax")
