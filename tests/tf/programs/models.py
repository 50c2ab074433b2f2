"""What programs with a `DistributedOptimizer` train: each rank on its part of the data, and one process on everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from tests.tf.reference import once, values_of

rng = np.random.default_rng(5)
X, Y = rng.normal(size=(96, 6)).astype("float32"), rng.normal(size=(96, 2)).astype("float32")

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.05, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=3),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, clipnorm=0.1),
    "scale": lambda: keras.optimizers.Adam(0.01, loss_scale_factor=8.0, global_clipnorm=0.1),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.9)),
}


def begin() -> tuple[int, int]:
    """Return this rank and how many there are."""
    hvd.init()
    return hvd.rank(), hvd.size()


def make(seed: int, dtype: str | None = None) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh", dtype=dtype),
                             keras.layers.Dense(2, dtype="float32")])


def shares(batch: int, array: np.ndarray) -> np.ndarray:
    """Return this rank's part of each global batch."""
    return array.reshape(-1, hvd.size(), batch, array.shape[-1])[:, hvd.rank()].reshape(-1, array.shape[-1])


def fit(optimizer: Any, shared: bool, batch: int = 8, epochs: int = 2, seed: int = 1, dtype: str | None = None,
        options: Mapping[str, Any] = {}, **distribution: Any) -> Any:
    """Fit on this rank's part, or on everything: in one process, which rank 0 is."""
    if not shared and hvd.rank():
        return None
    model = make(seed + 7 * hvd.rank() if shared else seed, dtype=dtype)
    model.compile(hvd.DistributedOptimizer(optimizer, **distribution) if shared else optimizer, "mse", **options)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if shared else []
    x, y = (shares(batch, X), shares(batch, Y)) if shared else (X, Y)
    model.fit(x, y, batch_size=batch if shared else batch * hvd.size(), epochs=epochs, shuffle=False, verbose=0,
              callbacks=callbacks)
    return model


def close(one: Any, other: Any, tolerance: float = 2e-5) -> None:
    """Compare this rank's model with rank 0's `other`."""
    expected = once(lambda: values_of(other.trainable_variables))
    for mine, theirs in zip(values_of(one.trainable_variables), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)
