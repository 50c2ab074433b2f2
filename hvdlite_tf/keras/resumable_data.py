"""`hvd.resumable` for Keras: data for `model.fit` whose place can be saved; any number of ranks goes on there.

| data | what is counted | what decides the order |
|---|---|---|
| arrays | samples | `seed` and the epoch |
| a PyDataset with a length, without an `on_epoch_end` of its own | its batches | `seed` and the epoch |
| a tf.data.Dataset with a length that does not shuffle anew | its elements | the dataset |
| a function that returns a tf.data.Dataset for an epoch | its elements | the function |

Keras reads ahead, so a callback counts the steps that are finished. The first epoch of a `fit` may be the rest of one. What
is skipped is not loaded, except by tf.data, which reads it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from hvdlite import api
from hvdlite.training.positions import by_turns, refuse_other
from hvdlite_tf.keras.elastic_callbacks import EPOCH_IS_OVER
from hvdlite_tf.keras.loading import Loading
from hvdlite_tf.keras.order import lineage
from hvdlite_tf.keras.shards import as_arrays, is_loader, is_tf_dataset, rows_of, select_rows


def resumable(x: Any, y: Any = None, sample_weight: Any = None, *, batch_size: int = 32,
              seed: int | None = None) -> ResumableData:
    """Return data for `model.fit` with a place that can be saved and loaded: `state_dict`, `load_state_dict`, `epoch`.

        data = hvd.resumable(x, y, batch_size=64, seed=0)
        model.fit(data, initial_epoch=data.epoch, epochs=90, callbacks=[data.callback, ...])

    Ranks take samples (batches, elements) by turns, and all equally many: the first ones of an epoch repeat at its end where
    they do not suffice. Put `data.callback` before callbacks that save. A place after the last step of an epoch is the begin
    of the next one: what callbacks do at the end of an epoch is not made up for.

    Args:
        x: arrays, a `keras.utils.PyDataset`, a `tf.data.Dataset`, or a function that returns one for an epoch's number.
        y, sample_weight: with arrays.
        batch_size: samples of one rank's batch, of arrays.
        seed: of the order of samples, or of a PyDataset's batches, in each epoch; None keeps their order.

    Raises:
        TypeError: for data whose place cannot be counted: generators, DataLoaders.
        ValueError: for data without a length, and for data that shuffle themselves.
    """
    kind = type(x).__name__
    if is_loader(x) or hasattr(x, "__next__"):
        raise TypeError(f"nobody knows the place in a {kind}: give hvd.resumable arrays, a keras.utils.PyDataset or a "
                        "tf.data.Dataset; for a torch DataLoader in a loop of your own there is hvdlite_torch's resumable")
    source: Source
    if is_tf_dataset(x) or (callable(x) and not isinstance(x, keras.utils.PyDataset)):
        if seed is not None:
            raise ValueError("tf.data has orders of its own: give hvd.resumable a function that returns the dataset of an "
                             "epoch (lambda epoch: dataset.shuffle(1000, seed=epoch)), and no seed")
        source = _Elements(x)
    elif isinstance(x, keras.utils.PyDataset):
        source = Batches(x, seed)
    else:
        source = Samples(as_arrays(x, y, sample_weight), batch_size, seed)
    return ResumableData(source)


class ResumableData(PyDatasetAdapter):  # type: ignore[misc]
    """Data for one call of `fit` after the other, which go on where the last one was; see `resumable`.

    Attributes:
        epoch: the number of epochs that are complete.
        callback: counts finished steps; give it to `fit`.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(_Facade(self))
        self.epoch, self._consumed = 0, 0
        self._source = source
        self._is_read = False
        self.callback = CountsSteps(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the place: numbers and texts.

        Raises:
            RuntimeError: when nobody has counted steps.
        """
        if self._is_read and self.callback.model is None:
            raise RuntimeError("nobody has counted the steps of fit: give it callbacks=[data.callback, ...], where data is "
                               "what hvd.resumable has returned")
        return {"epoch": self.epoch, "consumed": self._consumed, **self._source.facts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a place with the next `fit`.

        Raises:
            ValueError: when it is a place in the middle of an epoch that has another order here.
        """
        refuse_other(state_dict, self._source.facts)
        consumed = state_dict["consumed"]
        is_over = consumed >= self._source.facts["count"]
        self.epoch, self._consumed = state_dict["epoch"] + is_over, 0 if is_over else consumed

    def rest(self, consumed: int) -> list[tuple[int, Any]]:
        """Return this rank's steps of the epoch after a position: the position after each, and what it loads."""
        return self._source.rest(self.epoch, consumed)

    def _get_iterator(self) -> Iterator[Any]:
        """Yield the batches that are left of the epoch."""
        self._is_read = True
        for batch in self._source.load(self.epoch, self._consumed):
            yield self._standardize_batch(batch)

    def get_torch_dataloader(self) -> Any:
        """Return Keras' loader; its iterations draw a seed, which must not be one of the script's random numbers."""
        import torch
        loader = super().get_torch_dataloader()
        loader.generator = torch.Generator()
        return loader

    def on_epoch_begin(self) -> None:
        """Keras begins to read."""

    def on_epoch_end(self) -> None:
        """Keras reads no more."""
        self._source.stop()


class CountsSteps(keras.callbacks.Callback):
    """Counts the finished steps of the data, and ends the epoch that is the rest of one."""

    def __init__(self, data: ResumableData) -> None:
        super().__init__()
        self._data = data
        self._rest: list[tuple[int, Any]] = []  # the steps of this epoch: the position after each, and what it loads
        self._is_rest = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        data = self._data
        if epoch != data.epoch:
            raise ValueError(f"fit begins epoch {epoch}, and the data are in epoch {data.epoch}: give fit "
                             "initial_epoch=data.epoch, and begin epochs only with it")
        self._is_rest = data._consumed > 0
        self._rest = data.rest(data._consumed)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._data._consumed = self._rest[min(batch, len(self._rest) - 1)][0]
        if self._is_rest and batch + 1 >= len(self._rest) and not self.model.stop_training:
            self.model.stop_training = EPOCH_IS_OVER

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.model.stop_training is EPOCH_IS_OVER:
            self.model.stop_training = False
        if self._data._consumed == self._rest[-1][0]:  # else a callback has stopped training in the epoch
            self._data.epoch, self._data._consumed = epoch + 1, 0


class _Facade(keras.utils.PyDataset):  # type: ignore[misc]
    """What Keras asks of a PyDataset beside its batches: how many there are, and how the first ones look."""

    def __init__(self, data: ResumableData) -> None:
        super().__init__()
        self._data = data

    @property
    def num_batches(self) -> int:
        return len(self._data.rest(0))

    def __getitem__(self, index: int) -> Any:
        return next(itertools.islice(self._data._source.load(self._data.epoch, 0), index, None))


class Source:
    """What is counted, and how it is loaded.

    Args:
        kind: of what is counted.
        count: of an epoch.
        seed: of the order; None if they keep theirs.
        length: what a step takes.

    Attributes:
        facts: what the order depends on.
    """

    def __init__(self, kind: str, count: int, seed: int | None, length: int = 1) -> None:
        self.facts: dict[str, Any] = {"kind": kind, "count": count, "seed": seed}
        self.length = length

    def rest(self, epoch: int, consumed: int) -> list[tuple[int, Any]]:
        """Return this rank's steps after a position: the position after each, and what it loads."""
        return by_turns(self.order(epoch), consumed, api.rank(), api.size(), self.length)

    def order(self, epoch: int) -> Sequence[int]:
        """Return an epoch's order of what is counted."""
        return drawn(self.facts["count"], self.facts["seed"], epoch)

    def load(self, epoch: int, consumed: int) -> Iterator[Any]:
        """Yield this rank's batches after a position."""
        raise NotImplementedError

    def stop(self) -> None:
        """Discard what was read ahead."""


class Samples(Source):
    """Samples of arrays."""

    def __init__(self, arrays: tuple[Any, ...], batch_size: int, seed: int | None) -> None:
        super().__init__("samples", rows_of(arrays), seed, batch_size)
        self._arrays = arrays

    def load(self, epoch: int, consumed: int) -> Iterator[Any]:
        return (select_rows(self._arrays, np.array(rows)) for _, rows in self.rest(epoch, consumed))


class Batches(Source):
    """Batches of a PyDataset, loaded by its workers."""

    def __init__(self, dataset: Any, seed: int | None) -> None:
        kind = type(dataset)
        if dataset.num_batches is None:
            raise ValueError(f"{kind.__name__} has no length, so an epoch has no end: give it a __len__")
        for name in ("on_epoch_begin", "on_epoch_end"):
            if getattr(kind, name, None) is not getattr(keras.utils.PyDataset, name, None):
                raise ValueError(f"{kind.__name__} has an {name}(), in which it may shuffle: nobody could draw that order "
                                 "again. Leave it out: hvd.resumable with a seed and hvd.elastic.fit shuffle the batches")
        super().__init__("batches", dataset.num_batches, seed)
        self._loading = Loading(dataset)

    def load(self, epoch: int, consumed: int) -> Iterator[Any]:
        self._loading.stop()
        indices = [index for _, [index] in self.rest(epoch, consumed)]
        return (self._loading.batch(step, indices) for step in range(len(indices)))

    def stop(self) -> None:
        self._loading.stop()


class _Elements(Source):
    """Elements of a tf.data.Dataset.

    Args:
        given: a dataset, or a function that returns one for an epoch's number.
    """

    def __init__(self, given: Any) -> None:
        self._of: Callable[[int], Any] = (lambda epoch: given) if is_tf_dataset(given) else given
        super().__init__("elements", _count(self._of(0), again=self._of(0) is self._of(0)), None)

    def load(self, epoch: int, consumed: int) -> Iterator[Any]:
        dataset, count, size = self._of(epoch), self.facts["count"], api.size()
        if int(dataset.cardinality()) != count:
            raise ValueError(f"the tf.data.Dataset of epoch {epoch} has {int(dataset.cardinality())} elements, and that of "
                             f"epoch 0 {count}: epochs are equally long")
        padding = dataset.repeat().take((consumed - count) % size)
        rest = dataset.skip(consumed).concatenate(padding).shard(size, api.rank())
        return iter(rest.as_numpy_iterator())


def drawn(count: int, seed: int | None, epoch: int) -> Sequence[int]:
    """Return an order of numbers that depends on seed and epoch."""
    return range(count) if seed is None else np.random.default_rng([seed, epoch]).permutation(count).tolist()


def _count(dataset: Any, *, again: bool) -> int:
    """Return the number of elements of a tf.data.Dataset.

    Args:
        again: whether its order has to be the same in each iteration.
    """
    if not is_tf_dataset(dataset):
        raise TypeError(f"the function of an epoch returns a {type(dataset).__name__}, and no tf.data.Dataset")
    count = int(dataset.cardinality())
    if count < 0:
        raise ValueError("the tf.data.Dataset has no known length: add .apply(tf.data.experimental."
                         "assert_cardinality(count)), and no repeat()")
    shuffles = [each for each in lineage(dataset) if hasattr(each, "_reshuffle_each_iteration")]
    if again and any(each._reshuffle_each_iteration is not False for each in shuffles):
        raise ValueError("the tf.data.Dataset shuffles anew in each iteration, and nobody could draw that order again: "
                         "give hvd.resumable a function (lambda epoch: dataset.shuffle(1000, seed=epoch))")
    if any((int(each._seed), int(each._seed2)) == (0, 0) for each in shuffles):
        raise ValueError("the tf.data.Dataset shuffles without a seed, and nobody could draw that order again: give "
                         "shuffle a seed")
    return count
