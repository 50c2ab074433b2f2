"""Data in a `MirroredStrategy`: steps, small batches, shuffles, workers and datasets that are distributed already.

Every comparison is with one process. With a learning rate of zero, an epoch's loss is that of all samples only when every
sample was seen exactly once.
"""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run
from tests.tf.test_mirrored import COMMON

DATA = COMMON + """
import random
class Batches(keras.utils.PyDataset):
    def __init__(self, count=11, size=10, shuffles=False, **options):
        super().__init__(**options)
        self.count, self.size, self.order, self.shuffles = count, size, np.arange(101), shuffles
    @property
    def num_batches(self):
        return self.count
    def __getitem__(self, index):
        rows = self.order[self.size * index % 101:][:self.size]
        return X[rows], Y[rows]
    def on_epoch_end(self):
        if self.shuffles:
            np.random.shuffle(self.order)

def generator(size=10, count=11):
    while True:
        yield from (Batches(size=size)[index] for index in range(count))

backend = keras.backend.backend()
kinds = {"arrays": lambda size: ((X, Y), {"batch_size": size}),
         "PyDataset": lambda size: ((Batches(-(-101 // size), size),), {}),
         "generator": lambda size: ((generator(size, -(-101 // size)),), {})}
if backend == "tensorflow":
    import tensorflow as tf
    kinds["tf.data"] = lambda size: ((tf.data.Dataset.from_tensor_slices((X, Y)).batch(size),), {})
if backend == "torch":
    import torch
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset
    kinds["DataLoader"] = lambda size: ((DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), size),), {})
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(torch.tensor(X), torch.tensor(Y)))
    kinds["IterableDataset"] = lambda size: ((DataLoader(Stream(), size),), {})
one, other = mirrored(sgd, run_eagerly=True), reference(sgd, run_eagerly=True)
def alike():
    weights = other.get_weights()
    for model in (one, other):
        model.set_weights(weights)
def pair(method, kind, size, **options):
    results = []
    for model in (one, other):
        data, more = kinds[kind](size)
        data = data[:1] if method == "predict" else data
        results.append(getattr(model, method)(*data, verbose=0, **more, **options))
    return results
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_count_global_batches(backend: str) -> None:
    run(2, DATA + """
alike()
for kind in kinds:  # 100: the last batch has one sample; 101: there is one batch; 1: so many batches of one sample
    for steps, size in ((2, 10), (1, 1), *(((None, 100), (None, 101)) if kind != "generator" else ())):
        for method in ("evaluate", "predict"):
            np.testing.assert_allclose(*pair(method, kind, size, steps=steps), rtol=1e-4, atol=1e-5,
                                       err_msg=f"{kind} {method} {steps} {size}")
    for validation in ("PyDataset", kind):
        held_out = [kinds[validation](35)[0] if validation == "arrays" else kinds[validation](35)[0][0] for _ in range(2)]
        histories = []
        for model in (one, other):
            data, more = kinds[kind](10)
            epochs = 1 if validation == "generator" else 2  # what a generator goes on with depends on what was prefetched
            histories.append(model.fit(*data, shuffle=False, verbose=0, steps_per_epoch=3, epochs=epochs, validation_steps=2,
                                       validation_batch_size=35 if validation == "arrays" else None,
                                       validation_data=held_out.pop(), **more))
        same(one, other)
        same_history(*histories)
""", KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_every_sample_is_seen_once_with_seeds_that_depend_on_the_rank(backend: str) -> None:
    run(2, DATA + """
still = mirrored(lambda: keras.optimizers.SGD(0.0), run_eagerly=True)
still.set_weights(hvd.broadcast_object(still.get_weights()))
def sees_everything(data, epochs=3, **options):
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
rank_states = hvd.allgather_object((random.getstate(), np.random.get_state()[1].tolist()))
assert rank_states[0] == rank_states[1]
if backend == "torch":
    torch.seed()
    data = TensorDataset(torch.tensor(X), torch.tensor(Y))
    sees_everything((DataLoader(data, 30, shuffle=True),))
    sees_everything((DataLoader(data, 35, shuffle=True, num_workers=1),), epochs=2)
    shuffled = DataLoader(data, 30, shuffle=True)
    np.testing.assert_allclose(still.evaluate(shuffled, verbose=0), still.evaluate(X, Y, verbose=0), rtol=1e-4)
    assert still.predict(shuffled, verbose=0).shape == (101, 2)
    other_data = DataLoader(TensorDataset(torch.tensor(X[rank:]), torch.tensor(Y[rank:])), 20)
    raises(hvd.MismatchError, "different DataLoaders", lambda: still.fit(other_data, verbose=0))
if backend == "tensorflow":
    keras.utils.set_random_seed(1 + rank)
    pairs = tf.data.Dataset.from_tensor_slices((X, Y))
    unlike = pairs.shuffle(101).batch(30)
    for use in (lambda: still.fit(unlike, verbose=0), lambda: still.evaluate(unlike, verbose=0),
                lambda: strategy.experimental_distribute_dataset(unlike),
                lambda: still.fit(X, Y, validation_data=unlike.map(lambda x, y: (x, y)), verbose=0)):
        raises(hvd.MismatchError, "shuffles with the seeds", use)
    again = hvd.MirroredStrategy()  # takes over rank 0's seed
    sees_everything((pairs.shuffle(101).batch(30),))
    sees_everything((pairs.shuffle(101, seed=3).batch(30).prefetch(2),))
""", KERAS_BACKEND=backend)


def test_datasets_that_are_distributed_already() -> None:
    run(2, DATA + """
whole = lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)
alike()
distributed = strategy.experimental_distribute_dataset(whole())
held_out = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(100))
same_history(*(model.fit(data, epochs=2, validation_data=validation, verbose=0, validation_steps=2)
               for model, data, validation in ((one, distributed, held_out), (other, whole(), (X, Y)))), tolerance=0.05)
same(one, other)
for steps in (None, 2):
    for method in ("evaluate", "predict"):
        results = [getattr(model, method)(data, steps=steps, verbose=0)
                   for model, data in ((one, distributed), (other, whole()))]
        np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)

# Each rank's own part: rank r has every other sample, so that two ranks' batches make a global one.
def interleaved(context):
    part = tf.data.Dataset.from_tensor_slices((X[:96], Y[:96])).shard(context.num_input_pipelines, context.input_pipeline_id)
    return part.batch(context.get_per_replica_batch_size(16))
order = np.arange(96).reshape(-1, 8, 2).transpose(0, 2, 1).reshape(-1)
alike()
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
""")
