"""Collectives inside a loss of `fit` in a scope: in unequal shards, gradients from other ranks have those ranks' weights."""

from __future__ import annotations

import pytest

from tests.tf.support import run
from tests.tf.test_mirrored import COMMON

LOSS = COMMON + """
ops, backend = keras.ops, keras.backend.backend()
import importlib
frontend = importlib.import_module("hvdlite_tf" if backend == "tensorflow" else "hvdlite_torch")

def alltoall(rows):
    # The other rank gets all rows.
    count = ops.shape(rows)[0]
    splits = [0, count] if rank == 0 else [count, 0]
    return frontend.alltoall(rows, ops.stack(splits) if backend == "tensorflow" else splits)[0]

def among_ranks(_, output):
    own, rows = ops.tanh(output), ops.cast(ops.shape(output)[0], "float32")
    everywhere = hvd.allgather(own, horovod_gradient=False)
    product = hvd.reducescatter(ops.transpose(own) @ own, op=hvd.Sum, horovod_gradient=False)
    product = hvd.allgather(product, horovod_gradient=False)
    half = ops.cast(hvd.allreduce(ops.cast(ops.sum(own, 0), "float16"), op=hvd.Sum), "float32")
    grouped = frontend.grouped_allreduce([ops.sum(own, 0), ops.sum(own, 1)[:1] * 0], op=hvd.Sum)[0]
    return loss(own, everywhere, grouped + half, product, hvd.broadcast(own[:1], 0, horovod_gradient=False)) \\
        + ops.sum(ops.square(alltoall(own) - 1)) / rows

def alone(_, output):
    own = ops.tanh(output)
    half = ops.cast(ops.cast(ops.sum(own, 0), "float16"), "float32")
    return loss(own, own, ops.sum(own, 0) + half, ops.transpose(own) @ own, own[:1]) \\
        + ops.sum(ops.square(own - 1)) / len(own)

def loss(own, everywhere, total, product, first):
    return ops.mean(ops.logsumexp(own @ ops.transpose(everywhere), 1)) + ops.mean(ops.square(own * total)) \\
        + ops.mean(ops.square(own @ product)) + ops.mean(ops.square(own * first))

if backend == "tensorflow":
    import tensorflow as tf
    traced = tf.function(among_ranks)  # whose trace, made without gradients, is used in every step below
    among_ranks = lambda target, output: traced(target, output)
    alone = lambda target, output, compute=alone: compute(target, tf.ensure_shape(output, [None, 2]))
with strategy.scope():
    one = build(1 + 7 * rank)
def made():
    model = build(1)
    model.compile("sgd", alone, run_eagerly=True)
    return model
other = Reference(made)
start = other.trainable_variables
for _ in range(2):
    with strategy.scope():
        one.compile("sgd", among_ranks)
    one.evaluate(X[:10], Y[:10], batch_size=5, verbose=0)
    for each in (one, other):
        each.fit(X[:9], Y[:9], batch_size=5, epochs=2, shuffle=False, verbose=0)  # 3 + 2 samples, and 2 + 2
assert max(np.abs(value - before).max() for value, before in zip(other.trainable_variables, start)) > 1e-2
same(one, other, 5e-5)  # rounded by float16; unweighted, they differ by 1e-2
"""


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_collectives_in_a_loss_equal_one_process(backend: str) -> None:
    run(2, LOSS, KERAS_BACKEND=backend)


@pytest.mark.long
def test_jax_has_no_collectives_in_a_loss() -> None:
    run(2, COMMON + """
with strategy.scope():
    model = build()
    model.compile("sgd", lambda _, output: hvd.allreduce(output, name="mean"))
raises(hvd.UnsupportedError, "the jax backend", lambda: model.fit(X, Y, verbose=0))
""", KERAS_BACKEND="jax")
