"""Train with a loop of your own on any backend of Keras 3; training ends when the accuracy no longer rises.

    hvdrun -np 2 python examples/keras_custom_loop.py
    KERAS_BACKEND=torch hvdrun -np 2 python examples/keras_custom_loop.py      # or jax

`model.train_on_batch` makes a step. For a loop with `tf.GradientTape` see tensorflow_fashion_mnist.py.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from keras_fashion_mnist import build, share

import hvdlite_tf.keras as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="at most (default: 10)")
    parser.add_argument("--patience", type=int, default=2, help="end after so many epochs without progress (default: 2)")
    parser.add_argument("--batch-size", type=int, default=64, help="per rank (default: 64)")
    parser.add_argument("--lr", type=float, default=0.01, help="for one rank; multiplied by the ranks (default: 0.01)")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--data-dir", help="where the four .gz files are")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()
    keras.utils.set_random_seed(args.seed + hvd.rank())
    x, y = share(args, "train", args.limit)
    test_x, test_y = share(args, "test", None)
    model = build()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    order, best, waited = np.random.default_rng(args.seed + hvd.rank()), 0.0, 0
    for epoch in range(1, args.epochs + 1):
        shuffled = order.permutation(len(x))
        for begin in range(0, len(x) - args.batch_size + 1, args.batch_size):
            batch = shuffled[begin:begin + args.batch_size]
            model.train_on_batch(x[batch], y[batch])
            hvd.record_step(len(batch))  # for hvdrun --monitor, --scaling and --sweep
        hits = sum(np.sum(model.predict_on_batch(test_x[begin:begin + 1000]).argmax(1) == test_y[begin:begin + 1000])
                   for begin in range(0, len(test_x), 1000))
        accuracy = float(hvd.allreduce(np.float32(hits / len(test_x)), name="accuracy"))
        if hvd.rank() == 0:
            print(f"epoch {epoch}: test accuracy {accuracy:.4f}", flush=True)
        best, waited = (accuracy, 0) if accuracy > best else (best, waited + 1)
        if waited == args.patience:  # on all ranks alike: the accuracy is that of all
            break
    hvd.shutdown()


if __name__ == "__main__":
    main()
