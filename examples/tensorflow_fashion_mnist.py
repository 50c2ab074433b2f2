"""Train a small CNN on Fashion-MNIST with a custom TensorFlow loop, on as many ranks as the launcher starts.

    hvdrun -np 2 python examples/tensorflow_fashion_mnist.py
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras_fashion_mnist import arguments, build, share

import hvdlite_tf as hvd


def main() -> None:
    args = arguments()
    hvd.init()
    keras.utils.set_random_seed(args.seed + hvd.rank())
    x, y = share(args, "train", args.limit)
    test_x, test_y = share(args, "test", None)
    model, loss = build(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(args.lr, momentum=args.momentum)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    steps = len(x) // args.batch_size
    warmup = max(1, args.warmup_epochs * steps)

    @tf.function
    def train(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=getattr(hvd.Compression, args.compression))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    @tf.function
    def correct(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.cast(tf.argmax(model(images), 1) == labels, tf.float32))

    accuracy, order = 0.0, np.random.default_rng(args.seed + hvd.rank())
    for epoch in range(1, args.epochs + 1):
        started, shuffled = time.perf_counter(), order.permutation(len(x))
        for step in range(steps):
            done = (epoch - 1) * steps + step
            optimizer.learning_rate = args.lr * (1 + (hvd.size() - 1) * min(1.0, (done + 1) / warmup))
            batch = shuffled[step * args.batch_size:(step + 1) * args.batch_size]
            train(x[batch], y[batch])
            hvd.record_step(len(batch))  # for hvdrun --monitor, --scaling and --sweep
        seconds = time.perf_counter() - started
        hits = sum(float(correct(test_x[begin:begin + 1000], test_y[begin:begin + 1000]))
                   for begin in range(0, len(test_x), 1000))
        accuracy = float(hvd.allreduce(tf.constant(hits / len(test_x)), name="accuracy"))
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {seconds:.1f} s, {steps * args.batch_size * hvd.size() / seconds:.0f} images/s on "
                  f"{hvd.size()} ranks, test accuracy {accuracy:.4f}", flush=True)
    hvd.shutdown()
    if accuracy < args.minimum_accuracy:
        raise SystemExit(f"test accuracy {accuracy:.4f} is below {args.minimum_accuracy}")


if __name__ == "__main__":
    main()
