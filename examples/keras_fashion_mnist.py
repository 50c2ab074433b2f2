"""Train a small CNN on Fashion-MNIST with Keras 3, on as many ranks as the launcher starts.

    hvdrun -np 2 python examples/keras_fashion_mnist.py
    KERAS_BACKEND=torch hvdrun -np 2 python examples/keras_fashion_mnist.py      # or jax
    hvdrun -np 2 --sweep batch-size=64,128,256,512 --until accuracy=0.88 python examples/keras_fashion_mnist.py \
        --base-batch-size 64 --epochs 8                  # the batch size that is the soonest there
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import fashion_mnist
import keras
import numpy as np

import hvdlite_tf.keras as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="per rank")
    parser.add_argument("--lr", type=float, default=0.01, help="for one rank with --base-batch-size; grows in proportion "
                        "to the batch of all ranks")
    parser.add_argument("--base-batch-size", type=int, help="the batch size that --lr is for; None: --batch-size")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--warmup-epochs", type=int, default=1, help="learning rate rises linearly over these")
    parser.add_argument("--data-dir", help="where the four .gz files are")
    parser.add_argument("--compression", choices=["none", "fp16", "bf16"], default="none", help="of gradients")
    parser.add_argument("--checkpoint", help="write the model here (.keras) after every epoch; go on from it when it exists")
    parser.add_argument("--limit", type=int, help="use only so many training images")
    parser.add_argument("--minimum-accuracy", type=float, default=0.0, help="fail below this")
    parser.add_argument("--steps-per-execution", type=int, default=1 if keras.backend.backend() == "torch" else 10,
                        help="steps that Keras runs in one go; on torch one by one")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def build() -> keras.Model:
    """Two convolutions and two dense layers; 421,642 parameters."""
    return keras.Sequential([
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(64, 3, activation="relu"), keras.layers.MaxPooling2D(),
        keras.layers.Flatten(), keras.layers.Dense(250, activation="relu"), keras.layers.Dense(10)])


def share(args: argparse.Namespace, part: str, limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's share of the images, normalised, and their labels; all ranks have equally many."""
    if hvd.local_rank() == 0:
        fashion_mnist.find(args.data_dir)
    hvd.barrier()
    images, labels = fashion_mnist.load(fashion_mnist.find(args.data_dir, download=False), part)
    count = len(images[:limit]) // hvd.size() * hvd.size()
    mine = slice(hvd.rank(), count, hvd.size())
    return ((images[mine, :, :, None].astype("float32") / 255 - 0.2860) / 0.3530), labels[mine].astype("int64")


class Throughput(keras.callbacks.Callback):
    """Print what an epoch did, on rank 0."""

    def __init__(self, samples: int, batch_size: int) -> None:
        super().__init__()
        self.samples, self.batch_size = samples, batch_size

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        hvd.record_step(self.batch_size)  # for hvdrun --monitor, --scaling and --sweep

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.started = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        self.seconds = time.perf_counter() - self.started

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        lr = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        hvd.record_metrics({"accuracy": logs["val_accuracy"], "loss": logs["val_loss"], "lr": lr}, epoch + 1)  # for --until
        if hvd.rank() == 0:
            rate = self.samples / self.seconds
            print(f"epoch {epoch + 1}: {self.seconds:.1f} s, {rate:.0f} images/s on {hvd.size()} ranks, test loss "
                  f"{logs['val_loss']:.4f}, test accuracy {logs['val_accuracy']:.4f}", flush=True)


def main() -> None:
    args = arguments()
    hvd.init()
    keras.utils.set_random_seed(args.seed + hvd.rank())
    x, y = share(args, "train", args.limit)
    test = share(args, "test", None)

    # The linear scaling rule, and a warm-up from the rate of one rank (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
    lr = args.lr * hvd.size() * args.batch_size / (args.base_batch_size or args.batch_size)
    first_epoch = 0
    if args.checkpoint and hvd.broadcast_object(os.path.exists(args.checkpoint)):
        model = hvd.load_model(args.checkpoint)
        first_epoch = int(keras.ops.convert_to_numpy(model.optimizer.iterations)) // -(-len(x) // args.batch_size)
    else:
        model = build()
        optimizer = keras.optimizers.SGD(lr, momentum=args.momentum)
        optimizer = hvd.DistributedOptimizer(optimizer, compression=getattr(hvd.Compression, args.compression))
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"],
                      steps_per_execution=args.steps_per_execution)

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(),
                 Throughput(len(x) * hvd.size(), args.batch_size)]
    if first_epoch == 0 and args.warmup_epochs:
        callbacks.append(hvd.callbacks.LearningRateWarmupCallback(lr, args.warmup_epochs, first_lr=min(lr, args.lr)))
    if args.checkpoint and hvd.rank() == 0:
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint))
    history = model.fit(x, y, batch_size=args.batch_size, epochs=args.epochs, initial_epoch=first_epoch, verbose=0,
                        validation_data=test, validation_batch_size=1000, callbacks=callbacks).history
    if history:
        accuracy = history["val_accuracy"][-1]
    else:  # the checkpoint had all epochs already
        accuracy = float(hvd.allreduce(model.evaluate(*test, batch_size=1000, verbose=0)[1]))
    hvd.shutdown()
    if accuracy < args.minimum_accuracy:
        raise SystemExit(f"test accuracy {accuracy:.4f} is below {args.minimum_accuracy}")


if __name__ == "__main__":
    main()
