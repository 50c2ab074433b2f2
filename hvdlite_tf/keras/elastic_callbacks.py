"""Callbacks that commit an elastic state during `fit`, and keep its `batch` and `epoch` up to date."""

from __future__ import annotations

from typing import Any

import keras

from hvdlite import api

POSITION = "_position_in_epoch"
"""The attribute of a state with the last `batch` that `UpdateBatchStateCallback` has set, and the batches that all ranks
together have done in the epoch."""


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state after every so many batches, and at the end of each epoch.

    The other callbacks of this module note the position before each commit, wherever they are in the list.

    Args:
        state: a `KerasState`, or another state.
        batches_per_commit: the number of batches between commits; the same on all ranks.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit
        self._ended = -1  # the last batch that has ended

    def set_model(self, model: Any) -> None:
        """Forget the callbacks of an earlier `fit`; those of this one come with `set_params`."""
        super().set_model(model)
        vars(self.state)["_positions"] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from the beginning, as every rank does after a change."""
        self.batches_remaining = self.batches_per_commit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to count the epoch's batches."""
        self._ended = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        self.batches_remaining -= batch - self._ended  # several with steps_per_execution
        self._ended = batch
        if self.batches_remaining <= 0:
            self.batches_remaining = self.batches_per_commit
            for position in _positions(self.state):
                position.note_batch(batch)
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        for position in _positions(self.state):
            position.note_epoch(epoch)
        self.state.commit()


class _Position(keras.callbacks.Callback):
    """A callback that keeps a position in a state; what it notes, it may note twice.

    Args:
        state: a `KerasState`, or another state with the attribute that is kept up to date.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        positions = vars(self.state).setdefault("_positions", [])
        positions[:] = [each for each in positions if type(each) is not type(self)] + [self]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note_batch(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note_epoch(epoch)

    def note_batch(self, batch: int) -> None:
        """Note the end of a batch.

        Args:
            batch: its number in the epoch, from 0.
        """

    def note_epoch(self, epoch: int) -> None:
        """Note the end of an epoch.

        Args:
            epoch: its number in this `fit`, from 0.
        """


class UpdateBatchStateCallback(_Position):
    """Sets `state.batch` to the number of the last batch, and to 0 at the end of an epoch.

    The first epoch of a `fit` is shortened by the batches that have been done in it: by those of all ranks together, divided
    by the present number of ranks, when `state.batch` is as this callback has left it; else by `state.batch`. The data of
    that epoch begins where `fit` begins it.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._begin: int | None = None  # the number of the epoch's first batch; None: no epoch has begun
        self._before = 0  # batches of all ranks in earlier worlds

    def on_train_begin(self, logs: Any = None) -> None:
        """Take the position from the state."""
        self._begin = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Find out where the first epoch goes on."""
        if self._begin is not None:
            return
        noted, done = getattr(self.state, POSITION, (0, 0))
        if noted != self.state.batch:
            done = self.state.batch * api.size()
        self._before, self._begin = done, done // api.size()

    def note_batch(self, batch: int) -> None:
        """Note the end of a batch, and end the epoch after its last one."""
        begin = self._begin or 0
        self._note(begin + batch, self._before + (batch + 1) * api.size())
        steps = self.params.get("steps")
        if begin and steps and begin + batch + 1 >= steps and not self.model.stop_training:
            self.model.stop_training = EPOCH_IS_OVER

    def note_epoch(self, epoch: int) -> None:
        """Note the end of an epoch, and go on with the next one."""
        self._begin = self._before = 0
        self._note(0, 0)
        if self.model.stop_training is EPOCH_IS_OVER:
            self.model.stop_training = False

    def _note(self, batch: int, done: int) -> None:
        self.state.batch = batch
        setattr(self.state, POSITION, (batch, done))


class UpdateEpochStateCallback(_Position):
    """Sets `state.epoch` to the number of epochs that have ended, in all calls of `fit` together."""

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._before: int = 0  # epochs of earlier calls
        self._first: int | None = None  # Keras' number of this call's first epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Take the number of epochs from the state."""
        self._before, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note which number Keras begins with."""
        if self._first is None:
            self._first = epoch

    def note_epoch(self, epoch: int) -> None:
        """Note the end of an epoch."""
        self.state.epoch = self._before + epoch - (self._first or 0) + 1


EPOCH_IS_OVER = "epoch is over"
"""What `model.stop_training` is while an epoch is cut short: true, and distinct from a callback's True."""


def _positions(state: Any) -> list[_Position]:
    return vars(state).get("_positions", [])
