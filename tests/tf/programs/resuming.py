"""Programs of test_resumable.py: `fit` with data that go on at a place."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from hvdlite import api
from tests.raising import raises

COUNT, BATCH, EPOCHS = 26, 4, 3
X = np.random.default_rng(0).random((COUNT, 4), np.float32)
Y = X.sum(1, keepdims=True)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of two samples."""

    def __len__(self) -> int:
        return COUNT // 2

    def __getitem__(self, index: int) -> Any:
        rows = slice(2 * index, 2 * index + 2)
        return X[rows], Y[rows]


def of_dataset(shuffles: bool = False) -> Any:
    import tensorflow as tf

    def batches(epoch: int) -> Any:
        rows = tf.data.Dataset.from_tensor_slices((X, Y))
        return (rows.shuffle(COUNT, seed=7 + epoch) if shuffles else rows).batch(2)
    return batches if shuffles else batches(0)


KINDS: dict[str, Callable[[], Any]] = {
    "arrays": lambda: hvd.resumable(X, Y, batch_size=BATCH, seed=3),
    "arrays in order": lambda: hvd.resumable(X, Y, batch_size=BATCH),
    "PyDataset": lambda: hvd.resumable(Batches(), seed=3),
    "PyDataset with workers": lambda: hvd.resumable(Batches(workers=2), seed=3),
    "tf.data": lambda: hvd.resumable(of_dataset()),
    "tf.data of the epoch": lambda: hvd.resumable(of_dataset(shuffles=True)),
}


class Killed(Exception):
    """Stands for the end of the process."""


class Watching(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves after some steps, and ends the training there; notes the losses."""

    def __init__(self, data: Any, steps: int = 1000) -> None:
        super().__init__()
        self.data, self.steps = data, steps
        self.losses: list[float] = []
        self.ended: list[int] = []
        self.saved: Any = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(float(logs["loss"]))
        if len(self.losses) == self.steps:
            self.saved = values(self.model), json.loads(json.dumps(self.data.state_dict()))
            raise Killed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended.append(epoch)




def values(model: Any) -> list[Any]:
    return [np.array(keras.ops.convert_to_numpy(each.value)) for each in [*model.variables, *model.optimizer.variables]]


def compiled() -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: Any, data: Any, steps: int = 1000, **options: Any) -> Watching:
    watching = Watching(data, steps)
    try:
        model.fit(data, initial_epoch=data.epoch, epochs=EPOCHS, verbose=0, callbacks=[data.callback, watching], **options)
    except Killed:
        pass
    return watching


def fit_goes_on_at_the_step(kind: str) -> None:
    """Train undisturbed, and with an end after each of some steps."""
    hvd.init()
    whole = compiled()
    undisturbed = fit(whole, KINDS[kind]())
    steps = len(undisturbed.losses)
    assert steps % EPOCHS == 0 and undisturbed.ended == list(range(EPOCHS)), undisturbed.ended
    each = steps // EPOCHS
    assert each == (-(-COUNT // hvd.size() // BATCH) if "arrays" in kind else -(-COUNT // 2 // hvd.size()))
    for step in (1, each - 1, each, each + 1, steps - 1):
        begun = fit(compiled(), KINDS[kind](), step)
        saved, place = begun.saved
        model, data = compiled(), KINDS[kind]()
        for variable, value in zip([*model.variables, *model.optimizer.variables], saved, strict=True):
            variable.assign(value)
        data.load_state_dict(place)
        rest = fit(model, data)
        assert len(begun.losses) + len(rest.losses) == steps, (step, len(rest.losses))
        assert data.epoch == EPOCHS
        for mine, theirs in zip(values(model), values(whole), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6, err_msg=f"{kind} after {step}")


def a_ledger_has_everything_once() -> None:
    """Restart with other numbers of ranks, in the middle of epochs."""
    hvd.init()
    random = np.random.default_rng(4)
    size, rank = api.size, api.rank
    for kind, make in KINDS.items():
        for _ in range(6):
            ledger: dict[int, collections.Counter[float]] = collections.defaultdict(collections.Counter)
            place = None
            sizes = [*random.integers(1, 5, 5).tolist(), 1]
            for index, world in enumerate(sizes):
                steps = int(random.integers(0, 9)) if index + 1 < len(sizes) else 1000
                places = [one_rank(make, place, number, world, steps, ledger) for number in range(world)]
                assert all(each == places[0] for each in places)
                place = places[0]
            for epoch in range(EPOCHS):
                assert len(ledger[epoch]) == COUNT, (kind, sizes, epoch)
                assert sum(ledger[epoch].values()) - COUNT < 2 * max(sizes), "only the end is padded"
    api.size, api.rank = size, rank


def one_rank(make: Callable[[], Any], place: Any, rank: int, size: int, steps: int, ledger: Any) -> Any:
    """Make steps as a rank does in `fit`; return the place."""
    vars(api).update(size=lambda: size, rank=lambda: rank)
    data = make()
    if place is not None:
        data.load_state_dict(place)
    data.callback.set_model(keras.Sequential([keras.Input((1,))]))
    data.callback.model.stop_training = False
    while data.epoch < EPOCHS and steps:
        epoch = data.epoch
        data.callback.on_epoch_begin(epoch)
        for step, batch in enumerate(data._get_iterator()):
            ledger[epoch].update(np.asarray(batch[0]).sum(1).tolist())
            data.callback.on_train_batch_end(step)
            steps -= 1
            if not steps:
                break
        else:
            data.callback.on_epoch_end(epoch)
    data.on_epoch_end()
    state = data.state_dict()
    data.load_state_dict(state)  # after the last step of an epoch the next one begins
    return data.state_dict()


def what_is_refused() -> None:
    """What has no place, and places that do not fit."""
    import tensorflow as tf
    hvd.init()

    class Endless(Batches):
        num_batches = None

    class Shuffling(Batches):
        def on_epoch_end(self) -> None:
            pass

    rows = tf.data.Dataset.from_tensor_slices(X)
    def refused(error: type[Exception], text: str, *given: Any, **options: Any) -> None:
        raises(error, text, lambda: hvd.resumable(*given, **options))

    refused(TypeError, "nobody knows the place in a generator", (each for each in X))
    for given, text in ((Endless(), "Endless has no length"), (Shuffling(), "Shuffling has an on_epoch_end()"),
                        (rows.repeat(), "no known length"), (rows.shuffle(4, seed=1), "shuffles anew in each iteration"),
                        (rows.shuffle(4, reshuffle_each_iteration=False), "shuffles without a seed")):
        refused(ValueError, text, given)
    refused(ValueError, "a function that returns the dataset of an epoch", rows, seed=1)
    refused(TypeError, "returns a list, and no tf.data.Dataset", lambda epoch: [epoch])
    data = hvd.resumable(X, Y, batch_size=BATCH, seed=1)
    model = compiled()
    raises(ValueError, "fit begins epoch 1, and the data are in epoch 0: give fit initial_epoch=data.epoch",
           lambda: model.fit(data, initial_epoch=1, epochs=2, verbose=0, callbacks=[data.callback]))
    begun = fit(model, data, 2)
    other = hvd.resumable(X, Y, batch_size=BATCH, seed=2)
    raises(ValueError, "seed was 1 when it was saved, and is 2 here", lambda: other.load_state_dict(begun.saved[1]))
    model.fit(other, epochs=1, verbose=0)
    raises(RuntimeError, "nobody has counted the steps of fit", other.state_dict)
