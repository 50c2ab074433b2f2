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
    `hvd.resumable`, at any batch (after `data.callback` in the list); without it at ends of epochs, because an epoch could
    only begin again.

    It also saves at the end of `fit`: after `StopOnRequestCallback` has ended it, nothing is lost.

    Args:
        directory: as in `hvd.save`.
        every: the time between two checkpoints: seconds, or such as "90 s", "10 min", "2 h". Rank 0's clock counts.
        objects: more to save and load, by name.

    Raises:
        ValueError: for something else than an interval, and for an object of a name that it needs itself.
    """

    def __init__(self, directory: str | os.PathLike[str], every: str | float = "10 min", **objects: Any) -> None:
        super().__init__()
        refused = sorted({"model", "optimizer", "epoch"} & set(objects))
        if refused:
            raise ValueError(f"Checkpoint saves '{refused[0]}' itself; call the object something else")
        self._directory, self._objects = os.path.abspath(directory), objects
        self._every = Every(every)
        self._is_due = False
        self._is_saved = False  # what has been trained
        self._epoch = 0  # in which training would go on
        self._batch = -1  # the last one of the present epoch

    @with_errors_of_backend
    def on_train_begin(self, logs: Any = None) -> None:
        """Load the newest checkpoint, if there is one."""
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        found = load(self._directory, **self._all())
        self.model._hvdlite_resumed = found is not None  # what it has must not be broadcast again
        if found is not None:
            data = self._objects.get("data")
            self.model._initial_epoch = self._epoch = found["epoch"] if data is None else data.epoch
            self._is_saved = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self._epoch, self._batch = epoch, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save, if it is time and the data can go on from here."""
        self._batch, self._is_saved = batch, False
        self._is_due = self._every.is_due() or self._is_due
        if self._is_due and "data" in self._objects:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if it has become time in this epoch."""
        if not self.model.stop_training or self._batch + 1 == self.params.get("steps"):
            self._epoch, self._is_saved = epoch + 1, False
        if self._is_due:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        """Save where `fit` has ended."""
        if not self._is_saved:
            self._save()

    def _all(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.model.optimizer, **self._objects}

    @with_errors_of_backend
    def _save(self) -> None:
        self._is_due, self._is_saved = False, True
        save(self._directory, **self._all(), epoch=self._epoch)
