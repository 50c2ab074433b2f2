"""Programs of test_mirrored_models.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf.keras as hvd
from hvdlite_tf.keras.shards import array_dataset
from tests.raising import raises
from tests.tf.programs.mirroring import X, Y, begin, build, rng, same, same_history, sgd
from tests.tf.reference import Reference

BACKEND = keras.backend.backend()
TARGETS = {"a": Y, "b": (X[:, :1] > 0).astype("float32")}


def pair(strategy: Any, make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a model of the strategy, and one process's."""
    with strategy.scope():
        one = make()
    return one, Reference(make)


class Batches(keras.metrics.Metric):
    """Counts batches, which depends on no data."""

    def __init__(self) -> None:
        super().__init__(name="batches")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, true: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(1.0)

    def result(self) -> Any:
        return self.count * 1.0


def losses_of_single_outputs() -> None:
    strategy, _ = begin()

    def make() -> Any:
        keras.utils.set_random_seed(1)
        given = keras.Input((6,))
        hidden = keras.layers.Dense(8)(given)
        model = keras.Model(given, {"a": keras.layers.Dense(2, name="a")(hidden),
                                    "b": keras.layers.Dense(1, activation="sigmoid", name="b")(hidden)})
        model.compile(sgd(), {"a": "mse", "b": "binary_crossentropy"}, loss_weights={"a": 1.0, "b": 0.3},
                      metrics={"b": ["accuracy"]})
        return model

    def rows(part: slice) -> Any:
        return X[part], {name: value[part] for name, value in TARGETS.items()}
    one, other = pair(strategy, make)  # all batches have equal shards
    histories = [model.fit(*rows(slice(80)), batch_size=16, shuffle=False, verbose=0, epochs=2,
                           validation_data=rows(slice(20))) for model in (one, other)]
    same_history(*histories)
    mine, theirs = (model.evaluate(*rows(slice(80)), batch_size=16, return_dict=True, verbose=0) for model in (one, other))
    assert mine.keys() == theirs.keys() and {"a_loss", "b_loss", "b_accuracy"} < mine.keys()
    np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=1e-4)
    for count in (65, 81):  # the last batch has one sample
        alike((model.evaluate(*rows(slice(count)), batch_size=16, verbose=0) for model in (one, other)), rtol=1e-4)
    if BACKEND == "tensorflow":
        with strategy.scope():
            counting = build()
            counting.compile(sgd(), "mse", metrics=[Batches()])
        unknown = tf.data.Dataset.from_tensor_slices((X[:80], Y[:80])).batch(16).filter(lambda *_: True)
        for method in (counting.evaluate, counting.fit):
            logs = method(unknown, verbose=0, **({"return_dict": True} if method == counting.evaluate else {}))
            assert np.ravel(getattr(logs, "history", logs)["batches"]) == [10]  # of 5 batches, on both ranks


class Own(keras.Model):
    """Notes the data of its step."""

    seen: Any = None

    def loss_of(self, data: Any) -> Any:
        self.seen = data
        return keras.ops.mean(keras.ops.square(data[1] - self(data[0], training=True)))

    if BACKEND == "tensorflow":
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = self.loss_of(data)
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables,
                                               strict=True))
            return {"own": loss}
    if BACKEND == "torch":
        def train_step(self, data: Any) -> Any:
            self.zero_grad()
            loss = self.loss_of(data)
            loss.backward()
            self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
            return {"own": loss}


class Steps(keras.Model):
    """Has steps of its own, which take inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.add_weight(name="scale", initializer="ones")
        self.seen: Any = None

    def call(self, x: Any) -> Any:
        return x * self.scale

    def train_step(self, data: Any) -> Any:
        self.seen = data
        return {"own": keras.ops.mean(data if not isinstance(data, tuple) else data[0])}

    def test_step(self, data: Any) -> Any:
        return {"own": keras.ops.mean(data)}

    def predict_step(self, data: Any) -> Any:
        return (data["x"] if isinstance(data, dict) else data) * 2


def floats_are_cast() -> None:
    strategy, _ = begin()

    def make() -> Any:
        keras.utils.set_random_seed(1)
        given = keras.Input((6,))
        model = Own(given, keras.layers.Dense(2)(given))
        model.compile(sgd(), "mse")
        return model
    one, other = pair(strategy, make)
    for dtype in ("float64", "float16"):
        for model in (one, other):
            model.fit(X.astype(dtype), Y.astype(dtype), batch_size=10, shuffle=False, verbose=0, validation_split=0.1)
        assert {keras.backend.standardize_dtype(leaf.dtype) for leaf in keras.tree.flatten(one.seen)} == {"float32"}
        same(one, other)
    raises(ValueError, "validation_split", lambda: one.fit(iter([(X, Y)]), validation_split=0.1, verbose=0))

    def steps() -> Any:
        model = Steps()
        model.compile(sgd(), "mse")
        return model
    one, other = pair(strategy, steps)
    for data in (X[:32], {"x": X[:32]}):
        alike((model.predict(data, batch_size=10, verbose=0) for model in (one, other)), rtol=1e-5)
    if BACKEND == "tensorflow":
        for model in (one, other):
            model.fit(X[:32], validation_data=X[:20], batch_size=10, verbose=0)
        one.train_step((X[:8], Y[:8]))
        assert len(one.seen) == 2, "after fit, a step that the script calls gets what it is given"


class Autoencoder(keras.Model):
    """Has a train_step and no call; parts of it are built by the first step."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1 + 7 * hvd.rank())
        self.encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh")])
        self.decoder = keras.Sequential([keras.layers.Dense(6)])
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.decoder(self.encoder(data)) - data))
        variables = self.encoder.trainable_weights + self.decoder.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return self.tracked(loss)

    def test_step(self, data: Any) -> Any:
        return self.tracked(tf.reduce_mean(tf.square(self.decoder(self.encoder(data)) - data)))

    def tracked(self, loss: Any) -> Any:
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Adversaries(keras.Model):
    """Has two optimizers, and a call that cannot be called with the data of `fit`."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1 + 7 * hvd.rank())
        self.critic = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        self.maker = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)])
        self.critics, self.makers = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)

    def call(self, latent: Any) -> Any:
        return self.maker(latent)

    def train_step(self, real: Any) -> Any:
        latent = real[:, :3]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self(latent)) - self.critic(real))
        self.critics.apply_gradients([*zip(tape.gradient(loss, self.critic.trainable_weights), self.critic.trainable_weights,
                                           strict=True)])
        with tf.GradientTape() as tape:
            second = -tf.reduce_mean(self.critic(self(latent)))
        self.makers.apply_gradients([*zip(tape.gradient(second, self.maker.trainable_weights), self.maker.trainable_weights,
                                          strict=True)])
        return {"one": loss, "two": second}


def models_that_keras_cannot_build_before_the_first_step() -> None:
    strategy, _ = begin()
    for kind in (Autoencoder, Adversaries):
        def make(kind: Any = kind) -> Any:
            model = kind()
            model.compile(*(() if kind is Adversaries else (keras.optimizers.Adam(0.01),)))
            return model
        one, other = pair(strategy, make)
        histories = [model.fit(X[:80], batch_size=16, epochs=2, shuffle=False, verbose=0,
                               **({"validation_data": (X[:32],)} if kind is Autoencoder else {})) for model in (one, other)]
        if kind is Autoencoder:
            same_history(*histories)
            alike((model.evaluate(X[:64], verbose=0) for model in (one, other)), rtol=1e-4)
        same(one, other)

    # An error of the step is that of one process.
    with strategy.scope():
        wrong = Autoencoder()
        wrong.compile("sgd")
    raises(ValueError, "incompatible with the layer", lambda: wrong.fit(X[:, :5], verbose=0))


def alike(both: Iterable[Any], **tolerance: Any) -> None:
    """Compare what the model of a scope and that of one process give."""
    mine, theirs = both
    np.testing.assert_allclose(mine, theirs, **tolerance)


def sparse_data() -> None:
    import scipy.sparse
    strategy, _ = begin()
    matrix = scipy.sparse.random(50, 6, 0.4, "csr", random_state=5)  # float64
    options = {"batch_size": 10, "shuffle": False, "verbose": 0}

    def dense() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,), sparse=BACKEND == "tensorflow"), keras.layers.Dense(2)])
        model.compile(sgd(), "mse", **({"jit_compile": False} if BACKEND == "jax" else {}))
        return model
    kinds: dict[str, Any] = {"csr": lambda: ((matrix, Y[:50]), options)}
    if BACKEND != "tensorflow":  # which compiles long, and gets the same rows
        kinds["coo"] = lambda: ((matrix.tocoo(), Y[:50]), options)
    else:
        sparse = tf.sparse.from_dense(matrix.toarray().astype("float32"))
        without = {"shuffle": False, "verbose": 0}
        kinds["SparseTensor"] = lambda: ((sparse, Y[:50]), options)
        kinds["tf.data"] = lambda: ((tf.data.Dataset.from_tensor_slices((sparse, Y[:50])).batch(10),), without)
        kinds["generator"] = lambda: ((((matrix[10 * step:10 * step + 10].astype("float32"), Y[10 * step:10 * step + 10])
                                        for step in range(5)),), {**without, "steps_per_epoch": 5})
    alone: dict[int, Any] = {}  # one process trains once on arrays and once on batches: the rows are the same
    for kind, data in kinds.items():
        one, other = pair(strategy, dense)
        arguments, more = data()
        if len(arguments) == 2:
            more = {**more, "validation_split": 0.2}
        history = one.fit(*arguments, **more)
        if len(arguments) not in alone:
            alone[len(arguments)] = other, other.fit(*data()[0], **more)
        other, expected = alone[len(arguments)]
        same_history(history, expected)
        same(one, other)
        if kind == "generator":
            continue
        (x, *_), more = data()
        more = {"verbose": 0, **({"batch_size": 16} if "batch_size" in more else {})}
        alike((model.evaluate(*data()[0], **more) for model in (one, other)), rtol=1e-4, err_msg=kind)
        alike((model.predict(x, **more) for model in (one, other)), atol=1e-5, err_msg=kind)
    if BACKEND == "tensorflow":
        alike((model.train_on_batch(sparse, Y[:50]) for model in (one, other)), rtol=1e-4)
    else:
        ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 3])
        raises(ValueError, "cannot share out a RaggedTensor", lambda: one.fit(ragged, Y[:3], verbose=0))


def ragged_data() -> None:
    strategy, _ = begin()
    lengths = rng.integers(1, 6, 50)
    words = tf.RaggedTensor.from_row_lengths(rng.integers(0, 30, lengths.sum()), lengths)

    def make() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Embedding(30, 4), keras.layers.Lambda(lambda rows: tf.reduce_mean(rows, 1)),
                                  keras.layers.Dense(2)])
        model.compile(sgd(), "mse", run_eagerly=True)
        model(words)
        return model
    one, other = pair(strategy, make)
    pairs = tf.data.Dataset.from_tensor_slices((words, Y[:50])).batch(10)
    for data, more in (((words, Y[:50]), {"batch_size": 10}), ((pairs,), {})):
        same_history(*(model.fit(*data, **more, shuffle=False, verbose=0) for model in (one, other)))
        alike((model.evaluate(*data, **more, verbose=0) for model in (one, other)), rtol=1e-4)
        alike((model.predict(data[0], **more, verbose=0) for model in (one, other)), atol=1e-5)
    same(one, other)


def batches_weights_and_states() -> None:
    strategy, rank = begin()
    labels = (Y[:, 0] > 0).astype("int32")

    def classifier() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="softmax")])
        model.compile(sgd(), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"],
                      metrics=[lambda true, found: keras.ops.mean(found[:, 0] ** 2)])
        return model
    one, other = pair(strategy, classifier)
    weights = {0: 0.3, 1: 2.5}
    histories = [model.fit(X[:80], labels[:80], class_weight=weights, batch_size=10, epochs=2, shuffle=False, verbose=0)
                 for model in (one, other)]
    same_history(histories[0], histories[1], 1e-4)
    mine, theirs = (model.train_on_batch(X[:11], labels[:11], class_weight=weights)[0] for model in (one, other))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)
    same(one, other)

    # A metric that is one number for a batch is that of whole batches, also if shards would be unequal.
    evaluated = [model.evaluate(X[:90], labels[:90], batch_size=15, verbose=0) for model in (one, other)]
    alike(evaluated, rtol=1e-4)

    # Also in fit, with unequal shards.
    one, other = pair(strategy, classifier)
    histories = [model.fit(X[:90], labels[:90], batch_size=15, epochs=2, shuffle=False, verbose=0) for model in (one, other)]
    same_history(histories[0], histories[1])

    # Rank 0's weights count after fit, too.
    (one, other) = pair(strategy, classifier)
    for model in (one, other):
        model.fit(X[:20], labels[:20], shuffle=False, verbose=0)
    if rank == 0:
        for model in (one, other.model):
            model.set_weights([weight * -3.0 for weight in model.get_weights()])
    mine, theirs = (model.train_on_batch(X[:12], labels[:12])[0] for model in (one, other))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4)

    with strategy.scope():
        given = keras.Input(batch_shape=(16, 3, 6))
        stateful = keras.Model(given, keras.layers.LSTM(2, stateful=True)(given))
        stateful.compile("sgd", "mse")
    raises(ValueError, "stateful", lambda: stateful.fit(np.ones((16, 3, 6)), np.ones((16, 2)), verbose=0))

    if BACKEND == "tensorflow":
        resolver = strategy.cluster_resolver
        assert (resolver.task_type, resolver.task_id) == ("worker", rank)
        assert resolver.cluster_spec().num_tasks("worker") == 2
        assert array_dataset((X,), 10, None, lambda index, rows: rows).options().autotune.enabled is False
