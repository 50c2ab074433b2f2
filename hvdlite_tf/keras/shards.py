"""Each rank's rows of the global batches in `fit`; see `evaluation_data.py` for `evaluate` and `predict`.

Every rank takes one step for each global batch. The number of batches and the meaning of `steps_per_epoch` are those of a
single process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable
from keras.src.trainers.data_adapters.data_adapter_utils import (
    is_jax_sparse,
    is_scipy_sparse,
    is_tensorflow_ragged,
    is_tensorflow_sparse,
)

from hvdlite import api
from hvdlite.core.errors import MismatchError
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite.training.mirrored.shards import shard
from hvdlite_tf.keras.loading import ENDLESS, Loading
from hvdlite_tf.keras.order import checked, lineage, sync_random_state
from hvdlite_tf.keras.scope import BaseStrategy

Batch = Any
"""A structure of arrays whose first dimension counts samples."""


def rows_of(batch: Batch) -> int:
    """Return the number of samples of a batch."""
    return int(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None).shape[0])


def select_rows(batch: Batch, rows: Any) -> Batch:
    """Return the selected samples of a batch; on torch sparse ones become dense, as in Keras."""
    def selected(leaf: Any) -> Any:
        if not is_scipy_sparse(leaf) and not is_tensorflow_sparse(leaf):
            return None if leaf is None else leaf[rows]
        sliceable = convert_to_sliceable(leaf)
        part = sliceable[rows]
        return sliceable.convert_to_torch_compatible(part) if keras.backend.backend() == "torch" else part
    return keras.tree.map_structure(selected, batch)


def is_arrays(x: Any) -> bool:
    """Return whether `x` consists of arrays, and is not a dataset or generator."""
    return not (is_tf_dataset(x) or isinstance(x, keras.utils.PyDataset) or is_loader(x) or hasattr(x, "__next__"))


def as_arrays(*structures: Any) -> tuple[Any, ...]:
    """Return data as NumPy arrays or sparse or ragged tensors, without the trailing structures that are None.

    Raises:
        ValueError: when there are none, their numbers of samples differ, or they cannot be divided among ranks.
    """
    if all(structure is None for structure in structures):
        raise ValueError("there is no data: give arrays")
    given = structures[:max(index for index, structure in enumerate(structures) if structure is not None) + 1]
    arrays = keras.tree.lists_to_tuples(keras.tree.map_structure(_as_array,
                                                                 tuple(given)))  # tf.data interprets lists as arrays
    lengths = {int(leaf.shape[0]) for leaf in keras.tree.flatten(arrays) if leaf is not None}
    if len(lengths) != 1:
        raise ValueError(f"arrays must have equally many samples, not {sorted(lengths)}")
    return arrays  # type: ignore[no-any-return]


def is_bare(arrays: tuple[Any, ...] | None) -> bool:
    """Return whether Keras gives these arrays to steps without a tuple around them: inputs alone."""
    return arrays is not None and not isinstance(keras.utils.pack_x_y_sample_weight(*arrays), tuple)


def training_batches(x: Any, arrays: tuple[Any, ...] | None, batch_size: int, seed: Sequence[int] | None,
                     strategy: BaseStrategy) -> Any:
    """Return the data for Keras' training: this rank's rows of every global batch.

    Args:
        x: the user's argument.
        arrays: `x` with targets and weights, if it consists of arrays.
        batch_size: global, for arrays.
        seed: for a new order of arrays, and of the batches of a PyDataset, in every epoch; equal on all ranks. None keeps
            their order.

    Raises:
        ValueError: for data that cannot be divided among ranks.
        MismatchError: for a tf.data.Dataset or DataLoader that differs between ranks.
    """
    rank, size = strategy.rank, strategy.num_replicas_in_sync
    if arrays is not None:
        if keras.backend.backend() == "tensorflow":
            draw = None if seed is None else draws_of(rows_of(arrays), seed)
            return array_dataset(arrays, batch_size, draw, lambda rows: rows[graph_rows(rows, rank, size)])
        return _ArrayShards(arrays, batch_size, seed, rank, size)
    if is_tf_dataset(x):
        return x if is_distributed(x) else sharded_dataset(checked(x), strategy)
    if isinstance(x, keras.utils.PyDataset):
        return _BatchShards(x, seed, rank, size)
    if is_loader(x):
        return _sharded_loader(x)
    if hasattr(x, "__next__"):
        return (select_rows(batch, shard(rows_of(batch), rank, size)) for batch in x)
    raise ValueError(f"MirroredStrategy cannot share out {type(x).__name__}; give arrays, a tf.data.Dataset, a PyDataset, a "
                     "torch DataLoader or a generator")


def _as_array(leaf: Any) -> Any:
    if leaf is None:
        return None
    backend = keras.backend.backend()
    is_tensorflows = is_tensorflow_ragged(leaf) or is_tensorflow_sparse(leaf)
    if is_jax_sparse(leaf) or (is_tensorflows and backend != "tensorflow"):
        raise ValueError(f"MirroredStrategy cannot share out a {type(leaf).__name__} on Keras' {backend} backend; give a "
                         "dense array or a scipy.sparse matrix")
    sliceable = convert_to_sliceable(leaf)  # casts floats to Keras' floatx
    if is_tensorflows:
        return sliceable.array
    if is_scipy_sparse(leaf):
        in_rows = sliceable.array
        return sliceable.convert_to_tf_dataset_compatible(in_rows).sparse if backend == "tensorflow" else in_rows
    array = sliceable.convert_to_numpy(sliceable.array)
    if array.ndim == 0:
        raise ValueError(f"data must have a first dimension that counts samples; {leaf!r} has none")
    return array


def is_tf_dataset(x: Any) -> bool:
    """Return whether `x` is a tf.data.Dataset."""
    tf = sys.modules.get("tensorflow")
    return tf is not None and isinstance(x, tf.data.Dataset)


def is_loader(x: Any) -> bool:
    """Return whether `x` is a torch DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(x, data.DataLoader)


def draws_of(count: int, seed: Sequence[int]) -> Callable[[], Any]:
    """Return a function that draws a new order of samples, as indices, for every pass.

    Args:
        count: the number of samples.
        seed: of all orders.
    """
    return functools.partial(np.random.default_rng(seed).permutation, count)


class _ArrayShards(keras.utils.PyDataset):
    """A PyDataset with this rank's rows of every global batch of arrays. Keras loads batches one after the other."""

    def __init__(self, arrays: tuple[Any, ...], batch_size: int, seed: Sequence[int] | None, rank: int, size: int) -> None:
        super().__init__()
        self._arrays, self._batch, self._rank, self._size = arrays, batch_size, rank, size
        self._draw = None if seed is None else draws_of(rows_of(arrays), seed)
        self._order = np.arange(rows_of(arrays))

    def __len__(self) -> int:
        return -(-len(self._order) // self._batch)

    def __getitem__(self, index: int) -> Any:
        if index == 0 and self._draw is not None:
            self._order = self._draw()
        rows = self._order[index * self._batch:(index + 1) * self._batch]
        return select_rows(self._arrays, rows[shard(len(rows), self._rank, self._size)])


class _BatchShards(keras.utils.PyDataset):
    """A PyDataset with this rank's rows of every batch of another one. Keras loads batches one after the other."""

    def __init__(self, dataset: Any, seed: Sequence[int] | None, rank: int, size: int) -> None:
        super().__init__()
        self._dataset, self._rank, self._size = dataset, rank, size
        self._loading = Loading(dataset)
        count = dataset.num_batches
        self._draw = None if seed is None or count is None else draws_of(count, seed)
        self._order: Sequence[int] = ENDLESS if count is None else range(count)

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def __getitem__(self, index: int) -> Any:
        if index == 0 and self._draw is not None:
            self._order = self._draw()
            self._loading.stop()
        batch = self._loading.batch(index, self._order)
        return select_rows(batch, shard(rows_of(batch), self._rank, self._size))

    def on_epoch_begin(self) -> None:
        call_hook(self._dataset, "on_epoch_begin")

    def on_epoch_end(self) -> None:
        self._loading.stop()
        call_hook(self._dataset, "on_epoch_end")


def call_hook(dataset: Any, name: str) -> None:
    """Call a PyDataset's `on_epoch_begin` or `on_epoch_end` with rank 0's random numbers, because it may shuffle."""
    if getattr(type(dataset), name, None) is not getattr(keras.utils.PyDataset, name, None):
        sync_random_state()
        getattr(dataset, name)()


def loaded_shards(loader: Any) -> Callable[[], Iterator[tuple[int, Any]]]:
    """Return a function that begins an epoch of a torch DataLoader: it returns the rows and this rank's shard of each batch.

    Each rank loads only its own samples of a map-style dataset, in the order of rank 0's sampler.

    Raises:
        MismatchError: on all ranks, when they have different data.
        ValueError: when the loader's sampler already divides samples among ranks.
    """
    from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
    from hvdlite_torch.mirrored.distributed_loader import source_of

    replicas = ReplicaGroup(api.runtime(), GLOBAL_PROCESS_SET_ID)
    source = source_of(loader, replicas)
    everywhere = replicas.allgather_object((source.facts(), source.depth), "loader")
    for rank, (facts, _) in enumerate(everywhere):
        if facts != everywhere[0][0]:
            raise MismatchError(f"ranks have different DataLoaders: {everywhere[0][0]} on rank 0, {facts} on rank {rank}")
    depth = max(each for _, each in everywhere)
    return lambda: source.batches(depth)


def _sharded_loader(loader: Any) -> Any:
    """Return a torch DataLoader of this rank's rows."""
    from torch.utils.data import DataLoader, IterableDataset
    begin = loaded_shards(loader)

    class Shards(IterableDataset):  # type: ignore[misc,type-arg]
        def __iter__(self) -> Iterator[Any]:
            return (batch for _, batch in begin())

    class SizedShards(Shards):
        def __len__(self) -> int:
            return len(loader)
    return DataLoader(SizedShards() if hasattr(loader.dataset, "__len__") else Shards(), batch_size=None)


def array_dataset(arrays: tuple[Any, ...], batch_size: int, draw: Callable[[], Any] | None,
                  mine: Callable[[Any], Any]) -> Any:
    """Return a tf.data.Dataset of rows of every global batch of arrays.

    Args:
        draw: draws an order of the rows for each pass; None for their own.
        mine: returns this rank's part of the indices of a global batch's rows.
    """
    import tensorflow as tf
    tensors = keras.tree.map_structure(
        lambda leaf: convert_to_sliceable(tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf), arrays)
    count = rows_of(arrays)
    indices = tf.data.Dataset.range(count)
    if draw is not None:  # drawn in Python: TensorFlow's own shuffle also depends on its global seed
        def drawn(_: Any) -> Any:
            return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(tf.numpy_function(draw, [], tf.int64), [count]))
        indices = tf.data.Dataset.range(1).flat_map(drawn).apply(tf.data.experimental.assert_cardinality(count))
    options = tf.data.Options()
    options.autotune.enabled = False  # the end of an iteration waits for the thread that tunes
    return indices.batch(batch_size).map(mine).map(lambda rows: keras.tree.map_structure(
        lambda leaf: None if leaf is None else leaf[rows], tensors)).prefetch(2).with_options(options)


def sharded_dataset(dataset: Any, strategy: BaseStrategy) -> Any:
    """Return a tf.data.Dataset of this rank's rows of every batch of another one."""
    import tensorflow as tf

    def mine(*batch: Any) -> Any:
        structure = batch if isinstance(dataset.element_spec, tuple) else batch[0]
        first = keras.tree.flatten(structure)[0]
        rows = graph_rows(first, strategy.rank, strategy.num_replicas_in_sync)
        return select_rows(structure, rows)
    return dataset.map(mine).prefetch(tf.data.AUTOTUNE)


def distributed_dataset(dataset: Any, strategy: BaseStrategy) -> Any:
    """Return the result of `experimental_distribute_dataset`; `fit`, `evaluate` and `predict` use the original dataset."""
    shared = sharded_dataset(checked(dataset), strategy)
    shared._hvdlite_global = dataset
    return shared


def local_dataset(dataset: Any) -> Any:
    """Mark a dataset as this rank's part of every global batch, for `fit`, `evaluate` and `predict`."""
    import tensorflow as tf
    local = dataset.with_options(tf.data.Options())  # a new object: the user's is unchanged
    local._hvdlite_global = None
    return local


def global_dataset(x: Any) -> Any:
    """Return the original dataset of a result of `experimental_distribute_dataset`."""
    whole = getattr(x, "_hvdlite_global", None)
    return x if whole is None else whole


def is_distributed(dataset: Any) -> bool:
    """Return whether a tf.data.Dataset was derived from one with only this rank's part."""
    return any(hasattr(each, "_hvdlite_global") for each in lineage(dataset))


def graph_rows(leaf: Any, rank: int, size: int, *, is_exclusive: bool = False) -> Any:
    """Return this rank's rows of a batch whose length is known when the graph runs.

    Args:
        is_exclusive: whether to use `disjoint_shard` of `training.mirrored.shards` instead of `shard`.
    """
    import tensorflow as tf
    rows = tf.cast(tf.shape(leaf)[0], tf.int32)  # of ragged tensors it is an int64
    each, more = rows // size, rows % size
    begin = rank * each + tf.minimum(rank, more)
    end = begin + each + tf.cast(rank < more, tf.int32)
    if is_exclusive:
        return slice(begin, end)
    few = rows < size
    return slice(tf.where(few, 0, begin), tf.where(few, rows, end))
