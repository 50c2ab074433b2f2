"""Programs of test_stopping.py."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from hvdlite_tf.keras.distributed_model import WRITERS
from hvdlite_tf.keras.stopping import StopTogetherCallback, refuse_uneven_steps
from tests.raising import raises
from tests.tf.programs.mirroring import (
    X,
    Y,
    begin,
    build,
    compiled,
    mirrored,
    same,
    sgd,
)


class Deciding(keras.callbacks.Callback):
    """Stops training on rank 1, in one hook and at one number."""

    def __init__(self, hook: str, at: int) -> None:
        super().__init__()
        self.at = at
        setattr(self, hook, self.decide)

    def decide(self, number: int, logs: Any = None) -> None:
        if number == self.at and hvd.rank() == 1:
            self.model.stop_training = True


class Counting(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int | str] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append("end")


class Checking(keras.callbacks.Callback):
    def on_train_begin(self, logs: Any = None) -> None:
        refuse_uneven_steps(self)


class Custom(keras.Model):
    """Its steps have logs that differ between ranks."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        super().train_step(data)
        return {"own": keras.ops.mean(keras.ops.abs(self(x) - y))}


class Batches(keras.utils.PyDataset):
    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def iterations(model: Any) -> int:
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def custom() -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    model = Custom(inputs, keras.layers.Dense(2)(inputs))
    model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    return model


def fit_on_uneven_steps(*callbacks: Any) -> Any:
    """Fit outside of the scope: rank 0 has four batches, and rank 1 two."""
    model = build(1)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", run_eagerly=True)
    rows = range(hvd.rank(), 4 if hvd.rank() else 8, 2)
    batches = [(X[10 * row:10 * row + 10], Y[10 * row:10 * row + 10]) for row in rows]
    model.fit(Batches(batches), epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def ranks_stop_together() -> None:
    strategy, rank = begin()
    one, other = mirrored(strategy, sgd, run_eagerly=True), compiled(sgd, run_eagerly=True)
    for hook, at, expected in (("on_train_batch_end", 1, [0, 1, "end"]), ("on_train_batch_begin", 0, [0, "end"]),
                               ("on_epoch_begin", 1, [0, 1, 2, "end", 0, "end"]), ("on_epoch_end", 0, [0, 1, 2, "end"])):
        counting = Counting()
        one.fit(X[:30], Y[:30], batch_size=10, epochs=2, verbose=0, callbacks=[counting, Deciding(hook, at)])
        assert counting.seen == expected, (hook, counting.seen)
    before = iterations(one)  # one rank alone has the callback
    one.fit(X[:30], Y[:30], batch_size=10, verbose=0, callbacks=[Deciding("on_train_batch_end", 1)] if rank == 1 else [])
    assert iterations(one) == before + 2

    # A loss that only rank 0 sees; logs of a custom step, which differ between ranks.
    broken = Y.copy()
    broken[12] = np.nan
    for model in (one, other):
        counting = Counting()
        weights = model.get_weights()
        model.fit(X[:50], broken[:50], batch_size=10, epochs=3, shuffle=False, verbose=0,
                  callbacks=[counting, keras.callbacks.TerminateOnNaN()])
        model.set_weights(weights)
        assert counting.seen == [0, 1, "end"], counting.seen
    if keras.backend.backend() != "jax":  # whose custom steps return metrics
        with strategy.scope():
            mine = custom()
        histories = [model.fit(X[:100], Y[:100], batch_size=10, epochs=5, shuffle=False, verbose=0, callbacks=[
            keras.callbacks.EarlyStopping("own", patience=0, min_delta=0.3, mode="min")]).history
            for model in (mine, custom())]
        np.testing.assert_allclose(histories[0]["own"], histories[1]["own"], rtol=1e-4)
        assert len(histories[0]["own"]) < 5

    assert not hasattr(keras.callbacks, "OrbaxCheckpoint") or keras.callbacks.OrbaxCheckpoint in WRITERS
    _ranks_with_other_numbers_of_steps(rank)


def a_signal_to_one_rank_stops_all() -> None:
    """Run last: the stop remains requested."""
    _, rank = begin()

    class Warned(keras.callbacks.Callback):
        """Gets a scheduler's warning on one rank."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if rank == 1 and batch == 1:
                signal.raise_signal(signal.SIGUSR1)

    model, counting = compiled(sgd), Counting()
    assert not hvd.stop_requested()
    model.fit(X[:100], Y[:100], batch_size=10, epochs=50, verbose=0, callbacks=[
        Warned(), counting, hvd.callbacks.StopOnRequestCallback()])
    assert hvd.allgather_object(counting.seen) == [counting.seen] * 2 and counting.seen[-1] == "end", counting.seen
    assert counting.seen.count("end") < 50 and hvd.stop_requested(), counting.seen


def _ranks_with_other_numbers_of_steps(rank: int) -> None:
    counting = Counting()
    model = fit_on_uneven_steps(counting, StopTogetherCallback())
    assert counting.seen == [*range(2 if rank else 4), "end"] * 2 and iterations(model) == 4  # two batches pass untrained
    alone = build(1)
    alone.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    alone.fit(X[:40], Y[:40], batch_size=20, epochs=2, shuffle=False, verbose=0)
    same(model, alone)
    counting = Counting()
    fit_on_uneven_steps(Deciding("on_train_batch_end", 0), counting, StopTogetherCallback(every_batch=rank == 0))
    assert counting.seen == [0, "end"]
    raises(ValueError, "ranks have [4, 2] steps in an epoch", lambda: fit_on_uneven_steps(Checking()))
    fit_on_uneven_steps(Checking(), StopTogetherCallback())
