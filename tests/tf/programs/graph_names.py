"""The program of test_graph_names.py, which reads this file's name and lines in an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite_tf as hvd


def ranks_that_trace_differently_pair_the_same_lines_and_are_told_where_they_wait() -> None:
    hvd.init()
    rank = hvd.rank()
    if rank == 0:  # a summary, a checkpoint, a dataset, an eager tensor on one rank only
        tf.function(lambda x: x + 1)(tf.constant(1.0))
        tf.constant(1.0)
    captured = tf.constant(1.0 + rank)

    def total(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def inner(x: Any) -> Any:
        return total(x) + total(2 * x)  # one line twice

    @tf.function
    def loops(dataset: Any) -> Any:
        result = tf.constant(0.0)
        for batch in dataset:
            result += total(tf.reduce_sum(batch))
        for index in tf.range(3):
            if index > 0:
                result += total(tf.cast(index, tf.float32))
            result += sum(hvd.allreduce(tf.cast(index, tf.float32) + number) for number in range(2))
        while result < 1000.0:
            result *= total(captured)
        return inner(result) + total(captured)

    rows = tf.data.Dataset.range(8).map(lambda x: tf.cast(x, tf.float32)).batch(4)
    expected = 56 + 6 + 2 * 3 + 3
    while expected < 1000:
        expected *= 3
    expected = 6 * expected + 3
    assert float(loops(rows)) == expected, float(loops(rows))

    @tf.function  # rank 0 traces twice, rank 1 four times, and at other steps
    def step(x: Any, training: bool) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.constant(0.0)
            for _ in tf.range(2):
                loss += total(tf.reduce_sum(x)) * (1.0 + rank)
            if training:  # decided while it is traced
                loss += hvd.allreduce(tf.reduce_mean(x), op=hvd.Max)
        return loss, tape.gradient(loss, x)
    sizes = [[4, 4, 4, 2], [4, 3, 5, 2]]
    for number, training in enumerate([True, True, False, True]):
        loss, gradient = step(tf.ones(sizes[rank][number]), training)
        assert float(loss) == 2 * (1 + rank) * (sizes[0][number] + sizes[1][number]) + training
        # Every rank's loss holds the sums and the maximum, whose gradient is the maximum over ranks.
        np.testing.assert_allclose(gradient, 2 * 3 + training / sizes[rank][number], rtol=1e-6)

    sets = [hvd.add_process_set([0]), hvd.add_process_set([1])]

    @tf.function  # what one set has called does not count in another
    def everybodys(x: Any) -> Any:
        for own in sets[:rank + 1]:
            if own.included():
                x = hvd.allreduce(x, process_set=own)
        return total(x)
    assert float(everybodys(tf.constant(1.0))) == 2
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:  # TensorFlow 1's way
        one, two = total(tf.constant(1.0)), total(tf.constant(2.0))
        assert session.run([one, two]) == [2.0, 4.0]

    def mean(x: Any) -> Any:
        return hvd.allreduce(x)

    @tf.function
    def branching(x: Any) -> Any:
        if x > 0.5:  # on rank 1 only
            x = mean(x)
        return mean(x)
    try:
        branching(tf.constant(float(rank)))
    except tf.errors.UnknownError as error:
        told = str(error)
    assert "rank 0 waits for 'allreduce.graph_names.py:" in told and ".mean.from.graph_names.py:" in told, told
    lines = [line.split(".branching'")[0].rsplit(":", 1)[1] for line in told.split("waits for '")[1:3]]
    assert int(lines[0]) == int(lines[1]) + 1, told
