"""Programs of test_errors.py."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf as hvd
import hvdlite_tf.keras as hvd_keras


def caught(kinds: tuple[type[Exception], ...], text: str, call: Callable[[], object]) -> Any:
    """Return the error that a call raises, after asserting that a script could catch it as each of some classes."""
    try:
        call()
    except kinds[0] as error:
        assert text in str(error), error
        for kind in kinds:
            assert isinstance(error, kind), (kind, type(error).__mro__)
        return error
    raise AssertionError(f"no {kinds[0]}")


def errors_are_of_hvdlites_and_of_tensorflows_class() -> None:
    refused = tf.errors.FailedPreconditionError
    disagreement = (refused, hvd.MismatchError, hvd.HorovodInternalError, RuntimeError)
    invalid = (tf.errors.InvalidArgumentError, ValueError)
    caught((refused, hvd.NotInitializedError), "init()", lambda: hvd.allreduce(tf.ones(2)))
    hvd.init()
    rank = hvd.rank()
    error = caught(disagreement, "the shape of 'allreduce.eager'", lambda: hvd.allreduce(tf.ones(2 + rank), name="eager"))
    assert error.error_code == tf.errors.FAILED_PRECONDITION and error.message == str(error)
    assert error.__context__ is None and repr(error).startswith("MismatchError(\"ranks disagree")
    assert traceback.format_exception_only(error)[0].startswith("hvdlite.core.errors.MismatchError: ranks disagree")
    plain = copy.copy(error)  # as pickle does it: for a process without TensorFlow
    assert type(plain) is hvd.MismatchError and str(plain) == str(error)

    @tf.function
    def total(x: Any) -> Any:
        return hvd.allreduce(x, name="graph")

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def calling(x: Any) -> Any:
        for _ in tf.range(2):
            if tf.reduce_sum(x) > 0:
                x = total(x)
        return x
    concrete = total.get_concrete_function(tf.TensorSpec([None]))
    for function in (total, calling, concrete):  # twice: the first call traces
        for _ in range(2):
            error = caught(disagreement, "the shape of 'allreduce.graph'", functools.partial(function, tf.ones(2 + rank)))
            assert str(error).startswith("ranks disagree") and error.__context__ is None

    def tape(x: Any) -> Any:
        variable = tf.Variable(x)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable)
        return tape.gradient(loss, [variable])
    caught(disagreement, "the shape of 'gradient.", lambda: tape(tf.ones(2 + rank)))
    model = keras.Sequential([keras.Input((2 + rank,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = np.ones((2, 2 + rank)), np.ones((2, 1))
    for run_eagerly in (False, True):
        model.run_eagerly, model.train_function = run_eagerly, None
        caught(disagreement, "the shape of 'gradient.", lambda: model.fit(x, y, verbose=0))
    caught(disagreement, "has other variables", lambda: hvd_keras.broadcast_variables(model.variables, 0))
    for frontend in (hvd, hvd_keras):
        caught(disagreement, "root rank", functools.partial(frontend.broadcast_object, 1, rank, name="object"))

    caught((*invalid, hvd.UnsupportedError), "not registered", lambda: hvd.allreduce(1.0, process_set=hvd.ProcessSet([0])))
    caught(invalid, "not both", lambda: hvd.allreduce(1.0, average=True, op=hvd.Sum))
    caught(invalid, "not both", lambda: tf.function(lambda x: hvd.allreduce(x, average=True, op=hvd.Sum))(1.0))
    split = tf.function(lambda x, splits: hvd.alltoall(x, splits))
    caught((*invalid, hvd.UnsupportedError), "splits", lambda: split(tf.ones(4), tf.constant([3, 3])))

    _tensors_of_strings_are_refused((*invalid, hvd.UnsupportedError))

    try:
        raise KeyError("the script's own")
    except KeyError as own:
        assert caught(disagreement, "", lambda: total(tf.ones(2 + rank))).__context__ is own
        assert caught(disagreement, "", lambda: hvd.allreduce(tf.ones(2 + rank))).__context__ is own
    _other_errors_are_tensorflows_own()
    assert total(tf.constant(rank + 1.0)).numpy() == 1.5  # the job goes on


def _tensors_of_strings_are_refused(kinds: tuple[type[Exception], ...]) -> None:
    words, said = tf.constant(["a", "b"]), "'%s.words': dtype tf.string is not supported"
    for call in (hvd.allreduce, tf.function(hvd.allreduce)):
        caught(kinds, said % "allreduce", functools.partial(call, words, name="words"))
    caught(kinds, said % "grouped_allreduce", lambda: hvd.grouped_allreduce([tf.ones(2), words], name="words"))
    for call in (hvd.broadcast, tf.function(hvd.broadcast)):
        caught(kinds, said % "broadcast", functools.partial(call, words, 0, name="words"))
    caught(kinds, said % "broadcast_", lambda: hvd.broadcast_([tf.Variable("a")], 0, name="words"))
    caught(kinds, "'allgather.words': dtype", lambda: hvd.allgather(words, name="words"))
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum, name="words").numpy().tolist() == [2.0, 2.0]  # nothing was left behind


def _other_errors_are_tensorflows_own() -> None:
    def fail(_: Any) -> Any:
        raise ValueError("the script's own")
    function = tf.function(lambda x: tf.py_function(fail, [x], tf.float32))
    assert type(caught((tf.errors.InvalidArgumentError,), "the script's own", lambda: function(1.0))) is \
        tf.errors.InvalidArgumentError
    gather = tf.function(lambda index: tf.gather(tf.ones(4), index))
    assert type(caught((tf.errors.InvalidArgumentError,), "5", lambda: gather(tf.constant([5])))) is \
        tf.errors.InvalidArgumentError
