"""Batch normalization over the batches of all ranks equals one process that has them all, on every backend of Keras."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run
from tests.tf.test_keras import COMMON

LAYERS = """
backend = keras.backend.backend()
spare = hvd.SyncBatchNormalization() if rank == 0 else None  # one more layer on one rank, which nobody calls

def with_gradients(layer, x, upstream, mask=None):
    \"\"\"Return what a layer makes of a batch in training, and the gradients of the input, gamma and beta.\"\"\"
    x, upstream = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(upstream)
    layer.build(x.shape)
    options = {} if mask is None else {"mask": keras.ops.convert_to_tensor(mask)}
    if backend == "tensorflow":
        import tensorflow as tf
        @tf.function
        def compute(x, upstream):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, training=True, **options)
            return y, *tape.gradient(y, [x, layer.gamma.value, layer.beta.value], upstream)
        results = compute(x, upstream)
    elif backend == "jax":
        import jax
        rest = [variable.value for variable in layer.non_trainable_variables]
        def apply(x, gamma, beta):
            y, after = layer.stateless_call([gamma, beta], rest, x, training=True, **options)
            return y, after
        @jax.jit
        def compute(x, gamma, beta, upstream):
            y, pull, after = jax.vjp(apply, x, gamma, beta, has_aux=True)
            return y, *pull(upstream), after
        *results, after = compute(x, layer.gamma.value, layer.beta.value, upstream)
        for variable, value in zip(layer.non_trainable_variables, after):
            variable.assign(value)
    else:
        x.requires_grad_(True)
        y = layer(x, training=True, **options)
        y.backward(upstream)
        results = y, x.grad, layer.gamma.value.grad, layer.beta.value.grad
    return [np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(each, "float32"))) for each in results]

def reference(x, upstream, weights, axis, epsilon=1e-3):
    \"\"\"Return what one process would, in float64 (Ioffe and Szegedy, 2015), and the moments.\"\"\"
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

cases = [((5, 3), -1, False, "float32", 0, 2e-5), ((4, 6, 3), -1, True, "float32", 0, 2e-5),
         ((3, 2, 4, 4), 1, False, "float32", 0, 2e-5), ((6, 3), -1, False, "float32", 1000, 5e-4),
         ((5, 3), -1, False, "float16", 3, 5e-3), ((5, 3), -1, False, "bfloat16", 3, 4e-2),
         ((0, 3), -1, False, "float32", 0, 2e-5)]
for rows, axis, masked, dtype, mean, tolerance in cases:
    each = [(rows[0] + 3 * other, *rows[1:]) for other in range(size)]  # ranks have unequal batches, the first maybe none
    first = sum(shape[0] for shape in each[:rank])
    mine = slice(first, first + each[rank][0])
    whole = (first + sum(shape[0] for shape in each[rank:]), *rows[1:])
    rounded = keras.ops.cast(mean + rng.normal(size=whole), dtype)
    x = np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(rounded, "float32")))
    upstream = rng.normal(size=whole).astype("float32")
    mask = rng.random(whole[:-1]) < 0.6 if masked else None
    layer = hvd.SyncBatchNormalization(axis=axis, momentum=0.5, dtype=f"mixed_{dtype}" if "16" in dtype else dtype)
    cast = lambda array: keras.ops.cast(array, dtype)
    got = with_gradients(layer, cast(x[mine]), cast(upstream[mine]), None if mask is None else mask[mine])
    y, dx, dgamma, dbeta, average, variance = reference(x, upstream, mask, axis)
    sums = [np.asarray(hvd.allreduce(part, op=hvd.Sum)) for part in got[2:]]
    told = f"{backend} {rows} {dtype} mask {masked} mean {mean}"
    for one, other in zip((*got[:2], *sums), (y[mine], dx[mine], dgamma, dbeta)):
        np.testing.assert_allclose(one, other, atol=tolerance * max(1, np.abs(other).max(initial=0)), err_msg=told)
    for variable, value in zip(layer.non_trainable_variables, (average, variance + 1)):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), value / 2, rtol=1e-4 if mean else 1e-5, atol=1e-5,
                                   err_msg=told)
"""

FIT = """
def trained(layer, shared=False, x=X[:93], y=Y[:93], batch_size=10, **options):  # in a scope: shares of 5, then 2 and 1
    keras.utils.set_random_seed(1)
    given = keras.Input((6,))
    branches = [layer(name=name, **options)(keras.layers.Dense(5)(given)) for name in ("left", "right")]  # neither waits
    outputs = keras.layers.Dense(2)(layer(**options)(keras.layers.concatenate(branches)))
    model = keras.Model(given, outputs)
    optimizer = keras.optimizers.SGD(0.05)
    model.compile(hvd.DistributedOptimizer(optimizer) if shared else optimizer, "mse")
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(variable) for variable in model.variables]

def equal(one, other):
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5, rtol=1e-4)
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
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_and_models_equal_one_process_with_all_batches(backend: str) -> None:
    run(2, COMMON + LAYERS + FIT, KERAS_BACKEND=backend)
