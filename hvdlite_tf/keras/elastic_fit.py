"""`hvd.elastic.fit`: a training of Keras whose samples do not depend on the world (docs/elastic.md#keras).

It is `elastic.run` around one `model.fit` per world. Body b of an epoch has the samples b*B to (b+1)*B of the epoch's order,
where B is the global batch; ranks take shards by their shares, and are weighted by rows, as in a scope. A batch with fewer
rows than there are ranks goes to all of them whole. A place counts rows of all ranks: shares may change.

What belongs to the state, as plain data:

- `epoch`, and `_place`: where training goes on, and means of the logs in this epoch so far, which are rank 0's;
- `_callbacks`: the attributes of callbacks. They are replaced, and never changed in place, so boundaries need no copies.

There is a boundary before each body, and one after the last body of an epoch, before the ranks average their logs. An epoch
that goes on at the latter has no body left: its callbacks are told the end of it when `fit` begins.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.training.elastic import run
from hvdlite.training.mirrored.shares import Shares, plain, shares_asked, shares_of_world
from hvdlite.training.objects import allgather_object
from hvdlite.training.positions import by_turns
from hvdlite.training.step_reducer import current_weight
from hvdlite_tf.keras import elastic_callbacks, step
from hvdlite_tf.keras.checkpoints import Checkpoint
from hvdlite_tf.keras.distributed_model import WRITERS
from hvdlite_tf.keras.optimizer import distributed_in
from hvdlite_tf.keras.order import order_seed
from hvdlite_tf.keras.resumable_data import Batches, CountsSteps, ResumableData, Samples
from hvdlite_tf.keras.shards import Sharing, as_arrays, is_arrays, rows_of, select_rows

_REFUSED = {"initial_epoch": "set state.epoch", "validation_split": "give validation_data",
            "steps_per_epoch": "an epoch has all samples"}
_KEEP_PLACES = (Checkpoint, keras.callbacks.BackupAndRestore, elastic_callbacks.CommitStateCallback,
                elastic_callbacks.UpdateBatchStateCallback, elastic_callbacks.UpdateEpochStateCallback)
_NOTHING: list[Any] = [0.0, {}]
"""Means of the logs over no rows."""


def fit(state: Any, x: Any, y: Any = None, *, batch_size: int | None = None, epochs: int = 1, callbacks: Any = None,
        shares: str | Sequence[float] | Mapping[str, float] | None = None,
        **fit_arguments: Any) -> keras.callbacks.History:
    """Train the model of a `KerasState`, like its `fit`, while ranks come and go; returns the history of all epochs.

    Call it on all ranks, with all samples and the same callbacks. It goes on at `state.epoch`, and ends when `epochs` are
    complete. The order of samples depends on rank 0's random seed (`keras.utils.set_random_seed`) and the epoch.

    Args:
        state: of a compiled model; has the attribute `epoch`.
        x: arrays, or a `keras.utils.PyDataset` whose batches are global ones.
        y: with arrays.
        batch_size: samples of a global batch of all ranks together, of arrays; default: 32.
        epochs: their number, from the first world on.
        callbacks: their public attributes with plain data go on: numbers and texts as at the last batch, others as at the
            end of the last epoch. Callbacks that write files run on rank 0 only.
        shares: of the ranks in global batches, as for `MirroredStrategy`: None for equal ones, a list with a number for each
            rank, a dict by host name, or "auto". In each world those of its ranks and hosts count; ranks without a number
            get the mean of the others' shares.
        fit_arguments: of the model's `fit`. Each rank evaluates all of `validation_data`.

    Raises:
        TypeError: for a state without a model, and for data that have no places: generators, tf.data, DataLoaders.
        ValueError: for an optimizer that is not distributed, callbacks that keep places themselves, other shares, and
            arguments of `fit` that have no meaning here.
        MismatchError: on all ranks, when they ask for different shares.
    """
    model = getattr(state, "model", None)
    given = [each for each in keras.tree.flatten(getattr(callbacks, "callbacks", callbacks)) if each is not None]
    _check(model, given, fit_arguments)
    shares_asked(plain(shares), (), is_elastic=True)
    weights = fit_arguments.pop("sample_weight", None)
    shuffles, class_weight = fit_arguments.pop("shuffle", True), fit_arguments.pop("class_weight", None)
    if is_arrays(x):
        arrays = as_arrays(x, y, weights)
    elif not isinstance(x, keras.utils.PyDataset):
        raise TypeError("hvd.elastic.fit shares global batches out by position: give it arrays, or a keras.utils.PyDataset "
                        f"whose batches are global ones, and no {type(x).__name__}")
    elif not (y is None and weights is None and batch_size is None):
        raise ValueError("a PyDataset has targets, weights and the batch size in itself: leave out y, sample_weight and "
                         "batch_size")

    known: Shares | None = None

    def source(seed: int | None, sharing: Sharing) -> _GlobalSamples | _GlobalBatches:
        return _GlobalSamples(arrays, batch_size or 32, seed, sharing) if is_arrays(x) else _GlobalBatches(x, seed, sharing)

    def train(state: Any) -> None:
        nonlocal known
        known = shares_of_world(shares, known)
        sharing = Sharing(known)
        if state._place["epoch"] != state.epoch:  # the script has set it
            state._place = _begin_of(state.epoch, state._place["seed"])
        shared = source(state._place["seed"], sharing)
        data = ResumableData(shared)
        data.class_weight = class_weight
        bodies = _Bodies(data, shared, state, [*given, history], epochs)
        going_on = keras.callbacks.LambdaCallback(on_train_begin=bodies.go_on)
        own = [bodies, sharing, *filter(_runs_here, given), history, going_on]
        quiet = {} if api.rank() == 0 else {"verbose": 0}
        try:
            with _weighted(model):
                model.fit(data, epochs=epochs, initial_epoch=epochs if state._place["stopped"] else data.epoch,
                          callbacks=own, **{**fit_arguments, **quiet})
            bodies.note()
            state._end_bodies()
        finally:
            sharing.end()
            state._in_body, model._initial_epoch = False, None
            data.on_epoch_end()

    history = keras.callbacks.History()
    seed = ((state._place or {}).get("seed") or order_seed(0)[0]) if shuffles else None
    state.epoch = getattr(state, "epoch", 0)
    state._place, state._callbacks = {**(state._place or _begin_of(state.epoch, seed)), "seed": seed, "stopped": False}, None
    run(train)(state)
    return history


def _begin_of(epoch: int, seed: int | None) -> dict[str, Any]:
    return {"epoch": epoch, "consumed": 0, "seed": seed, "means": _NOTHING, "stopped": False}


def _check(model: Any, callbacks: Sequence[Any], fit_arguments: dict[str, Any]) -> None:
    if model is None:
        raise TypeError("hvd.elastic.fit trains the model of its first argument: give it hvd.elastic.KerasState(model)")
    if distributed_in(getattr(model, "optimizer", None)) is None or "_hvdlite_mirrored" in vars(model):
        raise ValueError("hvd.elastic.fit needs a model that was compiled outside of a strategy's scope, with "
                         "hvd.DistributedOptimizer(optimizer)")
    for name in fit_arguments.keys() & _REFUSED.keys():
        raise ValueError(f"hvd.elastic.fit has no {name}: {_REFUSED[name]}")
    for each in callbacks:
        if isinstance(each, _KEEP_PLACES):
            raise ValueError(f"hvd.elastic.fit keeps the place itself, and does not go with a {type(each).__name__}: leave "
                             "it out, and call state.checkpoint(directory) for checkpoints on a disk")


class _Shards:
    """This rank's shards of bodies.

    Args:
        sharing: divides global batches.

    Attributes:
        counted: by the position after a body, how many of its rows this rank counts, once it is loaded: all ranks have the
            whole batch where there are fewer rows than ranks.
    """

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self.counted: dict[int, float] = {}

    def own(self, index: int, end: int, rows: int) -> slice:
        """Return this rank's rows of a body.

        Args:
            index: of the body in a pass.
            end: the position after it.
            rows: of all ranks.
        """
        own = self._sharing.own(index, rows)
        self.counted[end] = (own.stop - own.start) / (api.size() if rows < api.size() else 1)
        return own


class _GlobalSamples(Samples):
    """Samples of arrays, in global batches."""

    def __init__(self, arrays: tuple[Any, ...], batch_size: int, seed: int | None, sharing: Sharing) -> None:
        super().__init__(arrays, batch_size, seed)
        self.shards = _Shards(sharing)

    def rest(self, epoch: int, consumed: int) -> list[tuple[int, Any]]:
        return by_turns(self.order(epoch), consumed, 0, 1, self.length)

    def load(self, epoch: int, consumed: int) -> Iterator[Any]:
        for index, (end, rows) in enumerate(self.rest(epoch, consumed)):
            yield select_rows(self._arrays, np.array(rows[self.shards.own(index, end, len(rows))]))


class _GlobalBatches(Batches):
    """Batches of a PyDataset, which are global ones."""

    def __init__(self, dataset: Any, seed: int | None, sharing: Sharing) -> None:
        super().__init__(dataset, seed)
        self.shards = _Shards(sharing)

    def rest(self, epoch: int, consumed: int) -> list[tuple[int, Any]]:
        return by_turns(self.order(epoch), consumed, 0, 1)

    def load(self, epoch: int, consumed: int) -> Iterator[Any]:
        bodies = zip(self.rest(epoch, consumed), super().load(epoch, consumed), strict=True)
        for index, ((end, _), batch) in enumerate(bodies):
            yield select_rows(batch, self.shards.own(index, end, rows_of(batch)))


class _Bodies(CountsSteps):
    """Passes boundaries, averages the logs of epochs, and keeps what callbacks know; the first of the callbacks.

    Args:
        callbacks: the others.
        epochs: at which training ends.
    """

    def __init__(self, data: ResumableData, source: _GlobalSamples | _GlobalBatches, state: Any, callbacks: Sequence[Any],
                 epochs: int) -> None:
        super().__init__(data)
        data.callback = self
        self._source, self._state, self._callbacks, self._epochs = source, state, callbacks, epochs
        self._before = state._place["means"]  # of the logs in this epoch, in earlier worlds
        self._now = _NOTHING
        self._epoch_is_over = True  # what is not counted in batches may have changed
        self._whole: _Kept = _Kept()
        data.load_state_dict(state._place)

    def go_on(self, logs: Any) -> None:
        """After `on_train_begin` of all callbacks: give them their attributes back, and maybe the end of the epoch."""
        known: dict[str, Any] = {}
        for key, attributes in itertools.chain(*(self._state._callbacks or ())):
            known.setdefault(key, {}).update(copy.deepcopy(attributes))
        for key, callback in self._named():
            vars(callback).update(known.get(key, {}))
        if self._state._place["epoch"] < self._data.epoch:
            means = dict(self._before[1])
            for _, callback in self._named():
                callback.on_epoch_end(self._data.epoch - 1, means)
            self._ends_epoch()
            if self.model.stop_training:
                self.model._initial_epoch = self._epochs

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if not self._is_rest:
            self._before = _NOTHING
        self._now = _NOTHING

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.note()
        self._state._begin_body()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        counted = sum(self._source.shards.counted[end] for end, _ in self._rest[:batch + 1] if end > self._data._consumed)
        self._now = [self._now[0] + counted, dict(logs)]
        super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._now = [self._now[0], dict(logs)]
        self.note()
        self._state._begin_body()
        everywhere = allgather_object(api.runtime(), self._now, "elastic.fit.logs")
        logs.update(_merged([self._before, _merged(everywhere)])[1])
        super().on_epoch_end(epoch, logs)
        self._ends_epoch()

    def note(self) -> None:
        """Let the state have the place, and what callbacks know."""
        state = self._state
        if self._epoch_is_over:
            self._epoch_is_over = False
            self._whole = _Kept((key, copy.deepcopy(_attributes(each, state._is_plain))) for key, each in self._named())
        numbers = _Kept((key, _attributes(each, _is_number_or_text)) for key, each in self._named())
        stop = self.model.stop_training
        place = {**self._data.state_dict(), "stopped": bool(stop) and stop is not elastic_callbacks.EPOCH_IS_OVER,
                 "means": _merged([self._before, [self._now[0] * api.size(), self._now[1]]])}
        vars(state).update(_place=place, _callbacks=_Kept((self._whole, numbers)), epoch=self._data.epoch)

    def _ends_epoch(self) -> None:
        self._epoch_is_over, self._before, self._now = True, _NOTHING, _NOTHING
        if api.is_elastic():
            self._state.commit()  # at the next boundary

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield the callbacks that run on this rank, with names that are the same on all ranks."""
        counts: dict[str, int] = {}
        for each in self._callbacks:
            name = type(each).__name__
            counts[name] = counts.get(name, 0) + 1
            if _runs_here(each):
                yield f"{name} {counts[name]}", each


def _attributes(callback: Any, goes_on: Callable[[Any], bool]) -> dict[str, Any]:
    return {name: value for name, value in vars(callback).items()
            if name[:1] != "_" and name not in ("params", "validation_data") and goes_on(value)}


def _runs_here(callback: Any) -> bool:
    return api.rank() == 0 or not isinstance(callback, WRITERS)


def _is_number_or_text(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


class _Kept(tuple):  # type: ignore[type-arg]
    """A tuple whose items never change: its copies are itself."""

    def __deepcopy__(self, memo: Any) -> _Kept:
        return self


def _merged(parts: Iterable[Any]) -> list[Any]:
    """Return the rows of parts together, and the means of their logs over rows; results of evaluations count alike."""
    rows, sums, weights = 0.0, dict[str, float](), dict[str, float]()
    for own, logs in parts:
        rows += own
        for name, value in logs.items():
            weight = 1.0 if name.startswith("val_") else own
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    return [rows, {name: value / weights[name] for name, value in sums.items() if weights[name]}]


@contextmanager
def _weighted(model: Any) -> Iterator[None]:
    """Return a context in which steps of the model are compiled anew, with gradients that are weighted by rows."""
    before, original = vars(model).get("train_step"), model.train_step

    def train_step(*arguments: Any, **named: Any) -> Any:
        with step.one_replica(named.get("data", arguments[-1])), step.penalizing(model), \
                step.weighted_later(current_weight(), lambda: model.trainable_variables):
            return original(*arguments, **named)
    object.__setattr__(model, "train_step", train_step)
    model.train_function = None
    try:
        yield
    finally:
        object.__delattr__(model, "train_step")
        if before is not None:
            object.__setattr__(model, "train_step", before)
        model.train_function = None
