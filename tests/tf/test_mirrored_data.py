"""Data in a `MirroredStrategy`: steps, small batches, shuffles, workers and datasets that are distributed already.

Every comparison is with one process. With a learning rate of zero, an epoch's loss is that of all samples only when every
sample was seen exactly once.
"""

from __future__ import annotations

import pytest

from tests.tf.support import run
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
kinds = {"arrays": lambda size: ((X, Y), {"batch_size": size}), "PyDataset": lambda size: ((Batches(-(-101 // size), size),), {}),
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
one, other = mirrored(sgd, run_eagerly=True), compiled(sgd, run_eagerly=True)
def alike():
    weights = hvd.broadcast_object(other.get_weights())
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


@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
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
