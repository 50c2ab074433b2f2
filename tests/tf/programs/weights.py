"""Gradients of TensorFlow and Keras averaged by what ranks count."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np

TURNS = 7
ALL_ZERO = 4


def counts(turn: int, size: int) -> list[int]:
    draw = random.Random(f"weights {turn}")
    return [draw.choice((0, 1, 3, 8)[rank == 0:]) * (turn != ALL_ZERO) for rank in range(size)]


def rows(turn: int, rank: int, count: int) -> Any:
    return np.random.default_rng(100 * turn + rank).normal(size=(max(1, count), 3))


def compare(mine: Any, alone: Any, what: str) -> None:
    for index, (own, wanted) in enumerate(zip(mine, alone, strict=True)):
        np.testing.assert_allclose(own, wanted, 1e-12, 1e-12, err_msg=f"{what}, variable {index}")


def a_tape_and_an_optimizer() -> None:
    """Eagerly and in a `tf.function`, with embeddings too: as in one process, whose step is left out where nobody counts."""
    import keras
    import tensorflow as tf

    import hvdlite_tf as hvd
    import hvdlite_tf.keras as hvd_keras
    hvd.init()
    keras.backend.set_floatx("float64")

    def variables() -> list[Any]:
        table = np.arange(15.0).reshape(5, 3) / 10
        return [keras.Variable(table, dtype="float64"), keras.Variable(np.ones((3, 2)) / 3, dtype="float64")]

    def mean(own: list[Any], x: Any) -> Any:
        picked = tf.gather(own[0].value, tf.cast(tf.abs(x[:, 0]) * 3, tf.int64) % 5)
        return tf.reduce_mean(tf.square(tf.tanh((x + picked) @ own[1].value)))

    def alone(make: Callable[[], Any]) -> list[Any]:
        own, optimizer = variables(), make()
        optimizer.build(own)
        for turn in range(TURNS):
            counted = counts(turn, hvd.size())
            if sum(counted):
                with tf.GradientTape() as tape:
                    loss = sum(count * mean(own, rows(turn, rank, count)) for rank, count in enumerate(counted))
                    loss = loss / sum(counted)
                optimizer.apply(tape.gradient(loss, [each.value for each in own]), own)
        return [np.array(each) for each in own] + [np.array(each) for each in optimizer.variables]

    def with_a_tape(make: Callable[[], Any], compiled: bool) -> list[Any]:
        own, optimizer = variables(), make()
        optimizer.build(own)

        def step(x: Any, count: Any) -> None:
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = mean(own, x) * (1.0 if compiled or count else float("nan"))
            optimizer.apply(tape.gradient(loss, [each.value for each in own], weight=count), own)
        run(step, compiled)
        return [np.array(each) for each in own] + [np.array(each) for each in optimizer.variables]

    def with_an_optimizer(make: Callable[[], Any], compiled: bool) -> list[Any]:
        own, optimizer = variables(), hvd_keras.DistributedOptimizer(make())
        optimizer.build(own)

        def step(x: Any, count: Any) -> None:
            with tf.GradientTape() as tape:
                loss = mean(own, x)
            gradients = tape.gradient(loss, [each.value for each in own])
            if compiled:
                optimizer.apply_gradients(zip(gradients, own, strict=True), weight=count)
            else:
                optimizer.apply(gradients, own, weight=count)
        run(step, compiled)
        return [np.array(each) for each in own] + [np.array(each) for each in optimizer.variables]

    def run(step: Callable[[Any, Any], None], compiled: bool) -> None:
        function = tf.function(step, input_signature=[tf.TensorSpec([None, 3], tf.float64), tf.TensorSpec([], tf.int64)])
        for turn in range(TURNS):
            count = counts(turn, hvd.size())[hvd.rank()]
            (function if compiled else step)(tf.constant(rows(turn, hvd.rank(), count)), tf.constant(count, tf.int64)
                                             if compiled else count)
    for compiled in (False, True):
        plain = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
        compare(with_a_tape(plain, compiled)[:2], alone(plain)[:2], f"tape, compiled: {compiled}")
        for make in (lambda: keras.optimizers.SGD(0.1, momentum=0.9), lambda: keras.optimizers.Adam(0.01, weight_decay=0.1)):
            compare(with_an_optimizer(make, compiled), alone(make), f"{make().name}, compiled: {compiled}")
    hvd.shutdown()


def an_optimizer_without_tensorflow() -> None:
    """As above, on JAX, eagerly."""
    import jax

    import hvdlite_tf.keras as hvd
    jax.config.update("jax_enable_x64", True)
    import keras
    keras.backend.set_floatx("float64")
    hvd.init()

    def mean(weight: Any, x: Any) -> Any:
        return keras.ops.mean(keras.ops.square(x @ weight))
    own, alone = (keras.Variable(np.ones((3, 2)) / 3, dtype="float64") for _ in range(2))
    optimizer, plain = (keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(optimizer)
    for turn in range(TURNS):
        counted = counts(turn, hvd.size())
        gradients = [jax.grad(mean)(alone.value, rows(turn, rank, count)) for rank, count in enumerate(counted)]
        if sum(counted):
            plain.apply([sum(count * each for count, each in zip(counted, gradients, strict=True)) / sum(counted)], [alone])
        count = counted[hvd.rank()]
        optimizer.apply([jax.grad(mean)(own.value, rows(turn, hvd.rank(), count))], [own], weight=count)
        compare([np.array(own)], [np.array(alone)], f"turn {turn}")
    hvd.shutdown()


def ranks_that_forget_it_and_what_is_refused() -> None:
    import keras
    import tensorflow as tf

    import hvdlite_tf as hvd
    import hvdlite_tf.keras as hvd_keras
    hvd.init()

    def gradient(variable: Any, weight: Any, **options: Any) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.reduce_sum(variable * (1.0 + hvd.rank()))
        return tape.gradient(loss, [variable], weight=weight)[0]

    def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"no {kind.__name__}: {text}")
    variable = tf.Variable([1.0, 2.0])
    raises(hvd.MismatchError, "ranks disagree about the reduce op", lambda: gradient(variable, 3 if hvd.rank() else None))
    np.testing.assert_allclose(gradient(variable, 1 + 2 * hvd.rank()), 7 / 4)
    raises(hvd.MismatchError, "rank 0 made a backward pass without one",
           lambda: gradient(variable, 3 if hvd.rank() else None))
    np.testing.assert_allclose(gradient(variable, None), 3 / 2)  # no rank has one
    np.testing.assert_allclose(gradient(variable, 0), 0)
    raises(ValueError, f"rank {hvd.rank()}: the weight of this rank's gradients", lambda: gradient(variable, -1))
    raises(hvd.UnsupportedError, "needs op=Average, not Sum", lambda: gradient(tf.Variable([1.0]), 2, op=hvd.Sum))
    accumulating = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    raises(hvd.UnsupportedError, "comes too late",
           lambda: accumulating.apply([tf.ones(2)], [keras.Variable([1.0, 2.0])], weight=1))
    hvd.shutdown()


def one_process() -> None:
    import keras
    import tensorflow as tf

    import hvdlite_tf as hvd
    import hvdlite_tf.keras as hvd_keras
    hvd.init()
    variable, table = tf.Variable([1.0, 2.0]), tf.Variable([[1.0], [2.0]])

    def gradients(weight: Any, factor: Any = 3.0) -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * factor) + tf.reduce_sum(tf.gather(table, [1])) * factor
        dense, rows = tape.gradient(loss, [variable, table], weight=weight)
        return [dense, rows.values]
    compiled = tf.function(gradients, input_signature=[tf.TensorSpec([], tf.int64), tf.TensorSpec([])])
    for call in (gradients, compiled):
        for dense, wanted in ((call(0, math.nan), 0), (call(7, 3.0), 3)):
            for own in dense:
                np.testing.assert_array_equal(own, np.full_like(own, wanted))
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for weight in (-3, math.nan, "abc"):
        for takes in (gradients, lambda each: optimizer.apply([tf.ones(2)], [keras.Variable([1.0, 2.0])], weight=each)):
            try:
                takes(weight)
            except ValueError as error:
                assert weight == "abc" or "rank 0: the weight of this rank's gradients" in str(error), error
            else:
                raise AssertionError(f"{weight} is taken")
    hvd.shutdown()


def too_late_on_torch() -> None:
    assert os.environ["KERAS_BACKEND"] == "torch"
    import keras

    import hvdlite_tf.keras as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    try:
        optimizer.apply([keras.ops.ones(2)], [keras.Variable([1.0, 2.0])], weight=3)
    except hvd.UnsupportedError as error:
        assert "on torch, backward() reduces gradients" in str(error)
    else:
        raise AssertionError("not refused")
    hvd.shutdown()
