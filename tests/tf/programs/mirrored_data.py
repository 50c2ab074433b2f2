"""Programs of test_mirrored_data.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf.keras as hvd
from tests.raising import raises
from tests.tf.programs.mirroring import (
    X,
    Y,
    begin,
    mirrored,
    reference,
    same,
    same_history,
    sgd,
)

Data = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of `fit` and its like, by place and by name."""


class Batches(keras.utils.PyDataset):
    def __init__(self, count: int = 11, size: int = 10, shuffles: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.count, self.size, self.order, self.shuffles = count, size, np.arange(101), shuffles

    @property
    def num_batches(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = self.order[self.size * index % 101:][:self.size]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        if self.shuffles:
            np.random.shuffle(self.order)


def generator(size: int = 10, count: int = 11) -> Iterator[Any]:
    while True:
        yield from (Batches(size=size)[index] for index in range(count))


def kinds_of_data() -> dict[str, Callable[[int], Data]]:
    """Return what makes all data of a batch size, by the kind of data, for those that this backend takes."""
    kinds: dict[str, Callable[[int], Data]] = {
        "arrays": lambda size: ((X, Y), {"batch_size": size}),
        "PyDataset": lambda size: ((Batches(-(-101 // size), size),), {}),
        "generator": lambda size: ((generator(size, -(-101 // size)),), {})}
    if keras.backend.backend() == "tensorflow":
        kinds["tf.data"] = lambda size: ((tf.data.Dataset.from_tensor_slices((X, Y)).batch(size),), {})
    if keras.backend.backend() == "torch":
        import torch
        from torch.utils.data import DataLoader, IterableDataset, TensorDataset

        class Stream(IterableDataset):
            def __iter__(self) -> Iterator[Any]:
                return iter(zip(torch.tensor(X), torch.tensor(Y), strict=True))
        kinds["DataLoader"] = lambda size: ((DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), size),), {})
        kinds["IterableDataset"] = lambda size: ((DataLoader(Stream(), size),), {})
    return kinds


class Models:
    """A model of the strategy, and one process's."""

    def __init__(self, strategy: Any) -> None:
        self.one, self.other = mirrored(strategy, sgd, run_eagerly=True), reference(sgd, run_eagerly=True)
        self.both = (self.one, self.other)

    def make_alike(self) -> None:
        weights = self.other.get_weights()
        for model in self.both:
            model.set_weights(weights)

    def results(self, method: str, make_data: Callable[[int], Data], size: int, **options: Any) -> tuple[Any, Any]:
        def result(model: Any) -> Any:
            data, more = make_data(size)
            data = data[:1] if method == "predict" else data
            return getattr(model, method)(*data, verbose=0, **more, **options)
        return result(self.one), result(self.other)


def steps_count_global_batches() -> None:
    strategy, _ = begin()
    models, kinds = Models(strategy), kinds_of_data()
    models.make_alike()
    for kind in kinds:  # 100: the last batch has one sample; 101: there is one batch; 1: so many batches of one sample
        for steps, size in ((2, 10), (1, 1), *(((None, 100), (None, 101)) if kind != "generator" else ())):
            for method in ("evaluate", "predict") if size in (10, 100) else ("evaluate",):
                np.testing.assert_allclose(*models.results(method, kinds[kind], size, steps=steps), rtol=1e-4, atol=1e-5,
                                           err_msg=f"{kind} {method} {steps} {size}")
        for validation in dict.fromkeys(("PyDataset", kind)):
            held_out = [kinds[validation](35)[0] for _ in range(2)]
            histories = []
            for model in models.both:
                data, more = kinds[kind](10)
                epochs = 1 if validation == "generator" else 2  # a generator goes on after what was prefetched
                of_validation = held_out.pop()
                histories.append(model.fit(*data, shuffle=False, verbose=0, steps_per_epoch=3, epochs=epochs,
                                           validation_steps=2, validation_batch_size=35 if validation == "arrays" else None,
                                           validation_data=of_validation if validation == "arrays" else of_validation[0],
                                           **more))
            same(*models.both)
            same_history(*histories)


def every_sample_is_seen_once_with_seeds_that_depend_on_the_rank() -> None:
    strategy, rank = begin()
    still = mirrored(strategy, lambda: keras.optimizers.SGD(0.0), run_eagerly=True)
    still.set_weights(hvd.broadcast_object(still.get_weights()))

    def sees_everything(data: tuple[Any, ...], epochs: int = 3, **options: Any) -> None:
        expected = still.evaluate(X, Y, verbose=0)[0]
        losses = still.fit(*data, epochs=epochs, verbose=0, **options).history["loss"]
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
    keras.utils.set_random_seed(1 + rank)
    sees_everything((X, Y), batch_size=30)
    sees_everything((X, Y), batch_size=30, steps_per_epoch=4)
    sees_everything((Batches(3, 35, shuffles=True),), epochs=3)
    sees_everything((Batches(3, 35, shuffles=True, workers=2, use_multiprocessing=True),))
    sees_everything((Batches(3, 35, shuffles=True, workers=2),))
    orders = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        still.fit(Batches(3, 35, shuffles=True), verbose=0)
        orders.append(random.random())
    assert orders[0] == orders[1]  # a seed makes it all the same again
    numpys: Any = np.random.get_state()
    rank_states = hvd.allgather_object((random.getstate(), numpys[1].tolist()))
    assert rank_states[0] == rank_states[1]
    if keras.backend.backend() == "torch":
        _loaders_are_seen_once(still, rank, sees_everything)
    if keras.backend.backend() == "tensorflow":
        _datasets_are_seen_once(still, strategy, rank, sees_everything)


def _loaders_are_seen_once(still: Any, rank: int, sees_everything: Callable[..., None]) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    torch.seed()
    data = TensorDataset(torch.tensor(X), torch.tensor(Y))
    sees_everything((DataLoader(data, 30, shuffle=True),))
    sees_everything((DataLoader(data, 35, shuffle=True, num_workers=1),), epochs=2)
    shuffled = DataLoader(data, 30, shuffle=True)
    np.testing.assert_allclose(still.evaluate(shuffled, verbose=0), still.evaluate(X, Y, verbose=0), rtol=1e-4)
    assert still.predict(shuffled, verbose=0).shape == (101, 2)
    other_data = DataLoader(TensorDataset(torch.tensor(X[rank:]), torch.tensor(Y[rank:])), 20)
    raises(hvd.MismatchError, "different DataLoaders", lambda: still.fit(other_data, verbose=0))


def _datasets_are_seen_once(still: Any, strategy: Any, rank: int, sees_everything: Callable[..., None]) -> None:
    keras.utils.set_random_seed(1 + rank)
    pairs = tf.data.Dataset.from_tensor_slices((X, Y))
    unlike = pairs.shuffle(101).batch(30)
    for use in (lambda: still.fit(unlike, verbose=0), lambda: still.evaluate(unlike, verbose=0),
                lambda: strategy.experimental_distribute_dataset(unlike),
                lambda: still.fit(X, Y, validation_data=unlike.map(lambda x, y: (x, y)), verbose=0)):
        raises(hvd.MismatchError, "shuffles with the seeds", use)
    hvd.MirroredStrategy()  # takes over rank 0's seed
    sees_everything((pairs.shuffle(101).batch(30),))
    sees_everything((pairs.shuffle(101, seed=3).batch(30).prefetch(2),))


def datasets_that_are_distributed_already() -> None:
    strategy, _ = begin()
    models = Models(strategy)
    one, other = models.both

    def whole() -> Any:
        return tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
    models.make_alike()
    distributed = strategy.experimental_distribute_dataset(whole())
    held_out = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(100))
    mine, theirs = (model.fit(data, epochs=2, validation_data=validation, verbose=0, validation_steps=2)
                    for model, data, validation in ((one, distributed, held_out), (other, whole(), (X, Y))))
    same_history(mine, theirs, 0.05)
    same(one, other)
    for steps in (None, 2):
        for method in ("evaluate", "predict"):
            mine, theirs = (getattr(model, method)(data, steps=steps, verbose=0)
                            for model, data in ((one, distributed), (other, whole())))
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)

    # Each rank's own part: rank r has every other sample, so that two ranks' batches make a global one.
    def interleaved(context: Any) -> Any:
        part = tf.data.Dataset.from_tensor_slices((X[:96], Y[:96]))
        part = part.shard(context.num_input_pipelines, context.input_pipeline_id)
        return part.batch(context.get_per_replica_batch_size(16))
    order = np.arange(96).reshape(-1, 8, 2).transpose(0, 2, 1).reshape(-1)
    models.make_alike()
    parts = strategy.distribute_datasets_from_function(interleaved)
    for model, data in ((one, (parts.prefetch(1),)), (other, (X[order], Y[order]))):
        model.fit(*data, batch_size=None if model is one else 16, epochs=2, shuffle=False, verbose=0, steps_per_epoch=3)
    same(one, other)
    np.testing.assert_allclose(one.evaluate(parts, verbose=0), other.evaluate(X[:96], Y[:96], verbose=0), rtol=1e-4)
    np.testing.assert_allclose(one.predict(parts, verbose=0), other.predict(X[order], verbose=0), atol=1e-5)

    # Parts of different lengths: every epoch ends on all ranks after the shorter one.
    uneven = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(5 - 2 * context.input_pipeline_id))
    before = int(one.optimizer.iterations.numpy())
    assert len(one.fit(uneven, epochs=2, verbose=0).history["loss"]) == 2
    assert int(one.optimizer.iterations.numpy()) == before + 6
