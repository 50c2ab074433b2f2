"""Programs of test_elastic.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from hvdlite.core.errors import ReplicaMismatchError
from hvdlite.runtime.runtime import Runtime
from tests.raising import raises

X, Y = np.random.default_rng(0).random((80, 4), np.float32), np.random.default_rng(1).random((80, 1), np.float32)


def compiled(seed: int, learning_rate: float = 0.01) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.2),
                              keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(learning_rate)), "mse")
    return model


def values(model: Any) -> list[Any]:
    variables = [*model.trainable_variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


class Interrupted(keras.callbacks.Callback):
    """Ends `fit` with an error after some batches."""

    def __init__(self, state: Any, after: tuple[int, ...]) -> None:
        super().__init__()
        self.state, self.after = state, after
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.state.epoch, self.state.batch))
        if len(self.seen) in self.after:
            raise hvd.HorovodInternalError("lost")


def fit_goes_on_where_it_was(first: bool) -> None:
    """Train 3 epochs of 10 batches with two failures; the callbacks are first or last in the list."""
    hvd.init()
    model = compiled(1 + hvd.rank())
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    interrupted = Interrupted(state, (4, 7))
    updates = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)]
    commits = [hvd.elastic.CommitStateCallback(state, 2)]
    stopping = [keras.callbacks.EarlyStopping(monitor="loss", patience=100), hvd.callbacks.StopTogetherCallback()]
    callbacks = [*(commits + updates if first else updates + commits), interrupted, *stopping]
    committed = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        model.fit(X, Y, batch_size=8, epochs=3 - state.epoch, callbacks=callbacks, verbose=0)

    for _ in range(3):
        try:
            train(state)
        except hvd.HorovodInternalError:
            state.restore()
            committed.append((state.epoch, state.batch, state._commits))
            assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == state.batch + 1
    assert committed == [(0, 3, 2), (0, 5, 3)], committed
    assert interrupted.seen[:8] == [*((0, batch) for batch in (0, 1, 2, 3, 4, 5, 6, 6))], interrupted.seen
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 30
    assert (state.epoch, state.batch) == (3, 0)
    assert equal(*hvd.allgather_object(values(model)))


def states_and_their_errors() -> None:
    """Commit, restore and synchronise models and variables."""
    import tensorflow as tf

    import hvdlite_tf as frontend
    hvd.init()
    model = compiled(1 + hvd.rank())
    state = frontend.elastic.TensorFlowKerasState(model, backend=keras.backend, batch=5 * hvd.rank())
    assert state.optimizer.built
    state.sync()
    assert state.batch == 0 and equal(*hvd.allgather_object(values(model)))
    begin = values(model)
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    trained = values(model)
    state.batch = 1
    state.commit()
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    for _ in range(2):  # what is restored may be trained on
        state.batch = 2
        state.restore()
        assert equal(values(model), trained) and not equal(trained, begin) and (state.batch, state._commits) == (1, 1)
        model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    state.model.layers[0].kernel.assign_add(np.full((4, 8), hvd.rank(), np.float32))
    raises(ReplicaMismatchError, "replicas differ in 'variables.0 sequential",
           lambda: state._check_replicas(state._replicated([])))
    raises(ValueError, "has no variables yet", lambda: hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)])))

    variables = [tf.Variable([float(hvd.rank())]), keras.Variable([2.0 * hvd.rank()])]
    own = frontend.elastic.TensorFlowState(variables=variables, step=hvd.rank())
    own.sync()
    variables[0].assign_add([1.0])
    own.step = 3
    own.commit()
    variables[0].assign_add([1.0])
    variables[1].assign([7.0])
    own.restore()
    assert [float(each[0]) for each in variables] == [1.0, 0.0] and own.step == 3
    if hvd.rank() == 0:
        own._of_root({})
    else:
        other = frontend.elastic.TensorFlowState(variables=variables[:1])
        raises(ValueError, "rank 0's elastic state has step, 2 variables, and rank 1's has 1 variables", other.sync)
    variables[1].assign([float(hvd.rank())])
    raises(ReplicaMismatchError, "replicas differ in 'variables.1 ", lambda: own._check_replicas(own._replicated([])))
    raises(ValueError, "TensorFlow 2 has no list of all variables", frontend.elastic.TensorFlowState)
    raises(ValueError, "no ndarray", lambda: frontend.elastic.TensorFlowState([np.zeros(1)]))
    raises(NotImplementedError, "sessions", lambda: frontend.elastic.TensorFlowState(variables, session=1))
    assert frontend.elastic.run is hvd.elastic.run


def a_position_is_divided_among_the_ranks() -> None:
    """An epoch that other numbers of ranks have begun; a position that the script has set."""
    hvd.init()
    model = compiled(1)
    state = hvd.elastic.KerasState(model, batch=4, epoch=0)
    interrupted = Interrupted(state, ())
    callbacks = [hvd.elastic.UpdateBatchStateCallback(state), interrupted]
    model.fit(X, Y, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    assert [batch for _, batch in interrupted.seen] == [*range(4, 10), *range(10)], interrupted.seen
    interrupted.seen.clear()
    state.batch = 3
    vars(state)["_position_in_epoch"] = (3, 12)  # as 3 ranks leave it after 4 batches
    model.fit(X, Y, batch_size=8, epochs=1, callbacks=callbacks, verbose=0)
    assert [batch for _, batch in interrupted.seen] == [*range(6, 10)], interrupted.seen


@contextlib.contextmanager
def collectives(lost_at: str = "") -> Iterator[Callable[[], int]]:
    """Return a function that returns the bytes of variables broadcast since it was called last.

    Args:
        lost_at: the name of the collective that fails, when a part of what it brings has come.
    """
    original = {name: getattr(Runtime, name) for name in ("broadcast", "allgather")}
    sizes: list[int] = []

    def replace(method: str) -> None:
        def call(self: Any, name: str, array: Any, *arguments: Any, **named: Any) -> Any:
            if name == lost_at:
                array.fill(0)
                raise hvd.HorovodInternalError("lost")
            if name.startswith("elastic.variables"):
                sizes.append(array.nbytes - (DIGEST if name.endswith(".small") else 0))
            return original[method](self, name, array, *arguments, **named)
        setattr(Runtime, method, call)

    def count() -> int:
        counted = sum(sizes)
        sizes.clear()
        return counted
    for method in original:
        replace(method)
    try:
        yield count
    finally:
        for method, function in original.items():
            setattr(Runtime, method, function)


DIGEST = 16
"""Bytes in front of small variables."""


def size(variables: list[Any]) -> int:
    return sum(np.array(keras.ops.convert_to_numpy(variable.value)).nbytes for variable in variables)


def random_state(model: Any) -> list[int]:
    return np.array(keras.ops.convert_to_numpy(model.layers[1].seed_generator.state.value)).tolist()


def only_what_differs_is_sent() -> None:
    """Synchronise states that are equal, or differ in one part."""
    hvd.init()
    model = compiled(1 + hvd.rank())
    state = hvd.elastic.KerasState(model, batch=0, table=[hvd.rank()])
    with collectives() as sent:
        state.sync()
        assert sent() == size(model.trainable_variables) and state.table == [0]
        seeds = hvd.allgather_object(random_state(model))
        assert seeds[1] == [seeds[0][0] + 1, *seeds[0][1:]], seeds
        state.batch = 1
        state.commit()
        state.sync()
        assert sent() == 0, "all ranks have the same"
        assert seeds == hvd.allgather_object(random_state(model)), "rank 1's random state is derived from rank 0's again"

        model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
        state.sync()
        assert sent() == size(model.layers[2].non_trainable_variables), "each rank has its own moving statistics"
        if hvd.rank() == 1:
            model.optimizer.learning_rate = 0.5
        state.sync()
        assert sent() == size(model.optimizer.variables)
        assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == np.float32(0.01)
        state.batch = 1 + hvd.rank()
        state.sync()
        assert sent() == 0 and state.batch == 1
    assert equal(*hvd.allgather_object([*values(model), *model.layers[2].get_weights()]))


def a_loss_in_the_middle_of_sync_leaves_a_whole_state() -> None:
    """Fail in each collective of `sync`: the state is the old one, or rank 0's, and so is the last commit."""
    hvd.init()
    model = compiled(1 + hvd.rank())
    state = hvd.elastic.KerasState(model, batch=hvd.rank())

    def whole() -> list[Any]:
        return [*values(model), np.array(random_state(model)), np.array([state.batch, state._commits])]

    state.commit()
    committed = whole()
    if hvd.rank() == 0:
        state.commit()
    model.layers[0].kernel.assign_add(np.ones((4, 8), np.float32))
    state.batch += 5
    own = whole()
    for name in ("elastic.differs", "elastic.variables.small"):
        with collectives(name):
            raises(hvd.HorovodInternalError, "lost", state.sync)
        assert equal(whole(), own), name
    state.restore()
    assert equal(whole()[:-1], committed[:-1]) and state.batch == hvd.rank()
    with collectives("elastic.replicas"):
        raises(hvd.HorovodInternalError, "lost", state.sync)
    received = whole()
    assert received[-1].tolist() == [0, 2]
    state.restore()
    assert equal(whole(), received), "the commit is rank 0's, with variables and attributes"
    assert equal(*hvd.allgather_object(values(model)))
