"""`MirroredStrategy`: any loss, any share, any way of making a model: two ranks equal one process, or there is an error."""

from __future__ import annotations

import pytest

from tests.tf.support import BACKENDS, run
from tests.tf.test_mirrored import COMMON

LOSSES = COMMON + """
ops, MSE = keras.ops, keras.losses.MeanSquaredError
weights = rng.uniform(0.1, 3, 101).astype("float32")
weights[:4] = 0.0
words = rng.integers(1, 9, (101, 7)).astype("int32")
words[::3, 2:] = 0  # ranks have different numbers of valid tokens
tagged = rng.normal(size=(101, 7, 2)).astype("float32")

def regularized(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activity_regularizer=keras.regularizers.L2(0.1),
                                                                   kernel_regularizer="l2")])
def embedding(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((7,), dtype="int32"), keras.layers.Embedding(9, 4, mask_zero=True),
                             keras.layers.Dense(2)])
def two_outputs(seed):
    keras.utils.set_random_seed(seed)
    given = keras.Input((6,))
    return keras.Model(given, (keras.layers.Dense(2, name="one")(given), keras.layers.Dense(2, name="two")(given)))

plain, small = lambda: keras.optimizers.SGD(0.05), lambda: keras.optimizers.SGD(0.005)
for name, loss, make, model, x, y, sample_weight in [
    ("a mean", lambda t, p: ops.mean(ops.square(t - p)), plain, build, X, Y, None),
    ("a sum, and by weights", (MSE(reduction="sum"), MSE(reduction="mean_with_sample_weight")), small, two_outputs, X,
     (Y, Y), (weights, weights)),
    ("masked", "mse", plain, embedding, words, tagged, None),
    ("masked, by weights", MSE(reduction="mean_with_sample_weight"), plain, embedding, words, tagged,
     np.repeat(weights[:, None], 7, 1)),
    ("accumulated, weighted", "mse", lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), regularized, X, Y,
     weights),
]:
    if keras.backend.backend() != "tensorflow" and name in ("a mean", "masked"):
        continue
    first = lambda rows, data: keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[:rows], data)
    with strategy.scope():
        one = model(1 + 7 * rank)
        one.compile(make(), loss)
    other = Reference(lambda: model(1))
    other.compile(make(), loss)
    start = other.trainable_variables
    histories = []
    for each in (one, other):
        each.train_on_batch(x[:5], first(5, y), sample_weight=first(5, sample_weight))  # 3 samples on rank 0, 2 on rank 1
        histories.append(each.fit(x[:25], first(25, y), batch_size=10, shuffle=False, verbose=0,  # 10, 10 and 5 samples
                                  sample_weight=first(25, sample_weight)))
        if "sum" in name:
            each.train_on_batch(x[:1], first(1, y))  # which all ranks compute
    np.testing.assert_allclose(*(np.ravel(each.evaluate(x, y, batch_size=8, verbose=0))[0] for each in (one, other)),
                               rtol=1e-4, err_msg=name)
    moved = max(np.abs(value - before).max() for value, before in zip(other.trainable_variables, start))
    assert moved > 1e-3, name
    same(one, other, 1e-6)
    # (TensorFlow's Keras averages the losses of several outputs over batches without weights.)
    np.testing.assert_allclose(*(each.history["loss"] for each in histories), rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(one.test_on_batch(x[:5], first(5, y)), other.test_on_batch(x[:5], first(5, y)), rtol=1e-4,
                               err_msg=name)
"""

VARIABLES = COMMON + """
backend = keras.backend.backend()
def unbuilt(seed):
    keras.utils.set_random_seed(seed + 7 * rank)
    return keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
def alike(model):
    everywhere = hvd.allgather_object([np.array(keras.ops.convert_to_numpy(variable))
                                       for variable in model.trainable_variables])
    return all((one == other).all() for one, other in zip(*everywhere))
def seeds(model):
    return hvd.allgather_object([np.array(keras.ops.convert_to_numpy(variable)).tolist()
                                 for variable in model.variables if "seed" in variable.path])

# Built in the scope, in run, or later by being called; trained by train_on_batch alone; evaluated before.
with strategy.scope():
    built, in_run, called, trained, evaluated, predicted = build(1 + 7 * rank), *(unbuilt(number) for number in range(5))
    for each in (trained, evaluated, predicted):
        each.compile(sgd(), "mse")
assert alike(built)
strategy.run(lambda: in_run(X[:4]))
called(X[:4])
trained.train_on_batch(X[:20], Y[:20])
evaluated.evaluate(X[:20], Y[:20], verbose=0)
predicted.predict(X[:20], verbose=0)
for each in (in_run, called, trained, evaluated, predicted):
    assert alike(each), each.variables[0]
    drawn = seeds(each)
    assert drawn[0] != drawn[1]  # every rank draws its own masks
for _ in range(3):
    trained.train_on_batch(X[:20], Y[:20])
assert alike(trained)

# Weights that are set on one rank, and moving averages: everybody applies rank 0's model.
with strategy.scope():
    model = build(1, keras.layers.BatchNormalization())
    model.compile(sgd(), "mse")
for set_on in (0, 1):
    if rank == set_on:
        model.set_weights([np.ones_like(weight) * (1 + rank) for weight in model.get_weights()])
    rows = model.predict(np.ones((4, 6), "float32"), verbose=0)
    assert (rows == rows[0]).all()
    np.testing.assert_allclose(model.test_on_batch(X[:6], Y[:6]), model.evaluate(X[:6], Y[:6], verbose=0), rtol=1e-5)
    assert alike(model)
fitted = model.fit(X[:40], Y[:40], validation_data=(X[40:], Y[40:]), batch_size=20, verbose=0)
np.testing.assert_allclose(fitted.history["val_loss"][-1], model.evaluate(X[40:], Y[40:], verbose=0), rtol=1e-5)

# An optimizer that is wrapped already, at compile or held as an attribute.
class Two(keras.Model):
    def __init__(self, base, second):
        super().__init__(base.inputs, base.outputs)
        self.second = second
wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
with strategy.scope():
    raises(ValueError, "leave out DistributedOptimizer", lambda: build(1).compile(wrapped, "mse"))
    two = Two(build(1), wrapped)
    two.compile(sgd(), "mse")
raises(ValueError, "leave out DistributedOptimizer", lambda: two.fit(X, Y, verbose=0))

# Optimizers that a model holds as attributes begin like rank 0's.
second = keras.optimizers.SGD(0.1 + rank, momentum=0.5)
two.second = second
second.build(two.trainable_variables)
two.fit(X[:20], Y[:20], batch_size=20, verbose=0)
assert abs(float(keras.ops.convert_to_numpy(second.learning_rate)) - 0.1) < 1e-6

if backend == "tensorflow":
    import tensorflow as tf

    # Loops outside of run and in it, with rows of an embedding.
    words = rng.integers(0, 9, (8, 3))
    def layers(seed):
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.layers.Embedding(9, 4), keras.layers.Dense(1)]), keras.optimizers.Adam(0.01)
    def train(model, optimizer, rows, average):
        with tf.GradientTape() as tape:
            loss = average(tf.reduce_mean(tf.square(model(rows) - 1.0), [1, 2]))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    share = words[4 * rank:4 * rank + 4]
    with strategy.scope():
        (plain, one), (running, two) = layers(1 + rank), layers(1 + rank)
    reference, three = layers(1)
    reference(words)
    outside = tf.function(lambda: train(plain, one, share, tf.reduce_mean))
    inside = tf.function(lambda: strategy.run(train, (running, two, share, tf.nn.compute_average_loss)))
    plain(words)
    running(words)
    for _ in range(3):
        outside()
        inside()
        train(reference, three, words, tf.reduce_mean)
    same(plain, reference)
    same(running, reference)
    def wrong():
        with strategy.scope():
            train(plain, one, share, tf.reduce_mean)
    raises(RuntimeError, "outside of strategy.run()", wrong)

    class Late:
        weight = None
        def __call__(self):
            if self.weight is None:
                self.weight = tf.Variable(lambda: tf.random.normal((3,), seed=rank))
            return self.weight + 0.0
    for wrap in (lambda function: function, tf.function):
        late = Late()
        result = hvd.allgather_object(wrap(lambda: strategy.run(late))().numpy().tolist())
        assert result[0] == result[1] == late.weight.numpy().tolist()

# Ranks may make different models in the scope; run does not take them.
with strategy.scope():
    kept = build(1) if rank == 0 else unbuilt(1)
from hvdlite.core.errors import MismatchError
raises(MismatchError, "the scope's variables differ: rank 0 made", lambda: strategy.run(lambda: None))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_loss_is_the_global_batchs(backend: str) -> None:
    run(2, LOSSES, KERAS_BACKEND=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_variable_is_rank_0s(backend: str) -> None:
    run(2, VARIABLES, KERAS_BACKEND=backend)
