"""Programs of test_ops.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite_tf as hvd
from tests.raising import raises


def every_collective_eager_and_in_a_graph() -> None:
    hvd.init()
    _every_collective(lambda function: function)
    _every_collective(tf.function)
    _sets_objects_and_errors()
    assert int(hvd.join()) in (0, 1)


def _every_collective(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Call every collective in functions that `wrap` returns."""
    rank = hvd.rank()

    def both(function: Callable[..., Any], *arguments: Any) -> Any:
        return wrap(function)(*arguments)
    for dtype in (tf.uint8, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64):
        for shape in ((), (0,), (3, 4)):
            x = tf.cast(tf.fill(shape, rank + 1), dtype)
            total = both(lambda x: hvd.allreduce(x, op=hvd.Sum), x)
            assert total.dtype == dtype and total.shape == x.shape
            assert (tf.cast(total, tf.float64) == 3).numpy().all()
    x = tf.range(4, dtype=tf.float32) + 10.0 * rank
    assert both(lambda x: hvd.allreduce(x), x).numpy().tolist() == [5, 6, 7, 8]
    assert both(lambda x: hvd.allreduce(x, op=hvd.Max, prescale_factor=2.0), x).numpy().tolist() == [20, 22, 24, 26]
    assert both(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), x).numpy()[0] == 10
    one, two = both(lambda a, b: hvd.grouped_allreduce([a, b], op=hvd.Sum), x, tf.ones(2, tf.int32))
    assert one.numpy()[0] == 10 and two.numpy().tolist() == [2, 2]
    rows = both(lambda x: hvd.allgather(x), tf.fill((rank + 1, 2), float(rank)))
    assert rows.numpy().tolist() == [[0, 0], [1, 1], [1, 1]]
    assert both(lambda x: hvd.broadcast(x, 1), x).numpy()[0] == 10
    exchanged = both(lambda x: hvd.alltoall(x), x).numpy().tolist()
    assert exchanged == [2.0 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
    received, counts = both(lambda x: hvd.alltoall(x, splits=[1, 3]), x)
    assert counts.numpy().tolist() == [[1, 1], [3, 3]][rank] and len(received) == [2, 6][rank]
    assert both(lambda x: hvd.reducescatter(x, op=hvd.Sum), x).numpy().tolist() == [[10, 12], [14, 16]][rank]
    variable = tf.Variable([float(rank)] * 3)
    hvd.broadcast_variables([variable], 1)
    assert variable.numpy().tolist() == [1, 1, 1]
    slices = tf.IndexedSlices(tf.fill((2, 3), float(rank)), tf.constant([rank, 4]), tf.constant([5, 3]))
    gathered = hvd.allreduce(slices)
    assert tf.convert_to_tensor(gathered).numpy()[4].tolist() == [0.5] * 3
    numbers = hvd.size_op(), hvd.rank_op(), hvd.local_rank_op(), hvd.process_set_included_op()
    assert [int(number) for number in numbers] == [2, rank, rank, 1]

    weight = tf.constant([1.0, 2.0, 3.0, 4.0])

    def gradient(function: Callable[[Any], Any]) -> Any:
        def compute(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(function(x))
            return tape.gradient(loss, x)
        return both(compute, x).numpy().tolist()
    assert gradient(lambda x: hvd.allreduce(x) * weight * (rank + 1)) == [1.5, 3, 4.5, 6]
    assert gradient(lambda x: hvd.allgather(x) * tf.concat([weight, 10 * weight], 0) * (rank + 1)) == \
        (np.array([1.5, 3, 4.5, 6]) * [1, 10][rank]).tolist()
    assert gradient(lambda x: hvd.broadcast(x, 0) * weight * (rank + 1)) == [[1.5, 3, 4.5, 6], [0] * 4][rank]
    assert gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum) * (rank + 1.0)) == [2, 2, 4, 4]
    assert gradient(lambda x: hvd.alltoall(x) * (rank + 1.0)) == [1, 1, 2, 2]
    exact: dict[str, Any] = {"horovod_gradient": False}
    assert gradient(lambda x: hvd.grouped_allgather([x], **exact)[0] * (rank + 1.0)) == [3, 3, 3, 3]
    assert gradient(lambda x: hvd.broadcast(x, 0, **exact) * (rank + 1.0)) == [[3] * 4, [0] * 4][rank]
    assert gradient(lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum, **exact)[0] * (rank + 1.0)) == [1, 1, 2, 2]
    assert gradient(lambda x: hvd.reducescatter(x, **exact) * (rank + 1.0)) == [0.5, 0.5, 1, 1]


def _sets_objects_and_errors() -> None:
    rank = hvd.rank()
    own = hvd.add_process_set([1])
    if rank:
        assert hvd.allreduce(tf.constant(7.0), process_set=own).numpy() == 7
    assert hvd.broadcast_object({"a": rank}, 1) == {"a": 1} and hvd.allgather_object(rank) == [0, 1]
    slices = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([rank, 4]), tf.constant([5, 3]))
    raises(NotImplementedError, "IndexedSlices", lambda: hvd.allreduce(slices, op=hvd.Max))
    x = tf.ones(2)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            squares = tf.square(hvd.allreduce(x, name="twice"))
        first = inner.gradient(squares, x)
    raises(hvd.UnsupportedError, "the gradient of 'allreduce.twice' has no gradient", lambda: outer.gradient(first, x))
    raises(RuntimeError, "broadcast_variables", lambda: hvd.broadcast_global_variables(0))
    variable = tf.Variable([1.0] * 3)
    wrong: Any
    for wrong, told in ((variable.numpy(), "no float"), ([variable, np.ones(2)], "no ndarray"), ([tf.range(4.0)], "Tensor")):
        raises(ValueError, told, functools.partial(hvd.broadcast_variables, wrong, 0))
    tape = tf.GradientTape()
    twice = hvd.DistributedGradientTape(tape)
    raises(ValueError, "distributed already", lambda: hvd.DistributedGradientTape(twice))
    raises(ValueError, "not NoneType", lambda: hvd.DistributedGradientTape(None))
    raises(ValueError, "Keras layers", lambda: hvd.PartialDistributedGradientTape(tape, local_layers="x"))
    raises(ValueError, "cannot be compiled by XLA", lambda: tf.function(hvd.allreduce, jit_compile=True)(tf.ones(3)))
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [2]


def the_tape_equals_one_rank_with_the_whole_batch(graph: bool) -> None:
    hvd.init()
    rank = hvd.rank()
    rng = np.random.default_rng(3)
    words, targets = rng.integers(0, 9, (20, 8, 3)), rng.normal(size=(20, 8, 2)).astype("float32")
    start = [rng.normal(size=shape).astype("float32") * 0.3 for shape in ((9, 4), (4, 2), (2,))]

    def train(shared: bool, compression: Any = hvd.Compression.none, dense: bool = False) -> list[Any]:
        table, matrix, bias = variables = [tf.Variable(value) for value in start]
        velocity = [tf.Variable(tf.zeros_like(v)) for v in variables]

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as plain:
                hidden = tf.reduce_sum(tf.nn.embedding_lookup(table, x), 1)
                loss = tf.reduce_mean(tf.square(tf.tanh(hidden) @ matrix + bias - y))
            tape = (hvd.DistributedGradientTape(plain, compression=compression, sparse_as_dense=dense) if shared else
                    plain)
            gradients = tape.gradient(loss, variables)
            assert isinstance(gradients[0], tf.IndexedSlices) != dense or not shared
            for v, m, g in zip(variables, velocity, gradients, strict=True):
                m.assign(0.9 * m + tf.convert_to_tensor(g))
                v.assign_sub(0.1 * m)
        call = tf.function(step) if graph else step
        for x, y in zip(words, targets, strict=True):
            mine = slice(4 * rank, 4 * rank + 4) if shared else slice(None)
            call(tf.constant(x[mine]), tf.constant(y[mine]))
        return [v.numpy() for v in variables]
    alone = train(False)
    for dense in (False, True):
        for mine, theirs in zip(train(True, dense=dense), alone, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(train(True, hvd.Compression.bf16), alone, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0.1, atol=0.05)
    assert "learned bucket" in hvd.story("gradient.tf.optimizer.0.2")
