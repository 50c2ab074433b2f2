"""Each rank's part of the global batches in `evaluate`, `predict` and validation.

Every row is computed by exactly one rank, so sums over ranks are sums over samples. Steps count global batches.

| data | part of a rank |
|---|---|
| arrays, tf.data.Dataset, torch DataLoader, generator | its rows of every global batch; batches without any are skipped |
| PyDataset | every size-th batch, whole, which other ranks do not load; its rows of the last, left-over batches |
| a tf.data.Dataset that is already distributed | all of it: its rows of every global batch |

For losses with another divisor than the number of samples (`step.py`), each rank takes every size-th batch, whole; except of
a DataLoader and of a dataset that is already distributed.

A rank without rows computes a batch that does not count: so its model is built, and it participates in collectives.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np

from hvdlite import api
from hvdlite.training.mirrored.shards import disjoint_shard
from hvdlite.training.mirrored.shares import Shares
from hvdlite.training.objects import allgather_object
from hvdlite_tf.keras import shards
from hvdlite_tf.keras.loading import Loading
from hvdlite_tf.keras.order import checked
from hvdlite_tf.keras.scope import BaseStrategy


class TakenBatch(NamedTuple):
    """The part of one global batch that this rank computes.

    Attributes:
        batch_index: index of the global batch.
        rows: the number of samples that this rank computes.
        counts: whether they count, because they are this rank's.
    """

    batch_index: int
    rows: int
    counts: bool


class EvaluationData:
    """Data that a model is applied to, once or (validation) after every epoch.

    Args:
        x: the user's argument.
        arrays: `x` with targets and weights, if it consists of arrays.
        batch_size: global, for arrays.
        steps: the maximum number of global batches; None for all.
        is_whole: whether ranks should take whole batches.

    Attributes:
        is_whole: whether ranks take whole batches.
        is_bare: see `shards.is_bare`; also of a DataLoader, when it has given a batch.

    Raises:
        ValueError: for data that cannot be divided among ranks.
        MismatchError: for a tf.data.Dataset or DataLoader that differs between ranks.
    """

    def __init__(self, x: Any, arrays: tuple[Any, ...] | None, batch_size: int, steps: int | None,
                 strategy: BaseStrategy, is_whole: bool = False) -> None:
        is_distributed = shards.is_tf_dataset(x) and shards.is_distributed(x)
        self.is_whole = is_whole and not shards.is_loader(x) and not is_distributed
        self.is_bare = shards.is_bare(arrays)
        self._rank, self._size, self._steps = strategy.rank, strategy.num_replicas_in_sync, steps
        self._taken: dict[int, TakenBatch] = {}  # by index; a restarted pass takes the same batches
        self._rounds: _Rounds | None = None
        self._x, self._arrays, self._batch = x, arrays, batch_size
        self._dataset: Any = None
        if arrays is not None and keras.backend.backend() == "tensorflow":
            self._dataset = self._in_graph(shards.array_dataset(arrays, batch_size, None, lambda _, indices: indices))
        elif arrays is None and shards.is_tf_dataset(x):
            self._dataset = self._in_graph(x if shards.is_distributed(x) else checked(x))
        elif arrays is None and shards.is_loader(x):
            equal = Shares(strategy.replicas, compare=False)
            self._begin_loader = shards.loaded_shards(x, strategy, shards.Sharing(equal))
        elif arrays is None and not isinstance(x, keras.utils.PyDataset):
            if not hasattr(x, "__next__"):
                raise ValueError(f"MirroredStrategy cannot share out {type(x).__name__}; give arrays, a tf.data.Dataset, a "
                                 "PyDataset, a torch DataLoader or a generator")
            first = 2 if steps is None else min(2, steps)
            self._first = list(itertools.islice(x, first))  # every pass has them, as in Keras

    def begin(self) -> tuple[Any, int | None]:
        """Return the data for one pass of Keras, and the number of steps if Keras cannot determine it."""
        self._taken.clear()
        if self._dataset is not None:
            return self._dataset, self._steps if self._rank == 0 else None
        if self._arrays is not None:
            arrays, batch = self._arrays, self._batch
            count = self._bounded(-(-shards.rows_of(arrays) // batch))
            batches = (shards.select_rows(arrays, slice(batch_index * batch,
                                                        (batch_index + 1) * batch)) for batch_index in range(count))
            return self._recorded(self._split(batches)), count if self._rank == 0 else None
        if isinstance(self._x, keras.utils.PyDataset):
            shards.call_hook(self._x, "on_epoch_begin")
            self._rounds = _Rounds(self._x, self._bounded(self._x.num_batches), self._rank, self._size, self.is_whole)
            return self._rounds, None
        if shards.is_loader(self._x):
            return self._recorded(self._loaded()), self._steps if self._rank == 0 else None
        generated = itertools.islice(itertools.chain(self._first, self._x), self._steps)
        return self._recorded(self._split(generated)), self._steps if self._rank == 0 else None

    def end(self) -> None:
        """End one pass."""
        if isinstance(self._x, keras.utils.PyDataset):
            shards.call_hook(self._x, "on_epoch_end")

    @property
    def is_spare(self) -> bool:
        """Whether none of this rank's computed rows count."""
        return not any(each.counts for each in self._all_taken())

    def joined(self, predictions: Any) -> Any:
        """Return all ranks' predictions, in the order of the global batches."""
        runtime = api.runtime()
        everywhere = allgather_object(runtime, (keras.tree.map_structure(np.asarray, predictions), self._all_taken()),
                                      runtime.names.unnamed("keras", "predict"))
        pieces: dict[tuple[int, int], Any] = {}
        for rank, (theirs, taken) in enumerate(everywhere):
            total, begin = sum(each.rows for each in taken), 0
            for each in taken:
                if each.counts:
                    pieces[each.batch_index, rank] = keras.tree.map_structure(
                        lambda leaf, begin=begin, rows=each.rows, total=total: _piece(leaf, begin, rows, total), theirs)
                begin += each.rows
        return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *(pieces[place] for place in sorted(pieces)))

    def _all_taken(self) -> list[TakenBatch]:
        return self._rounds.taken() if self._rounds is not None else [self._taken[index] for index in sorted(self._taken)]

    def _bounded(self, count: int | None) -> int:
        if count is None and self._steps is None:
            raise ValueError("evaluate and predict need steps, or a PyDataset with a length (num_batches)")
        return min(each for each in (count, self._steps) if each is not None)

    def _split(self, batches: Iterator[Any]) -> Iterator[tuple[Any, int]]:
        for batch_index, batch in enumerate(batches):
            mine = _rows_of_one(batch_index, shards.rows_of(batch), self._rank, self._size, self.is_whole)
            rows = mine.stop - mine.start
            yield (shards.select_rows(batch, mine) if rows else batch), rows

    def _loaded(self) -> Iterator[tuple[Any, int]]:
        for rows, batch in itertools.islice(self._begin_loader(), self._steps):
            self.is_bare = not isinstance(batch, (tuple, list))
            if rows >= self._size:
                yield batch, shards.rows_of(batch)
            else:  # every rank has the whole batch
                mine = disjoint_shard(rows, self._rank, self._size)
                yield (shards.select_rows(batch, mine), 1) if mine.stop > mine.start else (batch, 0)

    def _recorded(self, batches: Iterator[tuple[Any, int]]) -> Iterator[Any]:
        """Yield this rank's rows of the batches; without any rows, the first batch.

        Args:
            batches: this rank's rows and their number; with 0 rows, the whole batch.
        """
        spare: Any = None
        for batch_index, (batch, rows) in enumerate(batches):
            if rows:
                self._taken[batch_index] = TakenBatch(batch_index, rows, True)
                yield _as_tuple(batch)
            elif spare is None:
                spare = batch
        if spare is not None and self.is_spare:
            self._taken[0] = TakenBatch(0, shards.rows_of(spare), False)
            yield _as_tuple(spare)

    def _in_graph(self, dataset: Any) -> Any:
        """Return a tf.data.Dataset of this rank's rows."""
        import tensorflow as tf
        is_local, rank, size = shards.is_distributed(dataset), self._rank, self._size

        def mine(batch_index: Any, batch: Any) -> tuple[Any, Any, Any]:
            first = keras.tree.flatten(batch)[0]
            count = tf.cast(tf.shape(first)[0], tf.int32)
            if is_local:
                return batch_index, count, batch
            if self.is_whole:
                rows = slice(0, tf.where(tf.equal(batch_index % size, rank), count, 0))
            else:
                rows = shards.graph_rows(first, rank, size, is_exclusive=True)
            return batch_index, rows.stop - rows.start, shards.select_rows(batch, rows)

        def recorded(counts: bool) -> Any:
            def note(batch_index: Any, rows: Any) -> Any:
                self._taken[int(batch_index)] = TakenBatch(int(batch_index), int(rows), counts)
                return np.int64(0)

            def pass_on(batch_index: Any, rows: Any, batch: Any) -> Any:
                with tf.control_dependencies([tf.numpy_function(note, [batch_index, rows], tf.int64)]):
                    return keras.tree.map_structure(tf.identity, batch)
            return shards.plain(pass_on)

        numbered = dataset.enumerate() if self._steps is None else dataset.take(self._steps).enumerate()
        shared = numbered.map(shards.plain(mine))
        if is_local or (rank == 0 and not self.is_whole):
            return shared.map(recorded(True)).prefetch(tf.data.AUTOTUNE)
        has_none = shards.plain(lambda *_: tf.numpy_function(lambda: np.bool_(self.is_spare), [], tf.bool))
        spare = numbered.take(1).map(shards.plain(lambda batch_index, batch: (
            batch_index, tf.cast(tf.shape(keras.tree.flatten(batch)[0])[0], tf.int32), batch)))
        return shared.filter(shards.plain(lambda batch_index, rows, batch: rows > 0)).map(recorded(True)).concatenate(
            spare.filter(has_none).map(recorded(False))).prefetch(tf.data.AUTOTUNE)


class _Rounds(keras.utils.PyDataset):
    """This rank's part of a PyDataset.

    In each round every rank takes one batch. If fewer batches than ranks are left over, every rank takes its rows of each.

    Args:
        count: the number of global batches.
    """

    def __init__(self, dataset: Any, count: int, rank: int, size: int, is_whole: bool) -> None:
        super().__init__()
        full = count // size * size
        self._loading, self._whole = Loading(dataset), range(rank, full, size)
        self._taken: dict[int, TakenBatch] = {}
        self._left: list[tuple[TakenBatch, Any]] = []
        for batch_index in range(full, count):
            batch = dataset[batch_index]
            mine = _rows_of_one(batch_index, shards.rows_of(batch), rank, size, is_whole)
            if mine.stop > mine.start:
                self._left.append((TakenBatch(batch_index, mine.stop - mine.start, True), shards.select_rows(batch, mine)))
        if count and not self._whole and not self._left:
            self._left = [(TakenBatch(full, shards.rows_of(batch), False), batch)]

    @property
    def num_batches(self) -> int:
        return len(self._whole) + len(self._left)

    def __getitem__(self, index: int) -> Any:
        if index >= len(self._whole):
            return self._left[index - len(self._whole)][1]
        batch = self._loading.batch(index, self._whole)
        self._taken[index] = TakenBatch(self._whole[index], shards.rows_of(batch), True)
        return batch

    def on_epoch_end(self) -> None:
        self._loading.stop()

    def taken(self) -> list[TakenBatch]:
        """Return the batches that this rank has computed."""
        return [*(self._taken[index] for index in sorted(self._taken)), *(taken for taken, _ in self._left)]


@contextmanager
def without_warnings(rank: int) -> Iterator[None]:
    """Suppress Keras' warning at the end of data whose number of batches with rows of this rank is unknown."""
    with warnings.catch_warnings():
        if rank > 0:
            warnings.filterwarnings("ignore", message=".*ran out of data")
        yield


def _rows_of_one(batch_index: int, rows: int, rank: int, size: int, is_whole: bool) -> slice:
    """Return a rank's rows of a global batch."""
    if is_whole:
        return slice(0, rows if batch_index % size == rank else 0)
    return disjoint_shard(rows, rank, size)


def _as_tuple(batch: Any) -> Any:
    """Return a batch in the form that Keras expects from a generator."""
    return tuple(batch) if isinstance(batch, list) else batch if isinstance(batch, tuple) else (batch,)


def _piece(leaf: Any, begin: int, rows: int, total: int) -> Any:
    each = max(1, len(leaf) // total)  # predictions of one sample
    return leaf[begin * each:(begin + rows) * each]
