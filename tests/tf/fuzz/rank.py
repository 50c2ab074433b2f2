"""A rank of a job that carries out trainings."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.fuzzing import BEGUN, FINE, WRONG, WrongError
from tests.tf.fuzz.draws import Training, draw
from tests.training.random_shares import draw_shares

FEATURES, CLASSES = 4, 7


def main(seeds: Sequence[int], backend: str, device: str = "cpu") -> None:
    """Carry out the trainings of some seeds; both ranks of a job call this with the same ones."""
    os.environ["KERAS_BACKEND"] = backend
    if backend == "torch":
        import torch

        from tests.torch.devices import prepare
        torch.set_num_threads(1)
        prepare(device)
    import hvdlite_tf.keras as hvd
    hvd.init()
    for seed in seeds:
        print(BEGUN, seed, flush=True)
        try:
            check(draw(seed, backend), hvd)
        except WrongError as error:
            print(WRONG, seed, error, flush=True)
        print(FINE, seed, flush=True)
    hvd.shutdown()


def check(training: Training, hvd: Any) -> None:
    """Train on both ranks and in one process, and compare.

    Raises:
        WrongError: when they differ.
    """
    import keras
    keras.backend.clear_session()
    mine = train(training, hvd, alone=False)
    everywhere = hvd.allgather_object(mine)
    for name, value in everywhere[0].items():
        if any(not np.array_equal(value, other[name]) for other in everywhere[1:]):
            raise WrongError(f"ranks differ in {name}: {[other[name].tolist() for other in everywhere]}")
    if hvd.rank() != 0:
        return
    for name, value in train(training, hvd, alone=True).items():
        if name not in mine:
            continue
        if not np.allclose(mine[name], value, rtol=2e-3, atol=2e-4):
            worst = float(np.abs(mine[name] - value).max())
            raise WrongError(f"{name} differs by {worst:.3g}: {mine[name].tolist()}, alone {value.tolist()}")


def train(training: Training, hvd: Any, alone: bool) -> dict[str, Any]:
    """Train, and return weights, predictions and histories by name.

    Args:
        alone: in one process with plain Keras.
    """
    import keras
    scope: Callable[[], Any] = contextlib.nullcontext
    if training.scoped and not alone:
        strategy = hvd.MirroredStrategy(shares="auto" if training.shares else None)
        if training.shares:
            draw_shares(strategy.shares, training.seed)
        scope = strategy.scope
    x, y, weights = samples(training)
    found: dict[str, Any] = {}
    with scope():
        keras.utils.set_random_seed(training.seed + (0 if alone or training.scoped else 5 * hvd.rank()))
        model = made(training)
    for turn in range(1 + training.again):
        with scope():
            optimizer = optimizer_of(training, 0.5 ** turn)
            if not training.scoped and not alone:
                optimizer = hvd.DistributedOptimizer(optimizer, sharded=training.sharded)
            model.compile(optimizer, losses(training), run_eagerly=training.eager, steps_per_execution=training.steps,
                          metrics=metrics(training),
                          **({} if training.backend != "jax" else {"jit_compile": True}))
        options: dict[str, Any] = {"epochs": training.epochs, "shuffle": False, "verbose": 0}
        if training.scoped:
            if training.validated:
                options.update(validation_data=(x, y), validation_batch_size=training.batch)
            if training.decides:
                decides = keras.callbacks.ReduceLROnPlateau(monitored(training), 0.5, 0, mode="min", min_delta=0.02)
                options["callbacks"] = [decides]
            history = fit(training, model, x, y, weights, options)
            for name, values in history.history.items():
                is_exact = is_exact_by_output(training) or name not in ("first_loss", "second_loss")
                if is_exact and training.model not in ("own train_step", "no call"):  # which reports what it likes
                    found[f"{name} of turn {turn}"] = np.array(values)
        else:
            callbacks = [] if alone else [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
            mine = x, y
            if not alone:
                mine = keras.tree.map_structure(lambda array: part(array, training, hvd.rank()), (x, y))
            model.weighs = training.first_rows > 0 and not alone
            rows = slice(training.batch) if alone else rows_of(training, hvd.rank())
            model.fit(*mine, batch_size=rows.stop - (rows.start or 0), callbacks=callbacks, **options)
    for index, variable in enumerate(model.trainable_variables):
        found[f"variable {index} {list(variable.shape)}"] = np.array(keras.ops.convert_to_numpy(variable))
    if training.scoped:
        if training.model == "no call":
            return found
        found["predictions"] = np.concatenate([np.ravel(each) for each in keras.tree.flatten(
            model.predict(x, batch_size=training.batch, verbose=0))])
        found["evaluation"] = np.ravel(model.evaluate(x, y, batch_size=training.batch, verbose=0))
    return found


def is_exact_by_output(training: Training) -> bool:
    """Return whether `fit` logs one process's losses of outputs: on TensorFlow Keras averages them without weights."""
    return training.backend != "tensorflow" or training.has_equal_shards


def monitored(training: Training) -> str:
    """Return the name of the loss by which a callback decides."""
    if training.model in ("own train_step", "no call"):
        return "own"
    by_output = training.model == "two outputs" and (training.validated or is_exact_by_output(training))
    return "val_" * training.validated + "first_" * by_output + "loss"


def rows_of(training: Training, rank: int) -> slice:
    """Return the rows of each global batch that one of two ranks has."""
    share = training.first_rows or training.batch // 2
    return slice(share, training.batch) if rank else slice(share)


def part(array: Any, training: Training, rank: int) -> Any:
    """Return a rank's part of each global batch."""
    batches = array.reshape(-1, training.batch, *array.shape[1:])
    return batches[:, rows_of(training, rank)].reshape(-1, *array.shape[1:])


def samples(training: Training) -> tuple[Any, Any, Any]:
    """Return inputs, targets and weights of samples."""
    import keras
    import scipy.sparse
    rng = np.random.default_rng(training.seed)
    rows = training.rows
    x: Any = rng.normal(size=(rows, FEATURES)).astype("float32")
    if training.model == "embedding":
        x = rng.integers(0, CLASSES, (rows, 3)).astype("int32")
    if training.model == "convolution":
        x = rng.normal(size=(rows, 6, FEATURES)).astype("float32")
    y: Any = rng.normal(size=(rows, 2)).astype("float32")
    if training.model == "two inputs":
        x = (x, rng.normal(size=(rows, 3)).astype("float32"))
    if training.model == "two outputs":
        y = (y, rng.normal(size=(rows, 1)).astype("float32"))
    if training.model == "sparse":
        x = x * (rng.random(x.shape) < 0.5)
    if training.wide:
        x, y = keras.tree.map_structure(lambda array: array.astype("float64") if array.dtype == "float32" else array, (x, y))
    if training.model == "sparse":
        x = scipy.sparse.csr_matrix(x)
    return x, y, rng.uniform(0.2, 2.0, rows).astype("float32") if training.weighted else None


def made(training: Training) -> Any:
    """Return the model, not compiled yet."""
    import keras
    from keras import layers
    activated = layers.Dense(5, activation="tanh")
    inputs = keras.Input((FEATURES,))
    match training.model:
        case "deep":
            return keras.Sequential([inputs, *(layers.Dense(6, activation="tanh") for _ in range(4)), layers.Dense(2)])
        case "embedding":
            return keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(CLASSES, 4), layers.Flatten(),
                                     layers.Dense(2)])
        case "two inputs":
            others = keras.Input((3,))
            return keras.Model([inputs, others], layers.Dense(2)(layers.Concatenate()([activated(inputs), others])))
        case "two outputs":
            hidden = activated(inputs)
            return keras.Model(inputs, [layers.Dense(2, name="first")(hidden), layers.Dense(1, name="second")(hidden)])
        case "shared layer":
            shared = layers.Dense(FEATURES, activation="tanh")
            return keras.Model(inputs, layers.Dense(2)(shared(shared(inputs))))
        case "regularized":
            return keras.Sequential([inputs, layers.Dense(5, activation="tanh", kernel_regularizer="l2"), layers.Dense(2)])
        case "frozen":
            activated.trainable = False
            return keras.Sequential([inputs, activated, layers.Dense(2)])
        case "convolution":
            return keras.Sequential([keras.Input((6, FEATURES)), layers.Conv1D(3, 2, activation="tanh"), layers.Flatten(),
                                     layers.Dense(2)])
        case "subclass":
            return keras.Sequential([activated, layers.Dense(2)])  # built by the first batch
        case "own train_step":
            hidden = activated(inputs)
            return own_step(keras.Model)(inputs, layers.Dense(2)(hidden))
        case "no call":
            return without_call()
        case "sparse":
            sparse = keras.Input((FEATURES,), sparse=training.backend == "tensorflow")
            return keras.Sequential([sparse, activated, layers.Dense(2)])
        case "unused layer":
            model = keras.Sequential([inputs, activated, layers.Dense(2)])
            model.unused = layers.Dense(3)
            model.unused.build((None, FEATURES))
            return model
    return keras.Sequential([inputs, activated, layers.Dense(2)])


def without_call() -> Any:
    """Return a model without `call`, whose first layer is built by the first step."""
    import keras

    class Model(own_step(keras.Model)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)

        def found(self, x: Any) -> Any:
            return self.second(self.first(x))
    return Model()


def own_step(base: Any) -> Any:
    """Return a class of models with a train_step of their own, whose loss is a plain mean."""
    import keras

    class Model(base):  # type: ignore[misc]
        weighs = False

        def found(self, x: Any) -> Any:
            return self(x, training=True)

        def mean(self, data: Any) -> Any:
            x, y = data[:2]
            return keras.ops.mean(keras.ops.square(self.found(x) - y))

        if keras.backend.backend() == "tensorflow":
            def train_step(self, data: Any) -> Any:
                import tensorflow as tf
                with tf.GradientTape() as tape:
                    loss = self.mean(data)
                gradients, weight = tape.gradient(loss, self.trainable_variables), {}
                if self.weighs:
                    weight = {"weight": tf.shape(data[0])[0]}
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True), **weight)
                return {"own": loss}
        if keras.backend.backend() == "torch":
            def train_step(self, data: Any) -> Any:
                self.zero_grad()
                loss = self.mean(data)
                loss.backward()
                self.optimizer.apply([each.value.grad for each in self.trainable_weights], self.trainable_weights)
                return {"own": loss}
        if keras.backend.backend() == "jax":
            def train_step(self, state: Any, data: Any) -> Any:
                import jax
                trainable, others, slots, metrics = state
                x, y = data[:2]

                def mean(trainable: Any) -> Any:
                    found, updated = self.stateless_call(trainable, others, x, training=True)
                    return keras.ops.mean(keras.ops.square(found - y)), updated
                (loss, updated), gradients = jax.value_and_grad(mean, has_aux=True)(trainable)
                trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
                return {"own": loss}, (trainable, updated, slots, metrics)
    return Model


def metrics(training: Training) -> Any:
    """Return the metrics to compile with."""
    import keras
    if not training.counted:
        return None

    class Squares(keras.metrics.Metric):  # type: ignore[misc]
        """The mean square of predictions, and a count of samples."""

        def __init__(self) -> None:
            super().__init__(name="squares")
            self.sum, self.rows = (self.add_weight(name=name, initializer="zeros") for name in ("sum", "rows"))

        def update_state(self, true: Any, found: Any, sample_weight: Any = None) -> None:
            self.sum.assign_add(keras.ops.cast(keras.ops.sum(keras.ops.square(found)), "float32"))
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(found)[0], "float32"))

        def result(self) -> Any:
            return self.sum / (self.rows + 1.0)

    def of_batch(true: Any, found: Any) -> Any:
        return keras.ops.mean(keras.ops.cast(found, "float32") ** 2)
    return [[Squares()], ["mae", of_batch]] if training.model == "two outputs" else [Squares(), "mae", of_batch]


def losses(training: Training) -> Any:
    """Return the loss to compile with."""
    import keras
    one = {"huber": "huber", "mae": "mae", "sum": keras.losses.MeanSquaredError(reduction="sum"),
           "function": lambda truth, found: keras.ops.mean(keras.ops.square(truth - found))}.get(training.loss, "mse")
    return [one, "mse"] if training.model == "two outputs" else one


def optimizer_of(training: Training, factor: float) -> Any:
    """Return a new optimizer. Epsilons are large, so that a rounding error stays one."""
    import keras
    rate: Any = 0.02 * factor * (0.05 if training.loss == "sum" else 1)
    options: dict[str, Any] = {}
    known = {"clipnorm": {"clipnorm": 0.2}, "global_clipnorm": {"global_clipnorm": 0.2}, "clipvalue": {"clipvalue": 0.05},
             "ema": {"use_ema": True, "ema_overwrite_frequency": 3}, "accumulation": {"gradient_accumulation_steps": 2},
             "loss_scale_factor": {"loss_scale_factor": 8.0}}
    for setting in training.settings:
        options |= known.get(setting, {})
    if "schedule" in training.settings:
        rate = keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.8)
    kinds = {"SGD": keras.optimizers.SGD, "momentum": keras.optimizers.SGD, "Adam": keras.optimizers.Adam,
             "AdamW": keras.optimizers.AdamW, "RMSprop": keras.optimizers.RMSprop, "Adagrad": keras.optimizers.Adagrad}
    if training.optimizer == "momentum":
        options |= {"momentum": 0.9, "nesterov": True}
    if training.optimizer not in ("SGD", "momentum"):
        options["epsilon"] = 1e-2
    optimizer = kinds[training.optimizer](rate, **options)
    if "scaled" in training.settings and "accumulation" not in training.settings:
        return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    return optimizer


def fit(training: Training, model: Any, x: Any, y: Any, weights: Any, options: dict[str, Any]) -> Any:
    """Fit the model on the data as they were drawn."""
    batches = -(-training.rows // training.batch)
    if training.data == "arrays":
        return model.fit(x, y, sample_weight=weights, batch_size=training.batch, **options)
    if training.data == "tf.data":
        import tensorflow as tf
        data = (x, y) if weights is None else (x, y, weights)
        return model.fit(tf.data.Dataset.from_tensor_slices(data).batch(training.batch), **options)
    import keras

    def batch(index: int) -> Any:
        rows = slice(index * training.batch, (index + 1) * training.batch)
        return keras.tree.map_structure(lambda array: array[rows], (x, y))
    if training.data == "PyDataset":
        class Batches(keras.utils.PyDataset):  # type: ignore[misc]
            def __len__(self) -> int:
                return batches

            def __getitem__(self, index: int) -> Any:
                return batch(index)
        return model.fit(Batches(), **options)
    if training.data == "generator":
        endless = (batch(index % batches) for index in range(batches * (training.epochs + 1)))
        return model.fit(endless, steps_per_epoch=batches, **options)
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):  # type: ignore[misc,type-arg]
        def __len__(self) -> int:
            return training.rows

        def __getitem__(self, index: int) -> Any:
            return keras.tree.map_structure(lambda array: torch.from_numpy(np.ascontiguousarray(array[index])), (x, y))
    return model.fit(DataLoader(Rows(), training.batch), **options)
