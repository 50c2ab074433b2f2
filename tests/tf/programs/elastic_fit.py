"""Members of an elastic job that train with `hvd.elastic.fit`; they write down the samples of each finished step."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from hvdlite.training.mirrored.shares import Shares, shares_of_world
from hvdlite_tf.keras import elastic_fit
from hvdlite_tf.keras.resumable_data import drawn
from tests.raising import raises
from tests.training.random_shares import draw_shares

SAMPLES, EPOCHS = 22, 4
X = np.random.default_rng(0).random((SAMPLES, 3), np.float32)
X[:, 0] = np.arange(SAMPLES, dtype=np.float32) / SAMPLES  # tells which sample it is
Y = X.sum(1, keepdims=True)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Global batches of the same samples."""

    def __init__(self, batch: int) -> None:
        super().__init__(workers=2)
        self.batch = batch

    def __len__(self) -> int:
        return -(-SAMPLES // self.batch)

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return X[rows], Y[rows]


class Told(keras.Model):  # type: ignore[misc]
    """Knows the samples of its last step, if it is run eagerly."""

    last: list[int]

    def train_step(self, *arguments: Any) -> Any:
        if self.run_eagerly:
            object.__setattr__(self, "last", [round(float(each) * SAMPLES) for each in keras.ops.convert_to_numpy(
                arguments[-1][0])[:, 0]])
        return super().train_step(*arguments)


def compiled(distributed: bool = True, eager: bool = False) -> Any:
    keras.utils.set_random_seed(5 + (hvd.rank() if distributed else 0))
    inputs = keras.Input((3,))
    initial = keras.initializers.RandomNormal(seed=1)
    hidden = keras.layers.Dense(4, "tanh", kernel_initializer=initial)(inputs)
    model = Told(inputs, keras.layers.Dense(1, kernel_initializer=initial)(hidden))
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    model.compile(hvd.DistributedOptimizer(optimizer) if distributed else optimizer, "mse", run_eagerly=eager)
    return model


class Watching(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes the ledger; waits for gates, or dies, at bodies that are counted over all epochs.

    Args:
        folder: of the ledger, and of files "gate.N", for each N in `gates`, and "end".
        dies: a member, where it dies ("begin" or "end" of a body, "evaluated"), and how many bodies it has done.
    """

    def __init__(self, state: Any, folder: str, gates: tuple[int, ...], dies: tuple[int, str, int], each: int) -> None:
        super().__init__()
        self._state, self._folder, self._gates, self._dies, self._each = state, Path(folder), gates, dies, each
        self.bodies = 0
        self._member = int(os.environ.get("HVDLITE_MEMBER", hvd.rank()))

    def _at(self, where: str) -> None:
        if (self._member, where, self.bodies) == self._dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        print(f"body {self.bodies} in {hvd.size()}", flush=True)
        time.sleep(0.01 if self._gates else 0)
        while self.bodies in self._gates and not (self._folder / f"gate.{self.bodies}").exists():
            time.sleep(0.01)
        self._at("begin")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        place = self._state._place
        line = [place["epoch"], place["consumed"], hvd.size(), getattr(self.model, "last", [])]
        with open(self._folder / f"ledger.{self._member}", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.bodies += 1
        assert self.bodies == place["epoch"] * self._each + self.params["steps"] - self._left(place), "its attribute goes on"
        self._at("end")

    def _left(self, place: Any) -> int:
        """Return how many bodies of the epoch come after the present one."""
        return len(self._state._left(place["consumed"])) - 1

    def on_test_end(self, logs: Any = None) -> None:
        self._at("evaluated")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._gates and float(hvd.allreduce(float((self._folder / "end").exists()), "end")) > 0:
            self.model.stop_training = True


def train(folder: str, batch: int, kind: str = "arrays", gates: tuple[int, ...] = (),
          dies: tuple[int, str, int] = (-1, "", 0), eager: bool = True, epochs: int = EPOCHS,
          saves: bool = False, shares: Any = None) -> dict[str, Any]:
    """Train, and return what an undisturbed training has, too; shares "drawn" are others in each body."""
    hvd.init()
    if shares == "drawn":
        shares = "auto"
        setattr(elastic_fit, "shares_of_world", shares_drawn)  # noqa: B010 - of the module that calls it
    model = compiled(eager=eager)
    state: Any = hvd.elastic.KerasState(model)
    if saves:
        state.checkpoint(Path(folder) / "checkpoints", every=0.001)
    each = -(-SAMPLES // batch)
    vars(state)["_left"] = lambda consumed: range(each - (consumed if kind == "PyDataset" else consumed // batch))
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", patience=3 if epochs == EPOCHS else 10**6)
    writer = keras.callbacks.ModelCheckpoint(f"{folder}/model.{hvd.rank()}.weights.h5", save_weights_only=True)
    callbacks = [Watching(state, folder, gates, dies, each), stopping, *([] if epochs > EPOCHS else [writer])]
    data = {"x": Batches(batch)} if kind == "PyDataset" else {"x": X, "y": Y, "batch_size": batch}
    history = hvd.elastic.fit(state, **data, epochs=epochs + 6, callbacks=callbacks, verbose=0, validation_data=(X, Y),
                              shares=shares)
    print(f"over at {state.epoch}", flush=True)
    size, seed = hvd.size(), state._place["seed"]
    hvd.shutdown()
    return {"parameters": flat(model), "epochs": history.epoch, "loss": history.history["loss"],
            "val_loss": history.history["val_loss"], "stopped": stopping.stopped_epoch, "size": size,
            "whole": undisturbed(batch, kind, seed, len(history.epoch))}


def shares_drawn(*arguments: Any) -> Shares:
    """Return a world's shares, which are others in each body."""
    shares = shares_of_world(*arguments)
    if shares.is_auto:  # there are other ranks
        draw_shares(shares, 5)
    return shares


def flat(model: Any) -> list[float]:
    return [float(value) for each in model.get_weights() for value in each.flat]


def undisturbed(batch: int, kind: str, seed: int, epochs: int) -> dict[str, Any]:
    """Return what a training in one process has, with the same order."""
    model = compiled(distributed=False)
    losses, validation = [], []
    for epoch in range(epochs):
        if kind == "PyDataset":
            bodies = [Batches(batch)[index] for index in drawn(-(-SAMPLES // batch), seed, epoch)]
        else:
            order = drawn(SAMPLES, seed, epoch)
            bodies = [(X[rows], Y[rows]) for begin in range(0, SAMPLES, batch) for rows in [order[begin:begin + batch]]]
        total = 0.0
        for x, y in bodies:
            model.reset_metrics()
            total += len(x) * float(model.train_on_batch(x, y))
        losses.append(total / SAMPLES)
        validation.append(float(model.evaluate(X, Y, verbose=0)))
    return {"parameters": flat(model), "loss": losses, "val_loss": validation}


def small_batches(folder: str) -> None:
    """Train with batches of two samples on three ranks; the last ranks have the same samples as the others."""
    told = train(folder, 2)
    np.testing.assert_allclose(told["parameters"], told["whole"]["parameters"], atol=1e-4)
    np.testing.assert_allclose(told["loss"], told["whole"]["loss"], atol=1e-4)
    assert [each.name for each in Path(folder).glob("*.h5")] == ["model.0.weights.h5"], "rank 0 alone writes"
    assert told["epochs"] == list(range(EPOCHS)) and told["stopped"] == EPOCHS - 1


def what_is_refused() -> None:
    """Data without places, callbacks that keep them, and arguments that have no meaning."""
    import tensorflow as tf
    hvd.init()
    state = hvd.elastic.KerasState(compiled())
    def refused(error: type[Exception], text: str, *given: Any, **options: Any) -> None:
        raises(error, text, lambda: hvd.elastic.fit(*given, **options))

    refused(TypeError, "give it hvd.elastic.KerasState", hvd.elastic.ObjectState(), X, Y)
    refused(ValueError, "hvd.DistributedOptimizer", hvd.elastic.KerasState(compiled(distributed=False)), X, Y)
    for data in (tf.data.Dataset.from_tensor_slices(X), iter(X)):
        refused(TypeError, f"no {type(data).__name__}", state, data)
    refused(ValueError, "a list of positive numbers", state, X, Y, shares=[1, 0])
    refused(ValueError, "leave out y, sample_weight and batch_size", state, Batches(4), batch_size=4)
    refused(ValueError, "no initial_epoch: set state.epoch", state, X, Y, initial_epoch=1)
    for callback in (hvd.callbacks.Checkpoint("nowhere"), hvd.elastic.CommitStateCallback(state)):
        refused(ValueError, f"a {type(callback).__name__}: leave it out", state, X, Y, callbacks=callback)


def means_of_parts() -> None:
    """Means over rows; what is evaluated counts alike, and ranks without rows do not count."""
    from hvdlite_tf.keras.elastic_fit import _merged
    assert _merged([[2.0, {"loss": 1.0, "val_loss": 3.0}], [6.0, {"loss": 5.0, "val_loss": 4.0}], [0.0, {"loss": 9.0}]]) == [
        8.0, {"loss": 4.0, "val_loss": 3.5}]
    assert _merged([[0.0, {"loss": 0.0}]]) == [0.0, {}]
