"""Programs of test_sync_batch_norm.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf.keras as hvd
from tests.raising import raises
from tests.tf.programs.models import X, Y, begin, rng, shares

CASES: list[tuple[tuple[int, ...], int, bool, str, int, float]] = [
    ((5, 3), -1, False, "float32", 0, 2e-5), ((4, 6, 3), -1, True, "float32", 0, 2e-5),
    ((3, 2, 4, 4), 1, False, "float32", 0, 2e-5), ((6, 3), -1, False, "float32", 1000, 5e-4),
    ((5, 3), -1, False, "float16", 3, 5e-3), ((5, 3), -1, False, "bfloat16", 3, 4e-2),
    ((0, 3), -1, False, "float32", 0, 2e-5)]
"""Rank 0's batch, the axis, whether samples are masked, the dtype, the mean, and the tolerance."""


def with_gradients(layer: Any, x: Any, upstream: Any, mask: Any = None) -> list[np.ndarray]:
    """Return what a layer makes of a batch in training, and the gradients of the input, gamma and beta."""
    x, upstream = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(upstream)
    layer.build(x.shape)
    options = {} if mask is None else {"mask": keras.ops.convert_to_tensor(mask)}
    compute = {"tensorflow": _in_tensorflow, "jax": _in_jax, "torch": _in_torch}[keras.backend.backend()]
    return [np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(each, "float32")))
            for each in compute(layer, x, upstream, options)]


def _in_tensorflow(layer: Any, x: Any, upstream: Any, options: dict[str, Any]) -> Sequence[Any]:
    @tf.function
    def compute(x: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True, **options)
        return y, *tape.gradient(y, [x, layer.gamma.value, layer.beta.value], upstream)
    return compute(x, upstream)


def _in_jax(layer: Any, x: Any, upstream: Any, options: dict[str, Any]) -> Sequence[Any]:
    import jax
    rest = [variable.value for variable in layer.non_trainable_variables]

    def apply(x: Any, gamma: Any, beta: Any) -> Any:
        y, after = layer.stateless_call([gamma, beta], rest, x, training=True, **options)
        return y, after

    @jax.jit
    def compute(x: Any, gamma: Any, beta: Any, upstream: Any) -> Any:
        y, pull, after = jax.vjp(apply, x, gamma, beta, has_aux=True)
        return y, *pull(upstream), after
    *results, after = compute(x, layer.gamma.value, layer.beta.value, upstream)
    for variable, value in zip(layer.non_trainable_variables, after, strict=True):
        variable.assign(value)
    return results


def _in_torch(layer: Any, x: Any, upstream: Any, options: dict[str, Any]) -> Sequence[Any]:
    x.requires_grad_(True)
    y = layer(x, training=True, **options)
    y.backward(upstream)
    return y, x.grad, layer.gamma.value.grad, layer.beta.value.grad


def reference(x: Any, upstream: Any, weights: Any, axis: int, epsilon: float = 1e-3) -> tuple[Any, ...]:
    """Return what one process would, in float64 (Ioffe and Szegedy, 2015), and the moments."""
    x, upstream = np.moveaxis(x.astype("float64"), axis, -1), np.moveaxis(upstream.astype("float64"), axis, -1)
    weights = np.ones(x.shape) if weights is None else np.broadcast_to(weights[..., None], x.shape)
    axes = tuple(range(x.ndim - 1))
    count = weights.sum(axes)
    mean = (x * weights).sum(axes) / count
    variance = (np.square(x - mean) * weights).sum(axes) / count
    normal = (x - mean) / np.sqrt(variance + epsilon)
    dbeta, dgamma = upstream.sum(axes), (upstream * normal).sum(axes)
    dx = (upstream - weights / count * (dbeta + normal * dgamma)) / np.sqrt(variance + epsilon)
    return np.moveaxis(normal, -1, axis), np.moveaxis(dx, -1, axis), dgamma, dbeta, mean, variance


def trained(layer: Any, shared: bool = False, x: Any = X[:93], y: Any = Y[:93], batch_size: int = 10, **options: Any) -> Any:
    """Return the variables of a fitted model with a kind of layers. In a scope, ranks have 5 samples each, then 2 and 1."""
    keras.utils.set_random_seed(1)
    given = keras.Input((6,))
    branches = [layer(name=name, **options)(keras.layers.Dense(5)(given)) for name in ("left", "right")]  # neither waits
    outputs = keras.layers.Dense(2)(layer(**options)(keras.layers.concatenate(branches)))
    model = keras.Model(given, outputs)
    optimizer = keras.optimizers.SGD(0.05)
    model.compile(hvd.DistributedOptimizer(optimizer) if shared else optimizer, "mse")
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(variable) for variable in model.variables]


def equal(one: Any, other: Any) -> None:
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5, rtol=1e-4)


def layers_and_models_equal_one_process_with_all_batches() -> None:
    rank, _ = begin()
    _spare = hvd.SyncBatchNormalization() if rank == 0 else None  # one more layer on one rank, which nobody calls
    for case in CASES:
        _a_layer_equals_one_process(*case)
    _models_equal_one_process(rank)


def _a_layer_equals_one_process(rows: tuple[int, ...], axis: int, masked: bool, dtype: str, mean: int,
                                tolerance: float) -> None:
    rank, size, backend = hvd.rank(), hvd.size(), keras.backend.backend()
    each = [(rows[0] + 3 * other, *rows[1:]) for other in range(size)]  # ranks have unequal batches, the first maybe none
    first = sum(shape[0] for shape in each[:rank])
    mine = slice(first, first + each[rank][0])
    whole = (first + sum(shape[0] for shape in each[rank:]), *rows[1:])
    rounded = keras.ops.cast(mean + rng.normal(size=whole), dtype)
    x = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(rounded, "float32")))
    upstream = rng.normal(size=whole).astype("float32")
    mask = rng.random(whole[:-1]) < 0.6 if masked else None
    layer = hvd.SyncBatchNormalization(axis=axis, momentum=0.5, dtype=f"mixed_{dtype}" if "16" in dtype else dtype)
    got = with_gradients(layer, keras.ops.cast(x[mine], dtype), keras.ops.cast(upstream[mine], dtype),
                         None if mask is None else mask[mine])
    y, dx, dgamma, dbeta, average, variance = reference(x, upstream, mask, axis)
    sums = [np.asarray(hvd.allreduce(part, op=hvd.Sum)) for part in got[2:]]
    told = f"{backend} {rows} {dtype} mask {masked} mean {mean}"
    for one, other in zip((*got[:2], *sums), (y[mine], dx[mine], dgamma, dbeta), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * max(1, np.abs(other).max(initial=0)), err_msg=told)
    for variable, value in zip(layer.non_trainable_variables, (average, variance + 1), strict=True):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), value / 2, rtol=1e-4 if mean else 1e-5,
                                   atol=1e-5, err_msg=told)


def _models_equal_one_process(rank: int) -> None:
    backend = keras.backend.backend()
    with hvd.MirroredStrategy().scope():
        together = [trained(hvd.SyncBatchNormalization)]
        if backend == "tensorflow":
            together.append(trained(keras.layers.BatchNormalization, synchronized=True))
    for each in together:
        equal(each, trained(keras.layers.BatchNormalization))
    if backend == "tensorflow":
        alone = trained(keras.layers.BatchNormalization, x=X, y=Y, batch_size=16)
        for layer, options in ((hvd.SyncBatchNormalization, {}), (keras.layers.BatchNormalization, {"synchronized": True})):
            equal(trained(layer, True, shares(8, X), shares(8, Y), 8, **options), alone)
        raises(hvd.MismatchError, "sync_batch_norm", lambda: hvd.SyncBatchNormalization()(X[:8, :3 + rank], training=True))
    else:
        raises(ValueError, "TensorFlow backend", lambda: keras.layers.BatchNormalization(synchronized=True))
    layer = hvd.SyncBatchNormalization(name="again")
    clone = hvd.SyncBatchNormalization.from_config(layer.get_config())
    assert clone.name == "again"
    raises(ValueError, "not fused", lambda: hvd.SyncBatchNormalization(fused=True))
    own = hvd.add_process_set([1])  # ordinary normalization of its own batch, on the member and on the other rank
    lone = hvd.SyncBatchNormalization(process_set=own)(1000 + X[8 * rank:8 * rank + 8], training=True)
    assert abs(keras.ops.convert_to_numpy(lone).mean()) < 2e-3
