"""Shares of global batches in a `MirroredStrategy` of Keras: training equals one process, and shares follow speeds."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_shares_train_like_one_process(backend: str) -> None:
    run(2, "shares:random_shares_train_like_one_process", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shares_follow_speeds(backend: str) -> None:
    run(2, "shares:shares_follow_speeds", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fixed_shares_and_batches_by_hand(backend: str) -> None:
    run(2, "shares:fixed_shares_and_batches_by_hand", KERAS_BACKEND=backend)
