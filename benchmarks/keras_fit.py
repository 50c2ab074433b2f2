"""Training the Keras example's CNN on the backend that KERAS_BACKEND names: images/s of all ranks, and CPU time of a step.

"fit" is Keras' `fit` with a `DistributedOptimizer`, "tape" a loop with a `DistributedGradientTape`, and "ddp" the same model
in torch's DistributedDataParallel with a loop, as Keras' guide has it. A ceiling is the same training on ranks that do not
communicate. "one process" is `fit` on rank 0, while the other ranks wait. CPU time is rank 0's, in all its threads; other
processes on the machine change it less.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from benchmarks.harness import Bench, median, say

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import keras_fashion_mnist

BATCH, STEPS = 64, 40
"""Images of a rank's step, and steps of a measured call."""
Work = Callable[[], None]


def timed(work: Work, used: list[float]) -> Work:
    """Return what does the same work, and appends the seconds of CPU time that this process used."""
    def measured() -> None:
        before = time.process_time()
        work()
        used.append(time.process_time() - before)
    return measured


def tensorflow_batches(images: np.ndarray, labels: np.ndarray, batch: int) -> object:
    """Return a `tf.data.Dataset` of batches.

    Its autotuning is off: its thread looks after 10 ms, 20 ms, 40 ms and so on, and `fit` returns only when it looks again,
    so a `fit` of 2.7 s takes 5.2 s (TensorFlow 2.21, Keras 3.15, one process, arrays or a dataset).
    """
    import tensorflow as tf
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch).with_options(options)


def fits(images: np.ndarray, labels: np.ndarray) -> dict[str, Work]:
    """Return the contenders that call `fit`."""
    on_torch = keras.backend.backend() == "torch"
    data = tensorflow_batches(images, labels, BATCH) if keras.backend.backend() == "tensorflow" else None

    def made(optimizer: keras.Optimizer, ranks: int) -> Work:
        keras.utils.set_random_seed(1)
        model = keras_fashion_mnist.build()
        model.compile(optimizer, loss(), jit_compile=keras.backend.backend() == "jax",
                      steps_per_execution=1 if on_torch else 10)

        def train() -> None:
            if hvd.rank() < ranks and data is not None:
                model.fit(data, verbose=0)
            elif hvd.rank() < ranks:
                model.fit(images, labels, batch_size=BATCH, verbose=0)
        return train
    return {"fit ceiling": made(sgd(), hvd.size()), "fit": made(hvd.DistributedOptimizer(sgd()), hvd.size()),
            "one process": made(sgd(), 1)}


def tapes(images: np.ndarray, labels: np.ndarray) -> dict[str, Work]:
    """Return the contenders with loops on TensorFlow."""
    import tensorflow as tf

    import hvdlite_tf
    batches = [(tf.constant(images[at:at + BATCH]), tf.constant(labels[at:at + BATCH]))
               for at in range(0, len(images), BATCH)]

    def made(wrap: Callable[[tf.GradientTape], tf.GradientTape]) -> Work:
        keras.utils.set_random_seed(1)
        model, optimizer, value_of = keras_fashion_mnist.build(), sgd(), loss()
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(pixels: tf.Tensor, targets: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                value = value_of(targets, model(pixels, training=True))
            variables = model.trainable_variables
            gradients = wrap(tape).gradient(value, [variable.value for variable in variables])
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        def train() -> None:
            for pixels, targets in batches:
                step(pixels, targets)
        return train
    return {"tape ceiling": made(lambda tape: tape), "tape": made(hvdlite_tf.DistributedGradientTape)}


def loops(images: np.ndarray, labels: np.ndarray) -> dict[str, Work]:
    """Return the contenders with loops on torch."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    pixels, targets = torch.from_numpy(images), torch.from_numpy(labels)

    def made(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Work:
        keras.utils.set_random_seed(1)
        model = wrap(keras_fashion_mnist.build())
        optimizer, value_of = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), torch.nn.CrossEntropyLoss()

        def train() -> None:
            for at in range(0, len(images), BATCH):
                optimizer.zero_grad()
                value_of(model(pixels[at:at + BATCH]), targets[at:at + BATCH]).backward()
                optimizer.step()
        return train
    return {"loop ceiling": made(lambda model: model),
            "ddp": made(lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))}


def sgd() -> keras.Optimizer:
    """Return a new optimizer."""
    return keras.optimizers.SGD(0.01, momentum=0.9)


def loss() -> keras.Loss:
    """Return the loss function."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main() -> None:
    backend = keras.backend.backend()
    bench = Bench.start(__doc__)
    images = np.random.default_rng(0).normal(size=(BATCH * STEPS, 28, 28, 1)).astype("float32")
    labels = np.random.default_rng(1).integers(0, 10, BATCH * STEPS)
    contenders = fits(images, labels) | {"tensorflow": tapes, "torch": loops}.get(backend, lambda *_: {})(images, labels)
    used: dict[str, list[float]] = {who: [] for who in contenders}
    works = {who: timed(work, used[who]) for who, work in contenders.items()}
    seconds = {who: median(values) for who, values in bench.interleave(works, warmup=1).items()}
    speed = {who: BATCH * STEPS * (1 if who == "one process" else hvd.size()) / value for who, value in seconds.items()}
    step = {who: median(values[1:]) / STEPS * 1e3 for who, values in used.items()}  # the first call compiles
    say(f"Keras on {backend:12}" + "  ".join(f"{who} {value:.0f}/s, {step[who]:.1f} ms" for who, value in speed.items()))
    bench.finish([{"backend": backend, "batch": BATCH, "images_per_second": speed, "cpu_milliseconds_of_a_step": step}])


if __name__ == "__main__":
    main()
