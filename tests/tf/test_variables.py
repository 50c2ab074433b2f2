"""Whose gradient is whose: variables that have a gradient on some ranks, in some steps, or only from some step on."""

from __future__ import annotations

import pytest

from tests.tf.support import run
from tests.tf.test_keras import COMMON


# docs/protocol.md#one-slot-per-variable
def test_a_tape_pairs_gradients_by_their_variables() -> None:
    run(2, """
import numpy as np, tensorflow as tf, hvdlite_tf as hvd
hvd.init()
rank = hvd.rank()
a, b, table = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0]), tf.Variable(tf.ones([4, 2]))
sources = [a, b, table]
fixed = [tf.TensorSpec([None])]

def gradients(loss):
    with tf.GradientTape() as tape:
        value = loss()
    return hvd.DistributedGradientTape(tape).gradient(value, sources)

def dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient).numpy().tolist()

def both(loss, expected):
    '''Eagerly, and in a function that is traced more often on rank 0.'''
    compiled = tf.function(lambda x: gradients(lambda: loss() * tf.reduce_sum(x) / tf.reduce_sum(x)))
    for turn in range(4):
        assert [dense(each) for each in gradients(loss)] == expected, (turn, "eager")
        assert [dense(each) for each in compiled(tf.ones([1 + turn * (rank == 0)]))] == expected, (turn, "graph")

# all ranks use one expert; a function that uses one or the other; each rank another one
both(lambda: tf.reduce_sum(a * (1.0 + rank)), [[1.5, 1.5], None, None])
phase = tf.function(lambda uses: gradients(lambda: tf.reduce_sum(sources[uses] * (1.0 + rank))))
for _ in range(3):
    assert [dense(each) for each in phase(0)] == [[1.5, 1.5], None, None]
    assert [dense(each) for each in phase(1)] == [None, [1.5, 1.5], None]
a, b = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])
sources = [a, b, table]
both(lambda: tf.reduce_sum((b if rank else a) * (100.0 if rank else 1.0)), [[0.5, 0.5], [50.0, 50.0], None])

# rows of a table, on both ranks and on one
def rows(*indices):
    return tf.reduce_sum(tf.gather(table, tf.constant(indices)))
both(lambda: rows(rank, 3), [None, None, [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]])
sources = [b, a, table]
both(lambda: rows(2) if rank else tf.reduce_sum(b), [[0.5, 0.5], None, [[0, 0], [0, 0], [0.5, 0.5], [0, 0]]])
assert isinstance(gradients(lambda: rows(2) if rank else tf.reduce_sum(b))[2], tf.IndexedSlices)

# the same source twice; an unknown shape; a gradient that this rank cannot take
with tf.GradientTape() as tape:
    value = tf.reduce_sum(a * (1.0 + rank))
assert [dense(each) for each in hvd.DistributedGradientTape(tape).gradient(value, [a, a])] == [[1.5, 1.5]] * 2

def of_input(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = tf.reduce_sum(x * (1.0 + rank))
    return hvd.DistributedGradientTape(tape).gradient(value, [x])[0]
assert dense(tf.function(of_input, input_signature=fixed)(tf.ones([3]))) == dense(of_input(tf.ones([3]))) == [1.5] * 3

sources = [table]
mixed = lambda: tf.reduce_sum(table) if rank else rows(1)
raises(Exception, "sparse_as_dense=True", lambda: tf.function(lambda: gradients(mixed))())
""")


def test_keras_optimizers_with_other_variables_in_other_steps() -> None:
    run(2, COMMON + """
import tensorflow as tf
def frozen_and_thawed(shared):
    if not shared and rank:
        return None
    model = make(1)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer = hvd.DistributedOptimizer(optimizer) if shared else optimizer
    x, y = (shares(8, X), shares(8, Y)) if shared else (X, Y)
    for trainable in (True, False, True):
        model.layers[0].trainable = trainable
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=8 if shared else 16, epochs=2, shuffle=False, verbose=0)
    return model
close(frozen_and_thawed(True), frozen_and_thawed(False))

def subsets_in_turn(shared):
    model = make(1)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer) if shared else optimizer
    optimizer.build(model.trainable_variables)
    for turn in range(6):
        variables = model.layers[turn % 2].trainable_variables
        rows = slice(8 * rank, 8 * rank + 8) if shared else slice(16)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X[rows]) - Y[rows]))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return model
close(subsets_in_turn(True), subsets_in_turn(False))

class Experts(keras.Model):
    '''Rank 0 trains one of two layers, rank 1 the other one, and none trains the third one.'''
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.layers_of = [keras.layers.Dense(2) for _ in range(3)]
    def build(self, shape):
        for layer in self.layers_of:
            layer.build(shape)
    def call(self, x):
        return self.layers_of[rank](x)
model = Experts()
model.build((None, 6))
start = [keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables]
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(X[:16], Y[:16], batch_size=16, epochs=1, shuffle=False, verbose=0)
x, y = X[:16], Y[:16]
for index in range(3):
    kernel, bias = start[2 * index:2 * index + 2]
    error = 2 * (x @ kernel + bias - y) / y.size / 2 * (index < 2)  # half of a mean's gradient: the other rank has none
    now = [keras.ops.convert_to_numpy(variable) for variable in model.layers_of[index].trainable_variables]
    np.testing.assert_allclose(now[0], kernel - 0.1 * x.T @ error, atol=1e-5)
    np.testing.assert_allclose(now[1], bias - 0.1 * error.sum(0), atol=1e-5)

# only rank 0 trains the second layer: from the beginning, or from some step on
for steps in (0, 1):
    model = make(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    step = lambda variables: optimizer.apply([tf.ones_like(variable) for variable in variables], variables)
    for _ in range(steps):
        step(model.trainable_variables)
    if steps == 0 and rank == 0:
        raises(hvd.HorovodInternalError, "rank 1: does not have it", lambda: step(model.trainable_variables))
    elif rank == 0:
        step(model.trainable_variables)
    elif steps == 0:
        step(model.trainable_variables[:2])
    else:
        raises(hvd.HorovodInternalError, "rank 1: another rank has gradients for 2 variables",
               lambda: step(model.trainable_variables[:2]))
""", timeout=200)


@pytest.mark.parametrize("backend", ["torch"])
def test_gradients_on_torch_wherever_they_come_from(backend: str) -> None:
    run(2, COMMON + """
import torch
def elsewhere(shared, passes_through):
    '''Gradients of autograd.grad, also after another backward pass has gone through the model.'''
    model = make(1)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer) if shared else optimizer
    optimizer.build(model.trainable_variables)
    rows = slice(8 * rank, 8 * rank + 8) if shared else slice(16)
    x, y = torch.tensor(X[rows]), torch.tensor(Y[rows])
    for turn in range(6):
        model.zero_grad()
        if passes_through:
            inputs = x.clone().requires_grad_()
            model(inputs).sum().backward()
            if passes_through == "cleared":
                model.zero_grad()
        own = [variable.value.grad for variable in model.trainable_variables]
        gradients = list(torch.autograd.grad(((model(x) - y) ** 2).mean(), [v.value for v in model.trainable_variables]))
        kept = [gradient.clone() for gradient in gradients]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_variables)
        assert all(torch.equal(one, other) for one, other in zip(gradients, kept)), turn  # the caller's stay what they are
        assert all(variable.value.grad is before for variable, before in zip(model.trainable_variables, own))
    return model
for passes_through in (None, "cleared", "kept"):
    close(elsewhere(True, passes_through), elsewhere(False, passes_through))

def two_optimizers(shared):
    '''Compiled again while the first optimizer is alive; then the first one again.'''
    model, alive = make(1), []
    for rate in (0.05, 0.02, None):
        if rate:
            optimizer = keras.optimizers.Adam(rate)
            alive.append(hvd.DistributedOptimizer(optimizer) if shared else optimizer)
        model.compile(alive[-1] if rate else alive[0], "mse")
        model.fit(shares(8, X) if shared else X, shares(8, Y) if shared else Y, batch_size=8 if shared else 16,
                  shuffle=False, verbose=0)
        model.layers[0].trainable = rate is None or rate == 0.02
    return model
close(two_optimizers(True), two_optimizers(False))

def experts(shared, turn):
    '''Rank r uses layer r only, or all ranks layer 1.'''
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(2) for _ in range(3)]
    for layer in layers:
        layer.build((None, 6))
    variables = [variable for layer in layers for variable in layer.trainable_variables]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer) if shared else optimizer
    optimizer.build(variables)
    for step in range(6):
        for variable in variables:
            variable.value.grad = None
        used = [rank] if shared else [0, 1]
        used = [1] if step % 3 == turn else used
        x, y = torch.tensor(X[:8]), torch.tensor(Y[:8])
        (sum(((layers[index](x) - y) ** 2).mean() for index in used) / (1 if shared or used == [1] else 2)).backward()
        with torch.no_grad():
            optimizer.apply([variable.value.grad for variable in variables], variables)
    return [keras.ops.convert_to_numpy(variable) for variable in variables]
for one, other in zip(experts(True, 2), experts(False, 2)):
    np.testing.assert_allclose(one, other, atol=1e-5)

model = make(1)  # with Sum it cannot be told what is summed already
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum)
optimizer.build(model.trainable_variables)
(model(torch.tensor(X[:4])) ** 2).mean().backward()
raises(Exception, "with op=Sum, apply", lambda: optimizer.apply(
    [variable.value.grad * 2 for variable in model.trainable_variables], model.trainable_variables))

from hvdlite.training.step_reducer import weighted_by_samples
model = make(1)  # ranks count unequally, and rank 1 has no backward pass in the last step
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
optimizer.build(model.trainable_variables)
for turn in range(3):
    with weighted_by_samples(8 - 4 * rank):
        model.zero_grad()
        if turn < 2 or rank == 0:
            (model(torch.tensor(X[:4])) ** 2).mean().backward()
        with torch.no_grad():
            optimizer.apply([variable.value.grad for variable in model.trainable_variables], model.trainable_variables)
for one, other in zip(*hvd.allgather_object([keras.ops.convert_to_numpy(each) for each in model.trainable_variables])):
    np.testing.assert_array_equal(one, other)

model, alone = make(1), make(1)  # a loop that goes on in another job of the same processes
optimizer, plain = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.1)
optimizer.build(model.trainable_variables)
for turn in range(4):
    for each, by, rows in ((model, optimizer, slice(8 * rank, 8 * rank + 8)), (alone, plain, slice(16))):
        each.zero_grad()
        ((each(torch.tensor(X[rows])) - torch.tensor(Y[rows])) ** 2).mean().backward()
        with torch.no_grad():
            by.apply([variable.value.grad for variable in each.trainable_variables], each.trainable_variables)
    if turn == 1:
        hvd.shutdown()
        hvd.init()
close(model, alone)
""", KERAS_BACKEND=backend)


def test_what_a_graph_did_not_expect_is_an_error_and_joined_ranks_are_not_asked() -> None:
    run(2, """
import numpy as np, tensorflow as tf, hvdlite_tf as hvd
hvd.init()
rank = hvd.rank()
variables = [tf.Variable([1.0, 2.0]) for _ in range(3)]

def gradients(loss, sources=variables):
    with tf.GradientTape() as tape:
        value = loss()
    return [None if each is None else each.numpy().tolist() if tf.executing_eagerly() else each
            for each in hvd.DistributedGradientTape(tape).gradient(value, sources)]

# choices of gradients that come back in another combination
phase = tf.function(lambda uses: gradients(lambda: tf.reduce_sum(variables[uses])))
ones = [1.0, 1.0]
def told(result):
    return [None if each is None else each.numpy().tolist() for each in result]
assert told(phase(0)) == [ones, None, None] and told(phase(1)) == [None, ones, None]
raises(Exception, "another rank has gradients for 1 variables that have none here", lambda: phase(rank))
assert told(phase(0)) == [ones, None, None]

# nobody has a gradient; of a function without a shape; a compressor of the script's own
unused = tf.function(lambda: gradients(lambda: tf.constant(1.0) * 2))
assert told(unused()) == [None] * 3
without_shape = tf.custom_gradient(lambda x: (
    tf.identity(x), lambda upstream: tf.numpy_function(lambda a: a * 3, [upstream], tf.float32)))
assert told(tf.function(lambda: gradients(lambda: tf.reduce_sum(without_shape(variables[0]))))())[0] == [3.0, 3.0]

class Quarter:
    def compress(tensor):
        return tensor / 4, None
    def decompress(tensor, context):
        return tensor * 4
def compressed():
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(variables[0] * (1.0 + rank))
    return hvd.DistributedGradientTape(tape, compression=Quarter).gradient(value, variables[:1])[0]
assert compressed().numpy().tolist() == tf.function(compressed)().numpy().tolist() == [1.5, 1.5]

# a rank that has joined before it has traced anything
one = [variables[0], tf.Variable([3.0])]
if rank == 0:
    uneven = tf.function(lambda: gradients(lambda: tf.reduce_sum(one[0]), one))
    assert told(uneven()) == [[0.5, 0.5], None]
hvd.join()
""")
