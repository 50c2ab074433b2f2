"""`stop_training` and the number of steps in an epoch are agreed on by all ranks, in a scope and outside."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run
from tests.tf.test_mirrored import COMMON


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_stop_together(backend: str) -> None:
    run(2, COMMON + """
one, other = mirrored(sgd, run_eagerly=True), compiled(sgd, run_eagerly=True)
class Deciding(keras.callbacks.Callback):
    def __init__(self, hook, at):
        super().__init__()
        self.at, self.ended = at, []
        setattr(self, hook, self.decide)
    def decide(self, number, logs=None):
        if number == self.at and rank == 1:
            self.model.stop_training = True
class Counting(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []
    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)
    def on_epoch_end(self, epoch, logs=None):
        self.seen.append("end")
for hook, at, expected in (("on_train_batch_end", 1, [0, 1, "end"]), ("on_train_batch_begin", 0, [0, "end"]),
                           ("on_epoch_begin", 1, [0, 1, 2, "end", 0, "end"]), ("on_epoch_end", 0, [0, 1, 2, "end"])):
    counting = Counting()
    one.fit(X[:30], Y[:30], batch_size=10, epochs=2, verbose=0, callbacks=[counting, Deciding(hook, at)])
    assert counting.seen == expected, (hook, counting.seen)
iterations = lambda model: int(keras.ops.convert_to_numpy(model.optimizer.iterations))
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
    class Custom(keras.Model):
        def train_step(self, data):
            x, y = data
            super().train_step(data)
            return {"own": keras.ops.mean(keras.ops.abs(self(x) - y))}
    def custom(make):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        model = Custom(inputs, keras.layers.Dense(2)(inputs))
        model.compile(make(), "mse", run_eagerly=True)
        return model
    with strategy.scope():
        mine = custom(lambda: keras.optimizers.SGD(0.05))
    histories = [model.fit(X[:100], Y[:100], batch_size=10, epochs=5, shuffle=False, verbose=0, callbacks=[
        keras.callbacks.EarlyStopping("own", patience=0, min_delta=0.3, mode="min")]).history
        for model in (mine, custom(lambda: keras.optimizers.SGD(0.05)))]
    np.testing.assert_allclose(histories[0]["own"], histories[1]["own"], rtol=1e-4)
    assert len(histories[0]["own"]) < 5

from hvdlite_tf.keras.distributed_model import WRITERS
assert not hasattr(keras.callbacks, "OrbaxCheckpoint") or keras.callbacks.OrbaxCheckpoint in WRITERS

# Outside of the scope: ranks with other numbers of steps.
from hvdlite_tf.keras.stopping import StopTogetherCallback, refuse_uneven_steps
def own(*callbacks, steps=None, model=None):
    model = model or build(1)
    if not model.compiled:
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", run_eagerly=True)
    rows = range(rank, 4 if rank else 8, 2)  # four batches, and two
    batches = [(X[10 * row:10 * row + 10], Y[10 * row:10 * row + 10]) for row in rows]
    data = batches_of(batches) if steps is None else (each for each in [*batches, *batches])
    model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks), steps_per_epoch=steps)
    return model
class batches_of(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches
    def __len__(self):
        return len(self.batches)
    def __getitem__(self, index):
        return self.batches[index]
counting = Counting()
model = own(counting, StopTogetherCallback())
assert counting.seen == [*range(2 if rank else 4), "end"] * 2 and iterations(model) == 4  # two batches pass untrained
reference = build(1)
reference.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
reference.fit(X[:40], Y[:40], batch_size=20, epochs=2, shuffle=False, verbose=0)
same(model, reference)
counting = Counting()
own(Deciding("on_train_batch_end", 0), counting, StopTogetherCallback(every_batch=rank == 0))
assert counting.seen == [0, "end"]
class Checking(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        refuse_uneven_steps(self)
raises(ValueError, "ranks have [4, 2] steps in an epoch", lambda: own(Checking()))
own(Checking(), StopTogetherCallback())
""", KERAS_BACKEND=backend)
