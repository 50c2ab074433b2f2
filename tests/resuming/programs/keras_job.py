"""The same with Keras: `fit` with `Checkpoint`; a step's number is that of the samples that are finished."""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

import keras
import numpy as np

import hvdlite_tf.keras as hvd

SAMPLES, BATCH, EPOCHS = 128, 8, 3


class Ledger(keras.callbacks.Callback):
    """Writes down each finished step, before it is saved."""

    def __init__(self, lines: TextIO, data: Any) -> None:
        super().__init__()
        self._lines, self._data = lines, data
        self._rows: list[list[int]] = []

    def begin(self) -> None:
        """Write down where training begins."""
        self._lines.write(json.dumps({"begins": self._position()}) + "\n")
        hvd.stop_requested()  # from the first call on, signals do not end the process
        print("trains", flush=True)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._rows = [[int(row) for row in rows] for _, rows in self._data.rest(self._data._consumed)]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done = {"step": self._position(), "epoch": self._data.epoch, "samples": self._rows[batch]}
        self._lines.write(json.dumps(done) + "\n")
        time.sleep(0.01)

    def _position(self) -> int:
        return int(self._data.epoch * SAMPLES + self._data._consumed)


def train(folder: str, ledger: str, run: int, workers: int, every: int) -> None:
    """Train to the end, or until the stop; see `torch_job`.

    Args:
        every: hundredths of a second between two checkpoints.
    """
    del workers
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    x = np.random.default_rng(0).random((SAMPLES, 6)).astype("float32")
    data = hvd.resumable(x, x.sum(axis=1), batch_size=BATCH, seed=5)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16), keras.layers.BatchNormalization(),
                              keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    with open(f"{ledger}/{run}.{hvd.rank()}", "w", encoding="utf-8", buffering=1) as lines:
        written = Ledger(lines, data)
        model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0), data.callback, written,
            hvd.callbacks.Checkpoint(folder, every=every / 100, data=data),
            keras.callbacks.LambdaCallback(on_train_begin=lambda logs: written.begin()),
            hvd.callbacks.StopOnRequestCallback()])
    weights = [float(value) for each in model.trainable_variables for value in keras.ops.convert_to_numpy(each).flat]
    with open(f"{ledger}/weights.{run}.{hvd.rank()}", "w", encoding="utf-8") as file:
        json.dump(weights, file)
    print("has finished", flush=True)
    hvd.shutdown()
