"""Train a small CNN on Fashion-MNIST in the scope of a strategy: everything else is plain Keras.

    hvdrun -np 2 python examples/keras_mirrored_scope.py        # or KERAS_BACKEND=torch, or jax; or without hvdrun
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import fashion_mnist
import keras

import hvdlite_tf.keras as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--data-dir", help="where the four .gz files are")
parser.add_argument("--limit", type=int, help="use only so many training images")
args = parser.parse_args()

strategy = hvd.MirroredStrategy()
if hvd.local_rank() == 0:
    fashion_mnist.find(args.data_dir)
hvd.barrier()
x, y, test_x, test_y = (array for part in ("train", "test") for array in
                        fashion_mnist.load(fashion_mnist.find(args.data_dir, download=False), part))
x, test_x = ((images[..., None].astype("float32") / 255 - 0.2860) / 0.3530 for images in (x, test_x))
x, y = x[:args.limit], y[:args.limit]

with strategy.scope():
    model = keras.Sequential([
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Flatten(), keras.layers.Dense(250, activation="relu"), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(args.lr, momentum=0.9),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

for epoch in range(args.epochs):
    started = time.perf_counter()
    model.fit(x, y, batch_size=args.batch_size, verbose=0)
    seconds = time.perf_counter() - started
    loss, accuracy = model.evaluate(test_x, test_y, batch_size=2000, verbose=0)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: {seconds:.1f} s, {len(x) / seconds:.0f} images/s on {hvd.size()} ranks, "
              f"test loss {loss:.4f}, test accuracy {accuracy:.4f}", flush=True)
