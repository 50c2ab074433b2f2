"""Programs of test_keras_examples.py: examples of keras.io, small, in a scope and in one process.

What an example draws at random is computed from its data here, because ranks of a scope draw other numbers than one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import hvdlite_tf.keras as hvd
from tests.tf.programs.mirroring import begin, same, same_history
from tests.tf.reference import Reference, once

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
if BACKEND == "jax":
    import jax

rng = np.random.default_rng(5)
IMAGES = rng.random((72, 8, 8, 1)).astype("float32")
SERIES = rng.normal(size=(80, 16, 2)).astype("float32")
WORDS = rng.integers(0, 50, (64, 12))
LABELS = rng.integers(0, 3, 80)
NOISE = rng.normal(size=(64, 6)).astype("float32")
LATENT = 6
STEPS: dict[str, Any] = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}


class Pair:
    """Makes a model of the scope of a strategy, and one process's."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    def __call__(self, make: Callable[[], Any], alone: Callable[[], Any] | None = None) -> tuple[Any, Reference]:
        keras.utils.set_random_seed(1 + 7 * hvd.rank())  # rank 0's values count
        with self.strategy.scope():
            model = make()
        keras.utils.set_random_seed(1)
        return model, Reference(alone or make)


def noise_of(images: Any) -> Any:
    """Return numbers for the latent space that differ from sample to sample."""
    return ops.sin(20.0 * ops.matmul(ops.reshape(images, (-1, 64)), NOISE))


def fit_alike(models: Iterable[Any], *data: Any, **options: Any) -> None:
    """Fit both models, and compare what is reported."""
    one, other = (model.fit(*data, **STEPS, **options) for model in models)
    same_history(one, other, 1e-4)


def only_part_of(data: Any) -> Any:
    """Return the data of a step, which is a tuple on some backends."""
    return data[0] if isinstance(data, tuple) else data


def minimize(model: Any, optimizer: Any, part: Any, loss: Callable[[], Any]) -> Any:
    """Carry out a step of an optimizer for some part of a model, and return the loss."""
    variables = part.trainable_weights
    if BACKEND == "tensorflow":
        with tf.GradientTape() as tape:
            value = loss()
        gradients = tape.gradient(value, variables)
    else:
        model.zero_grad()
        value = loss()
        value.backward()
        gradients = [each.value.grad for each in variables]
    optimizer.apply(gradients, variables)
    return value


class Gan(keras.Model):
    """generative/dcgan_overriding_train_step: two optimizers and no `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = keras.Sequential([
            keras.Input((8, 8, 1)), layers.Conv2D(4, 3, strides=2, padding="same"), layers.LeakyReLU(0.2),
            layers.GlobalMaxPooling2D(), layers.Dense(1)])
        self.generator = keras.Sequential([
            keras.Input((LATENT,)), layers.Dense(4 * 4 * 4), layers.LeakyReLU(0.2), layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same"), layers.LeakyReLU(0.2),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid")])
        self.built = BACKEND == "torch"  # Keras builds models there before the first step

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, data: Any) -> Any:
        real_images = only_part_of(data)
        latent = noise_of(real_images)
        count = ops.shape(real_images)[0]
        combined = ops.concatenate([self.generator(latent), real_images])
        if BACKEND == "torch":
            combined = combined.detach()
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))])
        labels = labels + 0.05 * ops.abs(ops.concatenate([latent, latent])[:, :1])
        critic = minimize(self, self.d_optimizer, self.discriminator,
                          lambda: self.loss_fn(labels, self.discriminator(combined)))
        again = ops.cos(9.0 * latent)
        maker = minimize(self, self.g_optimizer, self.generator,
                         lambda: self.loss_fn(ops.zeros((count, 1)), self.discriminator(self.generator(again))))
        return {"d_loss": critic, "g_loss": maker}


def gan(pair: Pair) -> None:
    def make() -> Any:
        model = Gan()
        model.compile(keras.optimizers.Adam(3e-3), keras.optimizers.Adam(3e-3),
                      keras.losses.BinaryCrossentropy(from_logits=True))
        return model
    one, other = pair(make)
    fit_alike((one, other), IMAGES[:64])
    same(one, other, 1e-4)


class Vae(keras.Model):
    """generative/vae: a loss of three parts, each with a metric, and on TensorFlow no `call` that Keras can build."""

    def __init__(self) -> None:
        super().__init__()
        given = keras.Input((8, 8, 1))
        hidden = layers.Flatten()(layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(given))
        self.encoder = keras.Model(given, [layers.Dense(LATENT)(hidden), layers.Dense(LATENT)(hidden)])
        self.decoder = keras.Sequential([
            keras.Input((LATENT,)), layers.Dense(4 * 4 * 4, activation="relu"), layers.Reshape((4, 4, 4)),
            layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid")])
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction_loss", "kl_loss")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def call(self, images: Any) -> Any:
        mean, log_variance = self.encoder(images)
        return mean, log_variance, self.decoder(mean + ops.exp(0.5 * log_variance) * noise_of(images))

    def losses_of(self, images: Any, outputs: Any) -> list[Any]:
        mean, log_variance, image = outputs
        reconstruction = ops.mean(ops.sum(keras.losses.binary_crossentropy(images, image), axis=(1, 2)))
        divergence = ops.mean(ops.sum(-0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance)), axis=1))
        return [reconstruction + divergence, reconstruction, divergence]

    if BACKEND == "jax":
        def train_step(self, state: Any, data: Any) -> Any:
            trained, others, optimizer, metrics = state
            images = only_part_of(data)

            def loss(trained: Any, others: Any) -> Any:
                outputs, others = self.stateless_call(trained, others, images)
                values = self.losses_of(images, outputs)
                return values[0], (values, others)
            (_, (values, others)), gradients = jax.value_and_grad(loss, has_aux=True)(trained, others)
            trained, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trained)
            logs, updated = {}, []
            for number, (tracker, value) in enumerate(zip(self.trackers, values, strict=True)):
                updated += tracker.stateless_update_state(metrics[2 * number:2 * number + 2], value)
                logs[tracker.name] = tracker.stateless_result(updated[-2:])
            return logs, (trained, others, optimizer, updated)
    else:
        def train_step(self, data: Any) -> Any:  # type: ignore[misc]
            images = only_part_of(data)
            values: list[Any] = []

            def loss() -> Any:
                values[:] = self.losses_of(images, self(images))
                return values[0]
            minimize(self, self.optimizer, self, loss)
            for tracker, value in zip(self.trackers, values, strict=True):
                tracker.update_state(value)
            return {tracker.name: tracker.result() for tracker in self.trackers}


def vae(pair: Pair) -> None:
    def make() -> Any:
        model = Vae()
        model.compile(keras.optimizers.Adam(3e-3))
        return model
    one, other = pair(make)
    fit_alike((one, other), IMAGES)  # the last batch has 8 samples
    same(one, other, 1e-4)


class Embedded(layers.Layer):
    """nlp/text_classification_with_transformer: embeddings of tokens and of positions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tokens, self.positions = layers.Embedding(50, 8), layers.Embedding(12, 8)

    def call(self, words: Any) -> Any:
        return self.tokens(words) + self.positions(ops.arange(0, 12, 1))


class TransformerBlock(layers.Layer):
    """nlp/text_classification_with_transformer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(2, 8)
        self.dense = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]

    def call(self, rows: Any) -> Any:
        rows = self.norms[0](rows + self.attention(rows, rows))
        return self.norms[1](rows + self.dense(rows))


def transformer(pair: Pair) -> None:
    def make() -> Any:
        given = keras.Input((12,), dtype="int32")
        hidden = layers.GlobalAveragePooling1D()(TransformerBlock()(Embedded()(given)))
        model = keras.Model(given, layers.Dense(3, activation="softmax")(layers.Dense(8, activation="relu")(hidden)))
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model
    one, other = pair(make)
    fit_alike((one, other), WORDS[:56], LABELS[:56], validation_data=(WORDS[56:], LABELS[56:64]))
    same(one, other, 1e-4)


def timeseries(pair: Pair) -> None:
    """timeseries/timeseries_classification_from_scratch: callbacks decide and save, and the best model is loaded."""
    def make(normalization: Any) -> Any:
        rows = given = keras.Input((16, 2))
        for _ in range(2):
            normalized = normalization()(layers.Conv1D(4, 3, padding="same")(rows))
            rows = layers.ReLU()(normalized)
        model = keras.Model(given, layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(rows)))
        model.compile(keras.optimizers.Adam(0.02), "sparse_categorical_crossentropy",
                      metrics=["sparse_categorical_accuracy"])
        return model
    one, other = pair(lambda: make(hvd.SyncBatchNormalization), lambda: make(layers.BatchNormalization))
    directory = once(tempfile.mkdtemp)
    files = [Path(directory, name) for name in ("scope.keras", "alone.keras")]
    histories = []
    for model, file in zip((one, other), files, strict=True):
        callbacks = [keras.callbacks.ModelCheckpoint(str(file), save_best_only=True, monitor="val_loss"),
                     keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, patience=1, min_lr=0.0001),
                     keras.callbacks.EarlyStopping("val_loss", patience=3)]
        histories.append(model.fit(SERIES, LABELS, **{**STEPS, "epochs": 8}, validation_split=0.2, callbacks=callbacks))
    same_history(histories[0], histories[1], 1e-3)
    with pair.strategy.scope():
        best = keras.models.load_model(files[0])
    found = best.evaluate(SERIES, LABELS, verbose=0)
    expected = once(lambda: keras.models.load_model(files[1]).evaluate(SERIES, LABELS, verbose=0))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def siamese(pair: Pair) -> None:
    """vision/siamese_contrastive: one network embeds both inputs, and the loss is that of a pair."""
    def make() -> Any:
        embed = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="tanh"), layers.Flatten(),
                                  layers.Dense(4)])
        inputs = [keras.Input((8, 8, 1)) for _ in range(2)]

        def distance_of(both: Any) -> Any:
            return ops.sqrt(ops.maximum(ops.sum(ops.square(both[0] - both[1]), 1, keepdims=True), 1e-7))
        distance = layers.Lambda(distance_of, output_shape=(1,))([*map(embed, inputs)])

        def contrastive(true: Any, predicted: Any) -> Any:
            return ops.mean((1 - true) * ops.square(predicted) + true * ops.square(ops.maximum(1.0 - predicted, 0)))
        model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(distance))
        model.compile("rmsprop", contrastive, metrics=["accuracy"])
        return model
    one, other = pair(make)
    x, y = (IMAGES[:64], IMAGES[8:72]), (LABELS[:64, None] > 0).astype("float32")
    fit_alike((one, other), x, y, validation_data=(x, y))
    same(one, other, 1e-4)


class DualEncoder(keras.Model):
    """nlp/nl_image_search: two encoders; every caption is compared with every image of the global batch."""

    def __init__(self, is_shared: bool) -> None:
        super().__init__()
        self.captions = keras.Sequential([keras.Input((12,)), layers.Embedding(50, 8), layers.Flatten(), layers.Dense(4)])
        self.images = keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="gelu"), layers.Flatten(),
                                        layers.Dense(4)])
        self.is_shared = is_shared
        self.tracker = keras.metrics.Mean(name="loss")
        self.built = BACKEND == "torch"

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def loss_of(self, features: Any) -> Any:
        captions, images = self.captions(features["caption"]), self.images(features["image"])
        if self.is_shared:
            captions, images = (collectives().allgather(each, horovod_gradient=False) for each in (captions, images))
        logits = ops.matmul(captions, ops.transpose(images)) / 0.5
        alike = ops.matmul(captions, ops.transpose(captions)) + ops.matmul(images, ops.transpose(images))
        targets = ops.softmax(alike / 2.0)
        both = (keras.losses.categorical_crossentropy(expected, found, from_logits=True)
                for expected, found in ((targets, logits), (ops.transpose(targets), ops.transpose(logits))))
        return ops.mean(sum(both) / 2)

    def train_step(self, data: Any) -> Any:
        loss = minimize(self, self.optimizer, self, lambda: self.loss_of(only_part_of(data)))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def collectives() -> Any:
    """Return the frontend of Keras' backend."""
    if BACKEND == "torch":
        import hvdlite_torch
        return hvdlite_torch
    import hvdlite_tf
    return hvdlite_tf


def dual_encoder(pair: Pair) -> None:
    def make(is_shared: bool) -> Any:
        model = DualEncoder(is_shared)
        model.compile(keras.optimizers.Adam(3e-3))
        return model
    one, other = pair(lambda: make(True), lambda: make(False))
    x = {"caption": WORDS, "image": IMAGES[:64]}
    fit_alike((one, other), x)
    same(one, other, 1e-4)


class Distiller(keras.Model):
    """vision/knowledge_distillation: a model that trains another one with the outputs of a third."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer: Any, metrics: Any, student_loss_fn: Any, distillation_loss_fn: Any) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
                     training: bool = True) -> Any:
        soft = (ops.softmax(each / 3.0, axis=1) for each in (self.teacher(x, training=False), y_pred))
        return 0.1 * self.student_loss_fn(y, y_pred) + 0.9 * self.distillation_loss_fn(*soft) * 9.0

    def call(self, x: Any) -> Any:
        return self.student(x)


def distillation(pair: Pair) -> None:
    def convolution(filters: int) -> Any:
        return keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(filters, 3, strides=2, padding="same"),
                                 layers.LeakyReLU(0.2), layers.MaxPooling2D(2, strides=1, padding="same"), layers.Flatten(),
                                 layers.Dense(3)])

    def of_teacher() -> Any:
        model = convolution(8)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model
    teachers = pair(of_teacher)
    fit_alike(teachers, IMAGES, LABELS[:72])
    def make(teacher: Any) -> Any:
        teacher.trainable = False
        model = Distiller(convolution(4), teacher)
        model.compile(keras.optimizers.Adam(), [keras.metrics.SparseCategoricalAccuracy()],
                      keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.losses.KLDivergence())
        return model
    one, other = pair(lambda: make(teachers[0]), lambda: make(teachers[1].model))
    fit_alike((one, other), IMAGES, LABELS[:72])
    same(one, other, 1e-4)
    found, expected = (model.evaluate(IMAGES, LABELS[:72], verbose=0) for model in (one, other))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


EXAMPLES = {
    "tensorflow": (gan, vae, transformer, timeseries, siamese, dual_encoder, distillation),
    "torch": (gan, vae, transformer, timeseries, siamese, dual_encoder, distillation),
    "jax": (vae, transformer, timeseries, siamese, distillation),  # Keras' JAX trainer has one optimizer
}[BACKEND]


QUICK = (gan, vae, dual_encoder) if BACKEND == "tensorflow" else (transformer, timeseries, siamese, distillation)
"""Each example on one backend: on TensorFlow those with a `train_step` of their own, which is other code there."""


def train_as_in_one_process(every: bool) -> None:
    strategy, _ = begin()
    for example in EXAMPLES if every else QUICK:
        print(example.__name__, flush=True)
        example(Pair(strategy))
