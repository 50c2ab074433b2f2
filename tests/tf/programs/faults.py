"""Programs of test_faults.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf.keras as hvd


class Fault(keras.callbacks.Callback):
    """Writes "there" after some steps, and then fails on rank 1: "raise", "kill", or not at all."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3:
            print("there", flush=True)
            if hvd.rank() == 1 and self.fault == "raise":
                raise RuntimeError("out of paper")
            if hvd.rank() == 1 and self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)


def fit_with_a_fault(fault: str) -> None:
    hvd.init()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    try:
        model.fit(np.ones((800_000, 6)), np.ones((800_000, 2)), batch_size=8, verbose=0, callbacks=[Fault(fault)])
    except tf.errors.UnknownError as error:
        assert error.error_code == tf.errors.UNKNOWN and isinstance(error, hvd.PeerLostError) and error.rank == 1
        print("caught", type(error).__name__, flush=True)
        raise


def fit_until_interrupted() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's jobs in the background begin without it
    fit_with_a_fault("none")
