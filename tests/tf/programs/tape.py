"""Programs of test_variables.py with a `DistributedGradientTape`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import hvdlite_tf as hvd
from tests.raising import raises


class Quarter:
    """A compressor of the script's own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return tensor / 4, None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor * 4


def a_tape_pairs_gradients_by_their_variables() -> None:
    hvd.init()
    rank = hvd.rank()
    a, b, table = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0]), tf.Variable(tf.ones([4, 2]))
    sources = [a, b, table]
    fixed = [tf.TensorSpec([None])]

    def gradients(loss: Callable[[], Any]) -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        return hvd.DistributedGradientTape(tape).gradient(value, sources)

    def dense(gradient: Any) -> Any:
        return None if gradient is None else tf.convert_to_tensor(gradient).numpy().tolist()

    def both(loss: Callable[[], Any], expected: list[Any]) -> None:
        """Eagerly, and in a function that is traced more often on rank 0."""
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
    def rows(*indices: int) -> Any:
        return tf.reduce_sum(tf.gather(table, tf.constant(indices)))
    both(lambda: rows(rank, 3), [None, None, [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]])
    sources = [b, a, table]
    both(lambda: rows(2) if rank else tf.reduce_sum(b), [[0.5, 0.5], None, [[0, 0], [0, 0], [0.5, 0.5], [0, 0]]])
    assert isinstance(gradients(lambda: rows(2) if rank else tf.reduce_sum(b))[2], tf.IndexedSlices)

    # the same source twice; an unknown shape; a gradient that this rank cannot take
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(a * (1.0 + rank))
    assert [dense(each) for each in hvd.DistributedGradientTape(tape).gradient(value, [a, a])] == [[1.5, 1.5]] * 2

    def of_input(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(x * (1.0 + rank))
        return hvd.DistributedGradientTape(tape).gradient(value, [x])[0]
    assert dense(tf.function(of_input, input_signature=fixed)(tf.ones([3]))) == dense(of_input(tf.ones([3]))) == [1.5] * 3

    sources = [table]

    def mixed() -> Any:
        return tf.reduce_sum(table) if rank else rows(1)
    raises(Exception, "sparse_as_dense=True", lambda: tf.function(lambda: gradients(mixed))())


def what_a_graph_did_not_expect_is_an_error_and_joined_ranks_are_not_asked() -> None:
    hvd.init()
    rank = hvd.rank()
    variables = [tf.Variable([1.0, 2.0]) for _ in range(3)]

    def gradients(loss: Callable[[], Any], sources: Any = variables) -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        return [None if each is None else each.numpy().tolist() if tf.executing_eagerly() else each
                for each in hvd.DistributedGradientTape(tape).gradient(value, sources)]

    # choices of gradients that come back in another combination
    phase = tf.function(lambda uses: gradients(lambda: tf.reduce_sum(variables[uses])))
    ones = [1.0, 1.0]

    def told(result: Any) -> list[Any]:
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

    def compressed() -> Any:
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(variables[0] * (1.0 + rank))
        own: Any = Quarter
        return hvd.DistributedGradientTape(tape, compression=own).gradient(value, variables[:1])[0]
    assert compressed().numpy().tolist() == tf.function(compressed)().numpy().tolist() == [1.5, 1.5]

    # a rank that has joined before it has traced anything
    one = [variables[0], tf.Variable([3.0])]
    if rank == 0:
        uneven = tf.function(lambda: gradients(lambda: tf.reduce_sum(one[0]), one))
        assert told(uneven()) == [[0.5, 0.5], None]
    hvd.join()
