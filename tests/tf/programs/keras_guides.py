"""Programs of test_keras_examples.py: keras.io's guides to distributed training, small, as they are with hvdlite."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

import hvdlite_tf.keras as hvd
from tests.tf.programs.mirroring import begin
from tests.tf.reference import once, values_of

rng = np.random.default_rng(5)
IMAGES, DIGITS = (255 * rng.random((96, 12, 12, 1))).astype("float32"), rng.integers(0, 10, 96)
BATCH = 16


def convnet(*, is_exact: bool) -> Any:
    """Return the model of the guides for torch and JAX.

    Args:
        is_exact: with layers that give on parts of a batch what they give on all of it.
    """
    keras.utils.set_random_seed(1 + 7 * hvd.rank())
    given = keras.Input((12, 12, 1))
    rows = layers.Rescaling(1.0 / 255.0)(given)
    for filters, size, strides in ((4, 3, 1), (6, 3, 2)):
        rows = layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False)(rows)
        rows = layers.ReLU()((layers.GroupNormalization(2) if is_exact else layers.BatchNormalization(scale=False))(rows))
    rows = layers.Dense(16, activation="relu")(layers.GlobalAveragePooling2D()(rows))
    return keras.Model(given, layers.Dense(10)(rows if is_exact else layers.Dropout(0.5)(rows)))


def equal_on_all_ranks(values: list[Any]) -> None:
    for other in hvd.allgather_object(values):
        for mine, theirs in zip(values, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def tensorflow_guide() -> None:
    """A strategy, tf.data, a checkpoint every epoch, and a second run that begins with the last one."""
    import tensorflow as tf
    strategy, rank = begin()
    x, y = IMAGES.reshape(-1, 144) / 255, DIGITS.astype("float32")
    train, validation, test = (tf.data.Dataset.from_tensor_slices((x[part], y[part])).batch(BATCH)
                               for part in (slice(64), slice(64, 80), slice(80, 96)))
    directory = Path(once(tempfile.mkdtemp))

    def compiled() -> Any:
        keras.utils.set_random_seed(1 + 7 * rank)
        given = keras.Input((144,))
        rows = layers.Dense(8, activation="relu")(layers.Dense(8, activation="relu")(given))
        model = keras.Model(given, layers.Dense(10)(rows))
        model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=[keras.metrics.SparseCategoricalAccuracy()])
        return model

    def run(name: str) -> list[float]:
        saved = sorted(directory.glob(f"{name}-*.keras"))
        model = keras.models.load_model(saved[-1]) if saved else compiled()
        path = str(directory / f"{name}-{len(saved)}{{epoch}}.keras")
        callbacks = [keras.callbacks.ModelCheckpoint(path, save_freq="epoch")]
        history = model.fit(train, epochs=2, callbacks=callbacks, validation_data=validation, verbose=0)
        return [*history.history["loss"], *history.history["val_loss"], *model.evaluate(test, verbose=0)]
    for _ in range(2):
        with strategy.scope():
            mine = run("scope")
        theirs = once(lambda: run("alone"))
        np.testing.assert_allclose(mine, theirs, rtol=1e-4)
        hvd.barrier()
    once(lambda: shutil.rmtree(directory))


def torch_guide() -> None:
    """DistributedDataParallel over a Keras model, on the backend of this package, and plain torch optimizers."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    rank, size = ranks()
    dataset = TensorDataset(torch.from_numpy(IMAGES), torch.from_numpy(DIGITS))

    def train(model: Any, loader: Any) -> None:
        optimizer, loss_fn = torch.optim.Adam(model.parameters(), lr=1e-3), torch.nn.CrossEntropyLoss()
        for _ in range(2):
            for inputs, targets in loader:
                loss = loss_fn(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    directory = once(tempfile.mkdtemp)
    dist.init_process_group("hvdlite", f"file://{directory}/store", rank=rank, world_size=size)
    for is_exact in (True, False):
        model = convnet(is_exact=is_exact)
        sampler: Any = DistributedSampler(dataset, shuffle=False)
        loader = DataLoader(dataset, sampler=sampler, batch_size=BATCH // size)
        train(torch.nn.parallel.DistributedDataParallel(model), loader)
        equal_on_all_ranks(values_of(model.trainable_variables))
        if is_exact and rank == 0:  # a sampler deals samples out in turns, so batches are one process's
            alone = convnet(is_exact=True)
            train(alone, DataLoader(dataset, batch_size=BATCH))
            for mine, theirs in zip(*(values_of(each.trainable_variables) for each in (model, alone)), strict=True):
                np.testing.assert_allclose(mine, theirs, atol=1e-4)
    dist.destroy_process_group()
    hvd.barrier()
    once(lambda: shutil.rmtree(directory))


def jax_guide() -> None:
    """A jitted step with `stateless_call` and `stateless_apply`, on arrays that are replicated over a mesh."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    rank, size = ranks()
    devices = np.array(jax.local_devices())
    replicated, sharded = (NamedSharding(Mesh(devices, ("batch",)), spec)
                           for spec in (PartitionSpec(), PartitionSpec("batch")))

    def train(model: Any, optimizer: Any, batches: list[Any]) -> tuple[list[float], list[Any]]:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer.build(model.trainable_variables)

        def compute_loss(trained: Any, others: Any, x: Any, y: Any) -> Any:
            found, others = model.stateless_call(trained, others, x, training=True)
            return loss(y, found), others
        compute_gradients = jax.value_and_grad(compute_loss, has_aux=True)

        @jax.jit
        def train_step(state: Any, x: Any, y: Any) -> Any:
            trained, others, optimizer_variables = state
            (value, others), gradients = compute_gradients(trained, others, x, y)
            trained, optimizer_variables = optimizer.stateless_apply(optimizer_variables, gradients, trained)
            return value, (trained, others, optimizer_variables)
        state = jax.device_put(([each.value for each in model.trainable_variables],
                                [each.value for each in model.non_trainable_variables],
                                [each.value for each in optimizer.variables]), replicated)
        values = []
        for _ in range(2):
            for x, y in batches:
                value, state = train_step(state, jax.device_put(x, sharded), y)
                values.append(float(value))
        return values, [np.asarray(each) for each in state[0]]
    batches = [(IMAGES[begin:begin + BATCH], DIGITS[begin:begin + BATCH]) for begin in range(0, len(IMAGES), BATCH)]
    for is_exact in (True, False):
        model = convnet(is_exact=is_exact)
        hvd.broadcast_variables(model.variables, 0)
        mine, weights = train(model, hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)),
                              [(x[rank::size], y[rank::size]) for x, y in batches])
        equal_on_all_ranks(weights)
        if is_exact:
            expected, alone = once(lambda: train(convnet(is_exact=True), keras.optimizers.Adam(1e-3), batches))
            np.testing.assert_allclose(np.mean(hvd.allgather_object(mine), axis=0), expected, rtol=1e-4)
            for one, other in zip(weights, alone, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-4)


def ranks() -> tuple[int, int]:
    hvd.init()
    return hvd.rank(), hvd.size()
