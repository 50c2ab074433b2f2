"""What ranks do in test_sharded.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
Y = (X[:, :1] * 2 - X[:, 1:2]).astype("float32")
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "momentum": lambda **named: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, **named),
    **{name: getattr(keras.optimizers, name, None) for name in (
        "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lamb", "Lion", "Adafactor",
        "Muon")},
}


def model(seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(9, "tanh"), keras.layers.Dense(5, "tanh"),
                             keras.layers.Dense(1)])


def fitted(optimizer: Any, epochs: int = 2, module: Any = None, wraps: bool = True, **named: Any) -> Any:
    module = module or model()
    module.compile(optimizer, "mse", **named)
    rank, size = hvd.rank(), hvd.size()
    module.fit(X[rank::size], Y[rank::size], batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return module


def values(variables: Any) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(each)) for each in variables]


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(values(one.trainable_variables), values(other.trainable_variables),
                                                    strict=True))


def equals_unsharded(names: list[str] | None = None) -> None:
    hvd.init()
    for name, make in OPTIMIZERS.items():
        if make is None:
            continue
        whole = fitted(hvd.DistributedOptimizer(make()))
        module = fitted(hvd.DistributedOptimizer(make(), sharded=True))
        worst = max(float(np.abs(a - b).max()) for a, b in zip(values(whole.trainable_variables),
                                                               values(module.trainable_variables), strict=True))
        own = sum(each.nbytes for each in values(module.optimizer.variables[2:]))
        all_own = hvd.allgather_object(own)
        print(name, worst, all_own, sum(each.nbytes for each in values(whole.optimizer.variables[2:])), flush=True)
