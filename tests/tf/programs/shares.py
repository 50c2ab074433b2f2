"""Programs of test_shares.py."""

from __future__ import annotations

import io
import logging
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd
from hvdlite.core.errors import UnsupportedError
from tests.raising import raises
from tests.tf.programs.mirrored_data import generator, kinds_of_data
from tests.tf.programs.mirroring import X, Y, mirrored, reference, same, same_history, sgd
from tests.training.random_shares import draw_shares

BATCH, STEPS = 12, 9


def random_shares_train_like_one_process() -> None:
    """Every kind of data, several calls of `fit`, several steps in a call of the compiled function, and BatchNorm."""
    for number, (kind, make) in enumerate(kinds_of_data().items()):
        strategy = hvd.MirroredStrategy(shares="auto")
        draw_shares(strategy.shares, number)
        options: dict[str, Any] = {"steps_per_execution": 1 if keras.backend.backend() == "torch" else 3}
        one, other = mirrored(strategy, sgd, **options), reference(sgd, **options)
        for epochs in (1, 2):
            arguments, named = make(BATCH)
            steps = {"steps_per_epoch": STEPS} if kind == "generator" else {}
            mine = one.fit(*arguments, epochs=epochs, shuffle=False, verbose=0, **steps, **named)
            arguments, named = make(BATCH)
            theirs = other.fit(*arguments, epochs=epochs, shuffle=False, verbose=0, **steps, **named)
            same_history(mine, theirs)
            same(one, other)


def shares_follow_speeds() -> None:
    """Rank 1 needs three times as long for a row; a decision is made every 50 batches, while data are prefetched."""
    for kind, make in kinds_of_data().items():
        strategy = hvd.MirroredStrategy(shares="auto")
        rows = measure(strategy, (1.0, 3.0)[hvd.rank()])
        model = mirrored(strategy, sgd)
        arguments, named = make(BATCH)
        steps = {"steps_per_epoch": STEPS} if kind == "generator" else {}
        model.fit(*arguments, epochs=20, shuffle=False, verbose=0, **steps, **named)
        assert rows[-6:-1] == [(9, 3)[hvd.rank()]] * 5, (kind, rows)
        assert set(rows[:50]) <= {6, 3, 2}, (kind, rows)
        if kind == "generator":  # the next training begins with the shares there are, and ends while data are prefetched
            del rows[:]
            model.fit(generator(BATCH, STEPS), epochs=1, steps_per_epoch=40, verbose=0)
            assert rows[5] == (9, 3)[hvd.rank()], rows


def measure(strategy: Any, cost: float) -> list[int]:
    """Let a rank's rows cost so many seconds each; return this rank's rows of the batches that are finished."""
    rows: list[int] = []
    original = strategy.shares.finished

    def finished(count: int, seconds: float, own: int) -> None:
        rows.append(own)
        original(count, cost * own, own)
    strategy.shares.finished = finished
    return rows


def fixed_shares_and_batches_by_hand() -> None:
    """Fixed shares in `fit` and `train_on_batch`; what "auto" does not do."""
    strategy = hvd.MirroredStrategy(shares=[4, 1], max_rows=[7, 8])
    one, other = mirrored(strategy, sgd), reference(sgd)
    same_history(one.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(X, Y)),
                 other.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, validation_data=(X, Y)))
    for model in (one, other):
        model.train_on_batch(X[:9], Y[:9])
    same(one, other)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
        assert [len(x) for x, _ in strategy.experimental_distribute_dataset(dataset)][:2] == [(7, 5)[hvd.rank()]] * 2
        raises(UnsupportedError, "give the strategy a number for each rank",
               lambda: hvd.MirroredStrategy(shares="auto").experimental_distribute_dataset(dataset))
        loops_of_steps(strategy)


def loops_of_steps(strategy: Any) -> None:
    """TensorFlow: `run` trains like one process; outside of it a loop over unequal shards warns, once."""
    import tensorflow as tf
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logging.getLogger("hvdlite").addHandler(handler)
    with strategy.scope():
        variable, optimizer = keras.Variable(np.zeros((X.shape[1], 1), X.dtype)), keras.optimizers.SGD(1.0)

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(tf.matmul(x, variable.value)[:, 0], global_batch_size=BATCH)
        optimizer.apply(tape.gradient(loss, [variable.value]), [variable])
    shard = next(iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(BATCH))))
    strategy.run(step, args=(shard,))
    strategy.run(tf.function(step), args=(shard,))
    np.testing.assert_allclose(variable.numpy()[:, 0], -2 * X[:BATCH].mean(0), rtol=1e-5, atol=1e-6)
    assert not log.getvalue()
    step(shard)
    step(shard)
    assert log.getvalue().count("outside of strategy.run, gradients are averaged over ranks with equal weights") == 1
    logging.getLogger("hvdlite").removeHandler(handler)
