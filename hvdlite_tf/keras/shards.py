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

from hvdlite.core.errors import MismatchError, UnsupportedError
from hvdlite.training.mirrored.shares import Shares, SharesPass
from hvdlite_tf.keras.loading import ENDLESS, Loading
from hvdlite_tf.keras.order import checked, lineage, sync_random_state
from hvdlite_tf.keras.scope import BaseStrategy

Batch = Any
"""A structure of arrays whose first dimension counts samples."""
Own = Callable[[int, int], slice]
"""Returns this rank's rows of a batch, given its index in the pass and its rows."""


class Sharing(keras.callbacks.Callback):  # type: ignore[misc]
    """The shares of one training's batches; as a callback, it reports the batches that are finished.

    A pass begins with its batch 0: Keras may begin one more than it uses, and go on with one in the next epoch.
    """

    def __init__(self, shares: Shares) -> None:
        super().__init__()
        self.shares = shares
        self._pass: SharesPass | None = None

    @property
    def _calls(self) -> int:
        """How many batches are made before one of them is finished. (Reading `model` writes JAX's state back.)"""
        return getattr(self._model, "steps_per_execution", 1)

    def begin(self, prefetched: int = 0) -> SharesPass:
        """Begin a pass; another one has ended."""
        self.end()
        self._pass = self.shares.begin(prefetched + self._calls)
        return self._pass

    def own(self, index: int, rows: int) -> slice:
        """Return this rank's rows of the next batch."""
        current = self._pass if index and self._pass is not None else self.begin()
        return current.own(int(rows))

    def end(self) -> None:
        """Let nobody wait who still makes batches."""
        if self._pass is not None:
            self._pass.end()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count the batches before this one. (A method for the end of batches would make Keras wait for logs on JAX.)"""
        if batch and self._pass is not None:
            self._pass.finished(self._calls)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the last batches; their time and that of the first ones of the next epoch are not theirs alone."""
        if self._pass is not None:
            self._pass.pause()
            self._pass.finished(self._calls)
            self._pass.pause()

    def on_train_end(self, logs: Any = None) -> None:
        """Keras is about to leave its iterators."""
        self.end()


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
                     strategy: BaseStrategy, sharing: Sharing) -> Any:
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
    if arrays is not None:
        if keras.backend.backend() == "tensorflow":
            draw = None if seed is None else draws_of(rows_of(arrays), seed)
            return array_dataset(arrays, batch_size, draw, lambda index, rows: rows[own_in_graph(index, rows, strategy,
                                                                                                sharing.own)])
        return _ArrayShards(arrays, batch_size, seed, sharing.own)
    if is_tf_dataset(x):
        return x if is_distributed(x) else sharded_dataset(checked(x), strategy, sharing.own)
    if isinstance(x, keras.utils.PyDataset):
        return _BatchShards(x, seed, sharing.own)
    if is_loader(x):
        return _sharded_loader(x, strategy, sharing)
    if hasattr(x, "__next__"):
        return (select_rows(batch, sharing.own(index, rows_of(batch))) for index, batch in enumerate(x))
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

    def __init__(self, arrays: tuple[Any, ...], batch_size: int, seed: Sequence[int] | None, own: Own) -> None:
        super().__init__()
        self._arrays, self._batch, self._own = arrays, batch_size, own
        self._draw = None if seed is None else draws_of(rows_of(arrays), seed)
        self._order = np.arange(rows_of(arrays))

    def __len__(self) -> int:
        return -(-len(self._order) // self._batch)

    def __getitem__(self, index: int) -> Any:
        if index == 0 and self._draw is not None:
            self._order = self._draw()
        rows = self._order[index * self._batch:(index + 1) * self._batch]
        return select_rows(self._arrays, rows[self._own(index, len(rows))])


class _BatchShards(keras.utils.PyDataset):
    """A PyDataset with this rank's rows of every batch of another one. Keras loads batches one after the other."""

    def __init__(self, dataset: Any, seed: Sequence[int] | None, own: Own) -> None:
        super().__init__()
        self._dataset, self._own = dataset, own
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
        return select_rows(batch, self._own(index, rows_of(batch)))

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


def loaded_shards(loader: Any, strategy: BaseStrategy, sharing: Sharing) -> Callable[[], Iterator[tuple[int, Any]]]:
    """Return a function that begins an epoch of a torch DataLoader: it returns the rows and this rank's shard of each batch.

    Each rank loads only its own samples of a map-style dataset, in the order of rank 0's sampler.

    Raises:
        MismatchError: on all ranks, when they have different data.
        ValueError: when the loader's sampler already divides samples among ranks.
    """
    from hvdlite_torch.mirrored.distributed_loader import source_of

    replicas = strategy.replicas
    source = source_of(loader, replicas, sharing.shares)
    everywhere = replicas.allgather_object((source.facts(), source.depth), "loader")
    for rank, (facts, _) in enumerate(everywhere):
        if facts != everywhere[0][0]:
            raise MismatchError(f"ranks have different DataLoaders: {everywhere[0][0]} on rank 0, {facts} on rank {rank}")
    depth = max(each for _, each in everywhere)
    return lambda: source.batches(depth, sharing.begin(depth))


def _sharded_loader(loader: Any, strategy: BaseStrategy, sharing: Sharing) -> Any:
    """Return a torch DataLoader of this rank's rows."""
    from torch.utils.data import DataLoader, IterableDataset
    begin = loaded_shards(loader, strategy, sharing)

    class Shards(IterableDataset):  # type: ignore[misc,type-arg]
        def __iter__(self) -> Iterator[Any]:
            for _, batch in begin():  # Keras makes an iterator more at the end of an epoch, and asks it for nothing
                yield batch

    class SizedShards(Shards):
        def __len__(self) -> int:
            return len(loader)
    return DataLoader(SizedShards() if hasattr(loader.dataset, "__len__") else Shards(), batch_size=None)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that tf.data calls as it is: without branches on tensors, autograph has nothing to convert."""
    import tensorflow as tf
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


def array_dataset(arrays: tuple[Any, ...], batch_size: int, draw: Callable[[], Any] | None,
                  mine: Callable[[Any, Any], Any]) -> Any:
    """Return a tf.data.Dataset of rows of every global batch of arrays.

    Args:
        draw: draws an order of the rows for each pass; None for their own.
        mine: returns this rank's part of the indices of a global batch's rows, given the batch's number and these.
    """
    import tensorflow as tf
    tensors = keras.tree.map_structure(
        lambda leaf: convert_to_sliceable(tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf), arrays)
    count = rows_of(arrays)
    indices = tf.data.Dataset.range(count)
    if draw is not None:  # drawn in Python: TensorFlow's own shuffle also depends on its global seed
        def drawn(_: Any) -> Any:
            return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(tf.numpy_function(draw, [], tf.int64), [count]))
        indices = tf.data.Dataset.range(1).flat_map(plain(drawn)).apply(tf.data.experimental.assert_cardinality(count))
    options = tf.data.Options()
    options.autotune.enabled = False  # the end of an iteration waits for the thread that tunes
    return indices.batch(batch_size).enumerate().map(plain(mine)).map(plain(lambda rows: keras.tree.map_structure(
        lambda leaf: None if leaf is None else leaf[rows], tensors))).prefetch(2).with_options(options)


def sharded_dataset(dataset: Any, strategy: BaseStrategy, own: Own) -> Any:
    """Return a tf.data.Dataset of this rank's rows of every batch of another one."""
    import tensorflow as tf

    def mine(index: Any, batch: Any) -> Any:
        return select_rows(batch, own_in_graph(index, keras.tree.flatten(batch)[0], strategy, own))
    return dataset.enumerate().map(plain(mine)).prefetch(tf.data.AUTOTUNE)


def distributed_dataset(dataset: Any, strategy: BaseStrategy) -> Any:
    """Return the result of `experimental_distribute_dataset`; `fit`, `evaluate` and `predict` use the original dataset."""
    if strategy.shares.is_auto:
        raise UnsupportedError("shares=\"auto\" follow the times of fit's steps. For loops of your own, give the strategy a "
                               "number for each rank, such as shares=[2, 1]; give fit the dataset itself")
    shared = sharded_dataset(checked(dataset), strategy, lambda _, rows: strategy.shares.first.own(int(rows)))
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


def own_in_graph(index: Any, leaf: Any, strategy: BaseStrategy, own: Own) -> Any:
    """Return this rank's rows of a batch, given its index in the pass, when the graph runs."""
    import tensorflow as tf
    if not strategy.has_shares:
        return graph_rows(leaf, strategy.rank, strategy.num_replicas_in_sync)

    def bounds(index: Any, rows: Any) -> tuple[Any, Any]:
        mine = own(index, rows)
        return np.int64(mine.start), np.int64(mine.stop)
    both = tf.numpy_function(bounds, [index, tf.cast(tf.shape(leaf)[0], tf.int64)], [tf.int64, tf.int64])
    return slice(*(tf.ensure_shape(each, ()) for each in both))


def graph_rows(leaf: Any, rank: int, size: int, *, is_exclusive: bool = False) -> Any:
    """Return this rank's rows of a batch whose length is known when the graph runs.

    Args:
        is_exclusive: whether to use `disjoint_shard` of `training.mirrored.shards` instead of equal shares of a `Split`.
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
