"""Train a small CNN on Fashion-MNIST with Keras 3, while ranks are lost and others join.

    hvdrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/elastic_fashion_mnist_keras.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import fashion_mnist
import keras
import numpy as np
from keras_fashion_mnist import build

import hvdlite_tf.keras as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.01, help="for one rank; multiplied by the number of ranks")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--batches-per-commit", type=int, default=10)
    parser.add_argument("--data-dir", help="where the four .gz files are")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--minimum-accuracy", type=float, default=0.0, help="fail below this")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load(args: argparse.Namespace, part: str, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    images, labels = fashion_mnist.load(fashion_mnist.find(args.data_dir), part)
    return ((images[:limit, :, :, None].astype("float32") / 255 - 0.2860) / 0.3530), labels[:limit].astype("int64")


def batches(x: np.ndarray, y: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield random batches for ever, other ones on each rank."""
    random = np.random.default_rng()
    while True:
        chosen = random.integers(len(x), size=size)
        yield x[chosen], y[chosen]


class Report(keras.callbacks.Callback):
    """Print on rank 0 what an epoch has reached, and keep it in the state."""

    def __init__(self, state: hvd.elastic.KerasState) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.state.accuracy = float(logs["val_accuracy"])
        if hvd.rank() == 0:
            print(f"epoch {self.state.epoch + 1}: {hvd.size()} ranks, test accuracy {self.state.accuracy:.4f}", flush=True)


def main() -> None:
    args = arguments()
    hvd.init()  # no collectives from here to train(): ranks that join later would be alone with them
    keras.utils.set_random_seed(args.seed)
    x, y = load(args, "train", args.limit)
    test_x, test_y = load(args, "test", None)
    model = build()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr * hvd.size(), momentum=args.momentum)),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    def scale_learning_rate() -> None:
        model.optimizer.learning_rate = args.lr * hvd.size()

    @hvd.elastic.run
    def train(state: hvd.elastic.KerasState) -> float:
        processes = hvd.allgather_object(os.getpid())
        if hvd.rank() == 0:
            print(f"{hvd.size()} ranks, processes {processes}: epoch {state.epoch + 1} goes on", flush=True)
        callbacks = [hvd.callbacks.MetricAverageCallback(), Report(state), hvd.elastic.UpdateBatchStateCallback(state),
                     hvd.elastic.UpdateEpochStateCallback(state),
                     hvd.elastic.CommitStateCallback(state, args.batches_per_commit)]
        share = slice(hvd.rank(), len(test_x) // hvd.size() * hvd.size(), hvd.size())
        if state.epoch < args.epochs:
            model.fit(batches(x, y, args.batch_size), steps_per_epoch=len(x) // (args.batch_size * hvd.size()),
                      epochs=args.epochs - state.epoch, validation_data=(test_x[share], test_y[share]),
                      validation_batch_size=1000, callbacks=callbacks, shuffle=False, verbose=0)
        return state.accuracy

    state = hvd.elastic.KerasState(model, batch=0, epoch=0, accuracy=0.0)
    state.register_reset_callbacks([scale_learning_rate])
    accuracy = train(state)
    hvd.shutdown()
    if accuracy < args.minimum_accuracy:
        raise SystemExit(f"test accuracy {accuracy:.4f} is below {args.minimum_accuracy}")


if __name__ == "__main__":
    main()
