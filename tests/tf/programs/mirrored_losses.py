"""Programs of test_mirrored_losses.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf.keras as hvd
from hvdlite.core.errors import MismatchError
from tests.raising import raises
from tests.tf.programs.mirroring import (
    Make,
    X,
    Y,
    begin,
    build,
    rng,
    same,
    sgd,
)
from tests.tf.reference import Reference

IS_WEIGHTED = keras.backend.backend() != "tensorflow" or tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15)
REPORTED = None if IS_WEIGHTED else 1
"""How many of a model's losses are exact in `test_on_batch`: the sum, and of single outputs (docs/keras-features.md)."""


def regularized(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activity_regularizer=keras.regularizers.L2(0.1),
                                                                   kernel_regularizer="l2")])


def embedding(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((7,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True),
                             keras.layers.Dense(2)])


def two_outputs(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    given = keras.Input((6,))
    return keras.Model(given, (keras.layers.Dense(2, name="one")(given), keras.layers.Dense(2, name="two")(given)))


def plain() -> Any:
    return keras.optimizers.SGD(0.05)


def small() -> Any:
    return keras.optimizers.SGD(0.005)


def accumulating() -> Any:
    return keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)


def mean_of_squares(true: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.square(true - predicted))


def first(rows: int, data: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:rows], data)


def every_loss_is_the_global_batchs() -> None:
    strategy, _ = begin()
    weights = rng.uniform(0.1, 3, 101).astype("float32")
    weights[:4] = 0.0
    words = rng.integers(1, 9, (101, 7)).astype("int32")
    words[::3, 2:] = 0  # ranks have different numbers of valid tokens
    tagged = rng.normal(size=(101, 7, 2)).astype("float32")

    MSE = keras.losses.MeanSquaredError
    cases: list[tuple[Any, ...]] = [
        ("a mean", mean_of_squares, plain, build, X, Y, None),
        ("a sum, and by weights", (MSE(reduction="sum"), MSE(reduction="mean_with_sample_weight")), small, two_outputs, X,
         (Y, Y), (weights, weights)),
        ("masked", "mse", plain, embedding, words, tagged, None),
        ("masked, by weights", MSE(reduction="mean_with_sample_weight"), plain, embedding, words, tagged,
         np.repeat(weights[:, None], 7, 1)),
        ("accumulated, weighted", "mse", accumulating, regularized, X, Y, weights),
    ]
    for name, *rest in cases:
        if keras.backend.backend() == "tensorflow" or name not in ("a mean", "masked"):
            _a_loss_is_the_global_batchs(strategy, name, *rest)


def _a_loss_is_the_global_batchs(strategy: Any, name: str, loss: Any, make: Make, model: Callable[[int], Any],
                                 x: Any, y: Any, sample_weight: Any) -> None:
    with strategy.scope():
        one = model(1 + 7 * hvd.rank())
        one.compile(make(), loss)
    other = Reference(lambda: model(1))
    other.compile(make(), loss)
    start = other.trainable_variables
    histories = []
    for each in (one, other):
        # 3 samples on rank 0, 2 on rank 1; then 10, 10 and 5 samples.
        each.train_on_batch(x[:5], first(5, y), sample_weight=first(5, sample_weight))
        histories.append(each.fit(x[:25], first(25, y), batch_size=10, shuffle=False, verbose=0,
                                  sample_weight=first(25, sample_weight)))
        if "sum" in name:
            each.train_on_batch(x[:1], first(1, y))  # which all ranks compute
    mine, theirs = (np.ravel(each.evaluate(x, y, batch_size=8, verbose=0))[0] for each in (one, other))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, err_msg=name)
    moved = max(np.abs(value - before).max() for value, before in zip(other.trainable_variables, start, strict=True))
    assert moved > 1e-3, name
    same(one, other, 1e-6)
    # (TensorFlow's Keras averages the losses of several outputs over batches without weights.)
    np.testing.assert_allclose(histories[0].history["loss"], histories[1].history["loss"], rtol=1e-4, err_msg=name)
    mine, theirs = (np.ravel(each.test_on_batch(x[:5], first(5, y)))[:REPORTED] for each in (one, other))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, err_msg=name)


def unbuilt(seed: int) -> Any:
    keras.utils.set_random_seed(seed + 7 * hvd.rank())
    return keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(2)])


def alike(model: Any) -> bool:
    everywhere = hvd.allgather_object([np.array(keras.ops.convert_to_numpy(variable))
                                       for variable in model.trainable_variables])
    return all((one == other).all() for one, other in zip(*everywhere, strict=True))


def seeds(model: Any) -> Any:
    return hvd.allgather_object([np.array(keras.ops.convert_to_numpy(variable)).tolist()
                                 for variable in model.variables if "seed" in variable.path])


class Two(keras.Model):
    def __init__(self, base: Any, second: Any) -> None:
        super().__init__(base.inputs, base.outputs)
        self.second = second


class Late:
    """Makes its variable when it is called."""

    weight: Any = None

    def __call__(self) -> Any:
        if self.weight is None:
            self.weight = tf.Variable(lambda: tf.random.normal((3,), seed=hvd.rank()))
        return self.weight + 0.0


def every_variable_is_rank_0s() -> None:
    strategy, rank = begin()
    _models_begin_alike_whenever_they_are_built(strategy, rank)
    _weights_that_are_set_on_one_rank_count_when_it_is_rank_0(strategy, rank)
    _optimizers_that_are_wrapped_or_held_as_attributes(strategy, rank)
    if keras.backend.backend() == "tensorflow":
        _loops_and_variables_of_tensorflow(strategy, rank)

    # Ranks may make different models in the scope; run does not take them.
    with strategy.scope():
        _kept = build(1) if rank == 0 else unbuilt(1)
    raises(MismatchError, "the scope's variables differ: rank 0 made", lambda: strategy.run(lambda: None))


def _models_begin_alike_whenever_they_are_built(strategy: Any, rank: int) -> None:
    # Built in the scope, in run, or later by being called; trained by train_on_batch alone; evaluated before.
    with strategy.scope():
        built, in_run, called, trained, evaluated, predicted = build(1 + 7 * rank), *(unbuilt(number) for number in range(5))
        for each in (trained, evaluated, predicted):
            each.compile(sgd(), "mse")
    assert alike(built)
    strategy.run(lambda: in_run(X[:4]))
    called(X[:4])
    trained.train_on_batch(X[:20], Y[:20])
    evaluated.evaluate(X[:20], Y[:20], verbose=0)
    predicted.predict(X[:20], verbose=0)
    for each in (in_run, called, trained, evaluated, predicted):
        assert alike(each), each.variables[0]
        drawn = seeds(each)
        assert drawn[0] != drawn[1]  # every rank draws its own masks
    for _ in range(3):
        trained.train_on_batch(X[:20], Y[:20])
    assert alike(trained)


def _weights_that_are_set_on_one_rank_count_when_it_is_rank_0(strategy: Any, rank: int) -> None:
    # And so do moving averages: everybody applies rank 0's model.
    with strategy.scope():
        model = build(1, keras.layers.BatchNormalization())
        model.compile(sgd(), "mse")
    for set_on in (0, 1):
        if rank == set_on:
            model.set_weights([np.ones_like(weight) * (1 + rank) for weight in model.get_weights()])
        rows = model.predict(np.ones((4, 6), "float32"), verbose=0)
        assert (rows == rows[0]).all()
        np.testing.assert_allclose(model.test_on_batch(X[:6], Y[:6]), model.evaluate(X[:6], Y[:6], verbose=0), rtol=1e-5)
        assert alike(model)
    fitted = model.fit(X[:40], Y[:40], validation_data=(X[40:], Y[40:]), batch_size=20, verbose=0)
    np.testing.assert_allclose(fitted.history["val_loss"][-1], model.evaluate(X[40:], Y[40:], verbose=0), rtol=1e-5)


def _optimizers_that_are_wrapped_or_held_as_attributes(strategy: Any, rank: int) -> None:
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with strategy.scope():
        raises(ValueError, "leave out DistributedOptimizer", lambda: build(1).compile(wrapped, "mse"))
        two = Two(build(1), wrapped)
        two.compile(sgd(), "mse")
    raises(ValueError, "leave out DistributedOptimizer", lambda: two.fit(X, Y, verbose=0))

    # Optimizers that a model holds as attributes begin like rank 0's.
    second = keras.optimizers.SGD(0.1 + rank, momentum=0.5)
    two.second = second
    second.build(two.trainable_variables)
    two.fit(X[:20], Y[:20], batch_size=20, verbose=0)
    assert abs(float(keras.ops.convert_to_numpy(second.learning_rate)) - 0.1) < 1e-6


def _loops_and_variables_of_tensorflow(strategy: Any, rank: int) -> None:
    # Loops outside of run and in it, with rows of an embedding.
    words = rng.integers(0, 9, (8, 3))

    def layers(seed: int) -> tuple[Any, Any]:
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.layers.Embedding(9, 4), keras.layers.Dense(1)]), keras.optimizers.Adam(0.01)

    def train(model: Any, optimizer: Any, rows: Any, average: Callable[[Any], Any]) -> None:
        with tf.GradientTape() as tape:
            loss = average(tf.reduce_mean(tf.square(model(rows) - 1.0), [1, 2]))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    share = words[4 * rank:4 * rank + 4]
    with strategy.scope():
        (plain, one), (running, two) = layers(1 + rank), layers(1 + rank)
    alone, three = layers(1)
    alone(words)
    outside = tf.function(lambda: train(plain, one, share, tf.reduce_mean))
    inside = tf.function(lambda: strategy.run(train, (running, two, share, tf.nn.compute_average_loss)))
    plain(words)
    running(words)
    for _ in range(3):
        outside()
        inside()
        train(alone, three, words, tf.reduce_mean)
    same(plain, alone)
    same(running, alone)

    def wrong() -> None:
        with strategy.scope():
            train(plain, one, share, tf.reduce_mean)
    raises(RuntimeError, "outside of strategy.run()", wrong)

    for wrap in (lambda function: function, tf.function):
        late = Late()
        result = hvd.allgather_object(wrap(functools.partial(strategy.run, late))().numpy().tolist())
        assert result[0] == result[1] == late.weight.numpy().tolist()
