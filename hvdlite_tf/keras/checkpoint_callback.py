"""The callback that saves a training of `fit`, and resumes it (docs/checkpoints.md)."""

from __future__ import annotations

import os
from typing import Any

import keras

from hvdlite.training.checkpoints.every import Every
from hvdlite_tf.keras.backends import with_errors_of_backend
from hvdlite_tf.keras.checkpoints import load, save


class Checkpoint(keras.callbacks.Callback):
    """Saves model, optimizer and position with `hvd.save`, and resumes by itself when `fit` begins with such a directory.

    Give it to `fit` on all ranks, before callbacks that change the model at the end of an epoch. `fit` goes on with the
    epoch in which it was, and returns at once when all epochs are done. What it is given is saved too: with `data`, from
    `hvd.resumable`, at any batch; without it at ends of epochs, because an epoch could only begin again.

    It also saves at the end of `fit`: after `StopOnRequestCallback` has ended it, nothing is lost.

    Args:
        directory: as in `hvd.save`.
        every: the time between two checkpoints: seconds, or such as "90 s", "10 min", "2 h". Rank 0's clock counts.
        objects: more to save and load, by name.

    Raises:
        ValueError: for something else than an interval.
    """

    def __init__(self, directory: str | os.PathLike[str], every: str | float = "10 min", **objects: Any) -> None:
        super().__init__()
        self._directory, self._objects = directory, objects
        self._every = Every(every)
        self._is_due = False
        self._epoch = 0  # the present one
        self._saved: Any = None  # the position of the last checkpoint
        self._position: tuple[int, int] = (0, 0)  # epoch and batch

    @with_errors_of_backend
    def on_train_begin(self, logs: Any = None) -> None:
        """Load the newest checkpoint, if there is one."""
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        found = load(self._directory, **self._all())
        if found is not None:
            self.model._initial_epoch = found["epoch"]
            self._saved = self._position = (found["epoch"], found["batch"])

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, if it is time and the data can go on from here."""
        self._position = (self._epoch, batch + 1)
        self._is_due = self._every.is_due() or self._is_due
        if self._is_due and "data" in self._objects:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if it has become time in this epoch."""
        if not self.model.stop_training or self._is_last(epoch):
            self._position = (epoch + 1, 0)
        if self._is_due:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Save where `fit` has ended."""
        if self._saved != self._position:
            self._save()

    def _is_last(self, epoch: int) -> bool:
        steps = self.params.get("steps")
        return steps is not None and self._position == (epoch, steps)

    def _all(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.model.optimizer, **self._objects}

    @with_errors_of_backend
    def _save(self) -> None:
        self._is_due = False
        epoch, batch = self._saved = self._position
        save(self._directory, **self._all(), epoch=epoch, batch=batch)
