"""Programs of test_uneven_collectives.py."""

from __future__ import annotations

import importlib
from typing import Any

import keras
import numpy as np
from keras import ops

import hvdlite_tf.keras as hvd
from tests.raising import raises
from tests.tf.programs.mirroring import X, Y, begin, build, same
from tests.tf.reference import Reference

IS_TENSORFLOW = keras.backend.backend() == "tensorflow"


def among_ranks(_: Any, output: Any) -> Any:
    """Return the loss of a rank's shard, with every collective."""
    frontend = importlib.import_module("hvdlite_tf" if IS_TENSORFLOW else "hvdlite_torch")
    own, rows = ops.tanh(output), ops.shape(output)[0]
    everywhere = hvd.allgather(own, horovod_gradient=False)
    product = hvd.reducescatter(ops.transpose(own) @ own, op=hvd.Sum, horovod_gradient=False)
    product = hvd.allgather(product, horovod_gradient=False)
    half = ops.cast(hvd.allreduce(ops.cast(ops.sum(own, 0), "float16"), op=hvd.Sum), "float32")
    total = frontend.grouped_allreduce([ops.sum(own, 0), ops.sum(own, 1)[:1] * 0], op=hvd.Sum)[0]
    first = hvd.broadcast(own[:1], 0, horovod_gradient=False)
    splits = [0, rows] if hvd.rank() == 0 else [rows, 0]  # the other rank gets all rows
    received, _ = frontend.alltoall(own, ops.stack(splits) if IS_TENSORFLOW else splits)
    return loss(own, everywhere, total + half, product, first) \
        + ops.sum(ops.square(received - 1)) / ops.cast(rows, "float32")


def alone(_: Any, output: Any) -> Any:
    """Return the loss of the global batch."""
    own = ops.tanh(output)
    half = ops.cast(ops.cast(ops.sum(own, 0), "float16"), "float32")
    return loss(own, own, ops.sum(own, 0) + half, ops.transpose(own) @ own, own[:1]) \
        + ops.sum(ops.square(own - 1)) / len(own)


def loss(own: Any, everywhere: Any, total: Any, product: Any, first: Any) -> Any:
    return ops.mean(ops.logsumexp(own @ ops.transpose(everywhere), 1)) + ops.mean(ops.square(own * total)) \
        + ops.mean(ops.square(own @ product)) + ops.mean(ops.square(own * first))


def collectives_in_a_loss_equal_one_process() -> None:
    strategy, rank = begin()
    in_step: Any = among_ranks
    if IS_TENSORFLOW:
        import tensorflow as tf
        traced = tf.function(among_ranks)  # whose trace, made without gradients, is used in every step

        def in_step(target: Any, output: Any) -> Any:
            return traced(target, output)
    with strategy.scope():
        one = build(1 + 7 * rank)

    def made() -> Any:
        model = build(1)
        model.compile("sgd", alone, run_eagerly=True)
        return model
    other = Reference(made)
    start = other.trainable_variables
    for _ in range(2):
        with strategy.scope():
            one.compile("sgd", in_step)
        one.evaluate(X[:10], Y[:10], batch_size=5, verbose=0)
        for each in (one, other):
            each.fit(X[:9], Y[:9], batch_size=5, epochs=2, shuffle=False, verbose=0)  # 3 + 2 samples, and 2 + 2
    assert max(np.abs(value - before).max() for value, before in zip(other.trainable_variables, start, strict=True)) > 1e-2
    same(one, other, 5e-5)  # rounded by float16; without weights they differ by 1e-2
    if IS_TENSORFLOW:
        _a_normalized_model_equals_its_tf_function(strategy)


def _a_normalized_model_equals_its_tf_function(strategy: Any) -> None:
    """The trace of the first `fit` is used in the second one."""
    import tensorflow as tf
    models = []
    for wrap in (tf.function, lambda function: function):
        with strategy.scope():
            inner = build(1, hvd.SyncBatchNormalization())
            model = Wrapped(inner, wrap(lambda x, inner=inner: inner(x, training=True)))
        for _ in range(2):
            with strategy.scope():
                model.compile("sgd", "mse")
            model.fit(X[:9], Y[:9], batch_size=5, shuffle=False, verbose=0)
        models.append(model)
    same(*models)


class Wrapped(keras.Model):
    """Calls another model by a function."""

    def __init__(self, inner: Any, function: Any) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def call(self, inputs: Any) -> Any:
        return self.function(inputs)


def jax_has_no_collectives_in_a_loss() -> None:
    strategy, _ = begin()
    with strategy.scope():
        model = build()
        model.compile("sgd", lambda _, output: hvd.allreduce(output, name="mean"))
    raises(hvd.UnsupportedError, "the jax backend", lambda: model.fit(X, Y, verbose=0))
