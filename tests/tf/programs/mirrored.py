"""Programs of test_mirrored.py."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf
import hvdlite_tf.keras as hvd
from hvdlite_tf.keras.optimizer import is_distributed
from tests.raising import raises
from tests.tf.programs.mirroring import (
    Make,
    X,
    Y,
    adam,
    begin,
    build,
    compiled,
    mirrored,
    reference,
    rng,
    same,
    same_history,
    sgd,
)
from tests.tf.reference import Reference


def fit_evaluate_and_predict_equal_one_process(optimizer: str, options: dict[str, Any]) -> None:
    strategy, _ = begin()
    make = {"adam": adam, "sgd": lambda: "sgd"}[optimizer]
    weights = rng.uniform(0.5, 2, 101).astype("float32")
    one, other = mirrored(strategy, make, **options), reference(make, **options)
    # The last batch has one sample, or 11 for two ranks.
    arguments: dict[str, Any] = dict(batch_size=10, epochs=3, shuffle=False, verbose=0)
    same_history(one.fit(X, Y, validation_split=0.1, **arguments), other.fit(X, Y, validation_split=0.1, **arguments))
    same_history(one.fit(X[:95], Y[:95], sample_weight=weights[:95], validation_data=(X, Y, weights), **arguments),
                 other.fit(X[:95], Y[:95], sample_weight=weights[:95], validation_data=(X, Y, weights), **arguments))
    same(one, other)
    np.testing.assert_allclose(one.evaluate(X, Y, verbose=0), other.evaluate(X, Y, verbose=0), rtol=1e-4)
    np.testing.assert_allclose(one.predict(X, batch_size=16, verbose=0), other.predict(X, verbose=0), atol=1e-5)
    np.testing.assert_allclose(one.predict(X[:1], verbose=0), other.predict(X[:1], verbose=0), atol=1e-5)
    np.testing.assert_allclose(one.evaluate(X[:1], Y[:1], verbose=0), other.evaluate(X[:1], Y[:1], verbose=0), rtol=1e-4)
    np.testing.assert_allclose(one.train_on_batch(X[:11], Y[:11]), other.train_on_batch(X[:11], Y[:11]), rtol=1e-4)
    np.testing.assert_allclose(one.test_on_batch(X[:7], Y[:7]), other.test_on_batch(X[:7], Y[:7]), rtol=1e-4)
    same(one, other)
    raises(ValueError, "equally many", lambda: one.fit(X, Y[:50], verbose=0))
    for rate in (0.05, 0.01):  # JAX' compiled functions have the schedule in them
        for model, scope in ((one, strategy.scope), (other, contextlib.nullcontext)):
            with scope():
                model.compile(keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.8)), "mse")
            model.fit(X[:40], Y[:40], shuffle=False, batch_size=10, verbose=0)
        same(one, other)


class Noted(keras.callbacks.Callback):
    def __init__(self, printed: list[tuple[int, dict[str, float]]]) -> None:
        super().__init__()
        self.printed = printed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.printed.append((epoch, dict(logs)))


class InterruptionError(Exception):
    pass


class Interrupting(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise InterruptionError


def callbacks_checkpoints_and_backups(folder: str) -> None:
    strategy, rank = begin()
    printed: list[tuple[int, dict[str, float]]] = []
    checkpoint = keras.callbacks.ModelCheckpoint(os.path.join(folder, f"{rank}.keras"))
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    model = mirrored(strategy, sgd)
    model.fit(X, Y, batch_size=10, epochs=9, verbose=0, validation_split=0.2,
              callbacks=[checkpoint, stopping, Noted(printed)])
    assert len(printed) < 9 and hvd.allgather_object(printed) == [printed, printed]
    assert sorted(os.listdir(folder)) == ["0.keras"]

    # Only rank 0 has a checkpoint: training goes on from it on both ranks; what is saved needs no hvdlite.
    hvd.allgather_object(None)
    with strategy.scope():
        again = keras.models.load_model(os.path.join(folder, "0.keras")) if rank == 0 else compiled(sgd)
    reference = keras.models.load_model(os.path.join(folder, "0.keras"))
    for each in (again, reference):
        each.fit(X, Y, batch_size=10, epochs=1, shuffle=False, verbose=0)
    same(again, reference)
    assert int(again.optimizer.iterations.numpy()) == int(reference.optimizer.iterations.numpy())

    if rank == 0:
        alone = compiled(adam)
        alone.fit(X, Y, batch_size=100, verbose=0)
        alone.save(os.path.join(folder, "alone.keras"))
    with strategy.scope():  # the loaded optimizer is built; the other one is not
        again = keras.models.load_model(os.path.join(folder, "alone.keras")) if rank == 0 else compiled(adam)
    losses = again.evaluate(X, Y, verbose=0)
    assert rank != 0 or np.allclose(losses, alone.evaluate(X, Y, verbose=0), rtol=1e-4)

    def backup() -> Any:
        return keras.callbacks.BackupAndRestore(os.path.join(folder, f"backup.{rank}"))
    model = mirrored(strategy, sgd)
    try:
        model.fit(X, Y, epochs=4, verbose=0, callbacks=[backup(), Interrupting()])
    except InterruptionError:
        pass
    printed.clear()
    model = mirrored(strategy, sgd)
    model.fit(X, Y, epochs=4, verbose=0, callbacks=[backup(), Noted(printed)])
    assert [epoch for epoch, _ in printed] == [2, 3]


GLOBAL_BATCH, EPOCHS = 10, 2


def custom_loop(strategy: Any, distribute: Callable[[Any], Any]) -> tuple[list[float], Any]:
    rank = hvd.rank()
    dataset = tf.data.Dataset.from_tensor_slices((X[:100], Y[:100])).batch(GLOBAL_BATCH)
    test_dataset = tf.data.Dataset.from_tensor_slices((X[:93], Y[:93])).batch(GLOBAL_BATCH)
    dataset, test_dataset = distribute(dataset), distribute(test_dataset)
    with strategy.scope():
        loss_object = keras.losses.MeanSquaredError(reduction=None)

        def compute_loss(labels, predictions, model_losses):
            loss = tf.nn.compute_average_loss(loss_object(labels, predictions))
            if model_losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model_losses))
            return loss
        test_loss = keras.metrics.Mean(name="test_loss")
        train_error = keras.metrics.MeanAbsoluteError(name="train_error")
        keras.utils.set_random_seed(3 + (7 * rank if strategy.num_replicas_in_sync > 1 else 0))
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
                                  keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.1)
        tf.train.Checkpoint(optimizer=optimizer, model=model)

    def train_step(inputs):
        features, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(features, training=True)
            loss = compute_loss(labels, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        train_error.update_state(labels, predictions)
        return loss

    def test_step(inputs):
        features, labels = inputs
        test_loss.update_state(loss_object(labels, model(features, training=False)))

    @tf.function
    def distributed_train_step(inputs):
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    @tf.function
    def distributed_test_step(inputs):
        return strategy.run(test_step, args=(inputs,))

    curve = []
    for _ in range(EPOCHS):
        curve += [float(distributed_train_step(batch)) for batch in dataset]
        for batch in test_dataset:
            distributed_test_step(batch)
        curve += [float(train_error.result()), float(test_loss.result())]
        train_error.reset_state()
        test_loss.reset_state()
    return curve, model


def the_tutorials_custom_loop() -> None:
    strategy, rank = begin()
    curve, model = custom_loop(strategy, strategy.experimental_distribute_dataset)
    expected, alone = custom_loop(tf.distribute.get_strategy(), lambda dataset: dataset)
    np.testing.assert_allclose(curve, expected, rtol=1e-3, atol=1e-5)
    same(model, alone)
    _the_rest_of_the_interface(strategy, rank)


def _the_rest_of_the_interface(strategy: Any, rank: int) -> None:
    assert isinstance(strategy, tf.distribute.Strategy) and hvdlite_tf.MirroredStrategy is hvd.MirroredStrategy
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy and tf.distribute.in_cross_replica_context()

    def replica():
        context = tf.distribute.get_replica_context()
        value = tf.constant([1.0 + rank, 2.0])
        summed, mean = context.all_reduce("SUM", value), context.all_reduce("MEAN", [value, value])[1]
        return context.replica_id_in_sync_group, summed, mean, context.all_gather(value[None], axis=0)
    for wrap in (lambda function: function, tf.function):
        number, summed, mean, gathered = wrap(lambda: strategy.run(replica))()
        assert int(number) == rank and summed.numpy().tolist() == [3, 4] and mean.numpy().tolist() == [1.5, 2]
        assert gathered.numpy().tolist() == [[1, 2], [2, 2]]
    rows = tf.reshape(tf.range(2.0 + 2 * rank), (1 + rank, 2))  # one row on rank 0, two on rank 1
    assert strategy.reduce("SUM", tf.constant(1.0 + rank)).numpy() == 3
    np.testing.assert_allclose(strategy.reduce("MEAN", rows, axis=0), [2 / 3, 5 / 3], rtol=1e-6)
    assert strategy.gather(rows, axis=0).shape == (3, 2)
    assert strategy.gather(tf.ones((2, 1 + rank)), axis=1).shape == (2, 3)
    assert strategy.experimental_local_results(rows)[0] is rows
    mine = strategy.experimental_distribute_values_from_function(lambda context: context.replica_id_in_sync_group)
    assert mine == rank

    def dataset_fn(context):
        batch = context.get_per_replica_batch_size(8)
        return tf.data.Dataset.range(16).shard(context.num_input_pipelines, context.input_pipeline_id).batch(batch)
    batches = [batch.numpy().tolist() for batch in strategy.distribute_datasets_from_function(dataset_fn)]
    assert [len(batch) for batch in batches] == [4, 4] and batches[0][0] == rank

    @tf.function
    def whole_epoch(dataset):
        total = 0.0
        for batch in dataset:
            total += strategy.reduce("SUM", strategy.run(lambda x: tf.reduce_sum(x), args=(batch,)), axis=None)
        return total
    assert float(whole_epoch(strategy.experimental_distribute_dataset(tf.data.Dataset.range(11).batch(4)
                                                                      .map(lambda x: tf.cast(x, tf.float32))))) == 55


def _names_of_keras() -> dict[str, Any]:
    return {name: value for kind in (keras.optimizers.Optimizer, keras.Model, keras.metrics.Metric)
            for name, value in vars(kind).items()}


def the_scope_leaves_nothing_behind() -> None:
    strategy, rank = begin()
    before = _names_of_keras()

    def untouched() -> None:
        assert _names_of_keras() == before and not is_distributed(keras.optimizers.SGD())
    try:
        with strategy.scope():
            raise KeyError("inside")
    except KeyError:
        pass
    untouched()

    elsewhere: list[Any] = []
    with strategy.scope():
        with strategy.scope():  # again is fine
            inner = keras.optimizers.SGD(0.1)
        outer = keras.optimizers.Adam()
        thread = threading.Thread(target=lambda: elsewhere.append(keras.optimizers.SGD()))
        thread.start()
        thread.join()
        second = hvd.MirroredStrategy()
        raises(RuntimeError, "scope of another MirroredStrategy", lambda: second.scope().__enter__())
    assert is_distributed(inner) and is_distributed(outer) and not is_distributed(elsewhere[0])
    untouched()

    # Two threads at a time have a scope each.
    inside, results, errors = threading.Barrier(2), [], []

    def make(strategy: Any, waits: bool) -> None:
        try:
            with strategy.scope():
                inside.wait()
                results.append(keras.optimizers.SGD(0.1))
                inside.wait()
                if waits:
                    return
                raises(RuntimeError, "another MirroredStrategy", lambda: second.scope().__enter__())
        except BaseException as error:
            errors.append(error)
            raise
    threads = [threading.Thread(target=make, args=(each, each is second)) for each in (strategy, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 2 and all(map(is_distributed, results))
    untouched()

    # Two models in one scope, and one outside, which trains alone.
    with strategy.scope():
        one, two = compiled(sgd, 1), compiled(adam, 2)
    alone = compiled(sgd, 1 + rank)
    for model, other in ((one, reference(sgd, 1)), (two, reference(adam, 2))):
        for each in (model, other):
            each.fit(X[:100], Y[:100], batch_size=10, shuffle=False, verbose=0)
        same(model, other)
    alone.fit(X[:50 + rank], Y[:50 + rank], batch_size=10, verbose=0)
    weights = hvd.allgather_object(keras.ops.convert_to_numpy(alone.trainable_variables[0]))
    assert (weights[0] != weights[1]).any()

    # Compiled in the scope, made outside; a fine-tuned optimizer made outside too.
    model = build(1)
    optimizer = sgd()
    with strategy.scope():
        model.compile(optimizer, "mse", metrics=["mae", keras.metrics.RootMeanSquaredError()])
    other = reference(sgd, 1)
    mine, theirs = (each.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0) for each in (model, other))
    same_history(mine, theirs, 0.05)
    same(model, other)

    assert float(strategy.reduce("MEAN", rank)) == 0.5 and float(strategy.reduce("sum", rank)) == 1.0
    assert float(strategy.reduce("MEAN", np.arange(2 + rank), axis=0)) == 0.8
    raises(ValueError, "AVG", lambda: strategy.reduce("AVG", rank))
    wrong: Any
    for wrong in ("2", 0, []):
        raises(ValueError, "devices must be", functools.partial(hvd.MirroredStrategy, wrong))
    raises(ValueError, "there is no data", lambda: one.train_on_batch(None))

    scaled = hvd.MirroredStrategy(scale_learning_rate=True)
    with scaled.scope():
        assert float(keras.ops.convert_to_numpy(keras.optimizers.SGD(0.1).learning_rate)) == np.float32(0.2)
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.9)
        raises(ValueError, "ExponentialDecay", lambda: keras.optimizers.SGD(schedule))
    untouched()


def mixed_precision_embeddings_dropout_and_normalization() -> None:
    strategy, _ = begin()
    words = rng.integers(0, 11, (96, 3)).astype("int32")

    def train(make: Make) -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(11, 4), keras.layers.Flatten(),
                                  keras.layers.Dense(2)])
        model.compile(make(), "mse")
        model.fit(words, Y[:96], batch_size=10, epochs=2, shuffle=False, verbose=0)
        return model
    with strategy.scope():
        one = train(adam)
    same(one, Reference(lambda: train(adam)))

    def half() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, dtype="mixed_float16"),
                                  keras.layers.Dense(2, dtype="float32")])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0), "mse")
        y = Y.copy()
        y[15] = np.inf  # on rank 1
        model.fit(X, y, batch_size=10, shuffle=False, verbose=0)
        return model
    with strategy.scope():
        one = half()
    other = half()
    same(one, other, 2e-2)
    assert float(one.optimizer.dynamic_scale.numpy()) == float(other.optimizer.dynamic_scale.numpy()) == 32.0
    assert int(one.optimizer.inner_optimizer.iterations.numpy()) == 10

    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = build(1, keras.layers.Dropout(0.5))
        model.compile(sgd(), "mse")
    model.fit(X[:20], Y[:20], batch_size=20, verbose=0)
    states = hvd.allgather_object([variable.numpy().tolist() for variable in model.variables if "seed" in variable.path])
    assert states[0] != states[1], states  # each rank has its own masks

    def normalized(layer: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = build(1, layer)
        model.compile(sgd(), "mse")
        model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
        return model
    with strategy.scope():
        one = normalized(hvdlite_tf.SyncBatchNormalization())
    same(one, Reference(lambda: normalized(keras.layers.BatchNormalization())), 1e-3)


def without_a_launcher_there_is_one_replica_and_launch_starts_more() -> None:
    strategy = hvd.MirroredStrategy(devices=2)

    def main(number: int) -> tuple[int, int, int]:
        with hvd.MirroredStrategy().scope():
            return hvd.rank(), hvd.size(), number
    assert strategy.num_replicas_in_sync == 1
    assert strategy.launch(main, (5,)) == (0, 2, 5)
    assert hvd.MirroredStrategy().launch(main, kwargs={"number": 5}) == (0, 1, 5)
    raises(ZeroDivisionError, "", lambda: strategy.launch(divmod, (1, 0)))
