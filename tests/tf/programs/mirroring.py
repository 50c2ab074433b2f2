"""What programs in the scope of a `MirroredStrategy` train: on ranks with global batches, and in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from tests.tf.reference import Reference, values_of

rng = np.random.default_rng(5)
X = rng.normal(size=(101, 6)).astype("float32")
Y = (X @ rng.normal(size=(6, 2))).astype("float32")

Make = Callable[[], Any]
"""Makes an optimizer."""


def begin() -> tuple[Any, int]:
    """Return a strategy and this rank."""
    strategy = hvd.MirroredStrategy()
    assert strategy.num_replicas_in_sync == hvd.size()
    return strategy, hvd.rank()


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01, clipnorm=0.05)


def build(seed: int = 1, layer: Any = None) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), *([layer] if layer else []),
                             keras.layers.Dense(2)])


def compiled(make: Make, seed: int = 1, **options: Any) -> Any:
    model = build(seed)
    model.compile(make(), "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()], **options)
    return model


def reference(make: Make, seed: int = 1, **options: Any) -> Reference:
    return Reference(lambda: compiled(make, seed, **options))


def mirrored(strategy: Any, make: Make, seed: int = 1, **options: Any) -> Any:
    with strategy.scope():
        return compiled(make, seed + 7 * hvd.rank(), **options)  # ranks begin differently: rank 0's values count


def same(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Compare the variables of two models."""
    for mine, theirs in zip(values_of(one.trainable_variables), values_of(other.trainable_variables), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)


def same_history(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Compare what two calls of `fit` returned."""
    assert list(one.history) == list(other.history)
    for name in other.history:
        np.testing.assert_allclose(one.history[name], other.history[name], atol=tolerance, rtol=1e-4, err_msg=name)
