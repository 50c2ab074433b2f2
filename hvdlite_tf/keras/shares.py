"""Each rank's share of what is given to `fit`, `evaluate` and `predict`.

In training, every rank takes its rows of every global batch. Nothing has to keep step when a model is only applied, so then
ranks take whole blocks of rows, or every so-manieth batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.training.shares import share
from hvdlite_tf.keras.scope import Mirrored

Batch = Any
"""A structure of arrays whose first dimension counts samples."""


def rows_of(batch: Batch) -> int:
    """Return how many samples a batch has."""
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


def rows_taken(batch: Batch, rows: Any) -> Batch:
    """Return some samples of a batch."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], batch)


def is_arrays(x: Any) -> bool:
    """Return whether `x` is data by itself, and nothing that makes it."""
    return not (_is_tf_dataset(x) or isinstance(x, keras.utils.PyDataset) or _is_loader(x) or hasattr(x, "__next__"))


def as_arrays(*structures: Any) -> tuple[Any, ...]:
    """Return data as NumPy arrays, without the trailing structures that are None.

    Raises:
        ValueError: when there are none, or they do not have equally many samples.
    """
    if all(structure is None for structure in structures):
        raise ValueError("there is no data: give arrays")
    given = structures[:max(index for index, structure in enumerate(structures) if structure is not None) + 1]
    arrays = keras.tree.map_structure(_as_array, tuple(given))
    lengths = {len(leaf) for leaf in keras.tree.flatten(arrays) if leaf is not None}
    if len(lengths) != 1:
        raise ValueError(f"arrays must have equally many samples, not {sorted(lengths)}")
    return arrays  # type: ignore[no-any-return]


def block(arrays: Sequence[Any], strategy: Mirrored) -> tuple[Any, ...]:
    """Return this rank's rows of arrays, one after the other; all of them when there are fewer than ranks."""
    rows = share(rows_of(arrays), strategy.rank, strategy.num_replicas_in_sync)
    return tuple(rows_taken(array, rows) if array is not None else None for array in arrays)


def training_batches(x: Any, arrays: tuple[Any, ...] | None, batch_size: int, shuffle: bool, strategy: Mirrored) -> Any:
    """Return what Keras trains on: this rank's rows of every global batch.

    Args:
        x: what the user gave.
        arrays: the same, with targets and weights, when it is arrays.
        batch_size: global, for arrays.
        shuffle: arrays in a new order in every epoch, the batches of a PyDataset too; the same one on all ranks.

    Raises:
        ValueError: for data that cannot be shared out.
    """
    if arrays is not None:
        if keras.backend.backend() == "tensorflow":
            return _array_dataset(arrays, batch_size, shuffle, strategy)
        return _ArrayShares(arrays, batch_size, shuffle, strategy)
    if _is_tf_dataset(x):
        return shared_dataset(x, strategy)
    if isinstance(x, keras.utils.PyDataset):
        return _BatchShares(x, shuffle, strategy)
    if _is_loader(x):
        return _shared_loader(x, strategy)
    if hasattr(x, "__next__"):
        return (rows_taken(batch, _rows(rows_of(batch), strategy)) for batch in x)
    raise ValueError(f"MirroredStrategy cannot share out {type(x).__name__}; give arrays, a tf.data.Dataset, a PyDataset, a "
                     "torch DataLoader or a generator")


def whole_batches(x: Any, strategy: Mirrored, sizes: list[tuple[int, int]] | None = None) -> Any:
    """Return what Keras evaluates or predicts: every so-manieth batch of anything but arrays.

    Args:
        sizes: takes each batch's number and its samples.
    """
    if _is_tf_dataset(x):
        return _every_batch_of(x, strategy, sizes)
    if isinstance(x, keras.utils.PyDataset):
        return _EveryBatch(x, strategy, sizes)
    if _is_loader(x):
        return _shared_loader(x, strategy, sizes, whole=True)
    return _every(x, strategy, sizes)


def _rows(rows: int, strategy: Mirrored) -> slice:
    return share(rows, strategy.rank, strategy.num_replicas_in_sync)


def _as_array(leaf: Any) -> Any:
    if leaf is None:
        return None
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
    array = np.asarray(leaf)
    if array.ndim == 0:
        raise ValueError(f"data must have a first dimension that counts samples; {leaf!r} has none")
    return array


def _is_tf_dataset(x: Any) -> bool:
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(x, tf.data.Dataset)


def _is_loader(x: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(x, data.DataLoader)


class _ArrayShares(keras.utils.PyDataset):
    """This rank's rows of every global batch of arrays."""

    def __init__(self, arrays: tuple[Any, ...], batch_size: int, shuffle: bool, strategy: Mirrored) -> None:
        super().__init__()
        self._arrays, self._batch, self._strategy = arrays, batch_size, strategy
        self._order = np.arange(rows_of(arrays))
        self._random = np.random.default_rng(strategy.next_seed()) if shuffle else None
        self.on_epoch_end()

    def __len__(self) -> int:
        return -(-len(self._order) // self._batch)

    def __getitem__(self, index: int) -> Any:
        rows = self._order[index * self._batch:(index + 1) * self._batch]
        return rows_taken(self._arrays, rows[_rows(len(rows), self._strategy)])

    def on_epoch_end(self) -> None:
        if self._random is not None:
            self._random.shuffle(self._order)


class _BatchShares(keras.utils.PyDataset):
    """This rank's rows of every batch of another dataset."""

    def __init__(self, dataset: Any, shuffle: bool, strategy: Mirrored) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset, self._strategy = dataset, strategy
        self._random = np.random.default_rng(strategy.next_seed()) if shuffle and dataset.num_batches is not None else None
        self._order = np.arange(dataset.num_batches or 0)
        self._shuffle()

    @property
    def num_batches(self) -> int | None:
        batches: int | None = self._dataset.num_batches
        return batches

    def __getitem__(self, index: int) -> Any:
        batch = self._dataset[int(self._order[index]) if self._random is not None else index]
        return rows_taken(batch, _rows(rows_of(batch), self._strategy))

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()
        self._shuffle()

    def _shuffle(self) -> None:
        if self._random is not None:
            self._random.shuffle(self._order)


class _EveryBatch(keras.utils.PyDataset):
    """Every so-manieth batch of another dataset, which has a length."""

    def __init__(self, dataset: Any, strategy: Mirrored, sizes: list[tuple[int, int]] | None) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        if dataset.num_batches is None:
            raise ValueError("evaluate and predict need a PyDataset with a length (num_batches)")
        self._dataset, self._sizes = dataset, sizes
        self._mine = range(strategy.rank, dataset.num_batches, strategy.num_replicas_in_sync)

    @property
    def num_batches(self) -> int:
        return len(self._mine)

    def __getitem__(self, index: int) -> Any:
        batch = self._dataset[self._mine[index]]
        if self._sizes is not None:
            self._sizes.append((self._mine[index], rows_of(batch)))
        return batch


def _every(batches: Any, strategy: Mirrored, sizes: list[tuple[int, int]] | None) -> Iterator[Any]:
    for index, batch in enumerate(batches):
        if index % strategy.num_replicas_in_sync == strategy.rank:
            if sizes is not None:
                sizes.append((index, rows_of(batch)))
            yield batch


def _shared_loader(loader: Any, strategy: Mirrored, sizes: list[tuple[int, int]] | None = None, whole: bool = False) -> Any:
    """Return a torch DataLoader of this rank's rows, or of its whole batches."""
    from torch.utils.data import DataLoader, IterableDataset

    class Shares(IterableDataset):  # type: ignore[misc,type-arg]
        def __iter__(self) -> Iterator[Any]:
            if whole:
                yield from _every(loader, strategy, sizes)
                return
            for batch in loader:
                yield rows_taken(batch, _rows(rows_of(batch), strategy))

        def __len__(self) -> int:
            if not whole:
                return len(loader)
            return len(range(strategy.rank, len(loader), strategy.num_replicas_in_sync))
    return DataLoader(Shares(), batch_size=None)


def _array_dataset(arrays: tuple[Any, ...], batch_size: int, shuffle: bool, strategy: Mirrored) -> Any:
    """Return a tf.data.Dataset of this rank's rows of every global batch of arrays."""
    import tensorflow as tf
    tensors = keras.tree.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), arrays)
    count = rows_of(arrays)
    order = tf.data.Dataset.range(count)
    if shuffle:
        order = order.shuffle(count, seed=strategy.next_seed(), reshuffle_each_iteration=True)
    order = order.batch(batch_size).map(lambda rows: rows[_graph_rows(rows, strategy)])
    return order.map(lambda rows: keras.tree.map_structure(
        lambda leaf: None if leaf is None else tf.gather(leaf, rows), tensors)).prefetch(tf.data.AUTOTUNE)


def shared_dataset(dataset: Any, strategy: Mirrored) -> Any:
    """Return a tf.data.Dataset of this rank's rows of every batch of another one."""
    import tensorflow as tf

    def mine(*batch: Any) -> Any:
        structure = batch if isinstance(dataset.element_spec, tuple) else batch[0]
        first = keras.tree.flatten(structure)[0]
        rows = _graph_rows(first, strategy)
        return keras.tree.map_structure(lambda leaf: leaf[rows], structure)
    return dataset.map(mine).prefetch(tf.data.AUTOTUNE)


def _every_batch_of(dataset: Any, strategy: Mirrored, sizes: list[tuple[int, int]] | None) -> Any:
    import tensorflow as tf
    batches = dataset.enumerate().shard(strategy.num_replicas_in_sync, strategy.rank)

    def noted(index: Any, batch: Any) -> Any:
        if sizes is None:
            return batch
        def note(number: Any, rows: Any) -> Any:
            sizes.append((int(number), int(rows)))
            return np.int64(0)
        done = tf.numpy_function(note, [index, tf.shape(keras.tree.flatten(batch)[0])[0]], tf.int64)
        with tf.control_dependencies([done]):
            return keras.tree.map_structure(tf.identity, batch)
    return batches.map(noted).prefetch(tf.data.AUTOTUNE)


def _graph_rows(leaf: Any, strategy: Mirrored) -> Any:
    """Return this rank's rows of a batch whose length is known when the graph runs; see `training.shares.share`."""
    import tensorflow as tf
    size, rank = strategy.num_replicas_in_sync, strategy.rank
    rows = tf.shape(leaf)[0]
    each, more = rows // size, rows % size
    begin = rank * each + tf.minimum(rank, more)
    end = begin + each + tf.cast(rank < more, tf.int32)
    few = rows < size
    return slice(tf.where(few, 0, begin), tf.where(few, rows, end))
