"""Programs of test_checkpoints.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd


def fit(folder: str, epochs: int, stop_after: int, has_place: bool = False) -> list[float]:
    """Train with `Checkpoint`; return the sums of the variables.

    Args:
        stop_after: ask to stop after so many batches; 0: not at all.
        has_place: whether the data know their place.
    """
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    x = np.random.default_rng(0).random((64, 4)).astype("float32")
    data = hvd.resumable(x, x.sum(axis=1), batch_size=8, seed=3)
    mine = x[hvd.rank()::hvd.size()]
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.3),
                              keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    begun = []

    class Stop(keras.callbacks.Callback):
        batches = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            begun.append(epoch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            if self.batches == stop_after:
                self.model.stop_training = True

    given: dict[str, Any] = {"x": data} if has_place else {
        "x": mine, "y": mine.sum(axis=1), "batch_size": 8, "shuffle": False}
    place = {"data": data} if has_place else {}
    model.fit(**given, epochs=epochs, verbose=0, callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), *([data.callback] if has_place else []), Stop(),
        hvd.callbacks.Checkpoint(folder, every="1 h", **place)])
    hvd.shutdown()
    return [*map(float, begun), *(float(np.sum(keras.ops.convert_to_numpy(each))) for each in model.variables)]
