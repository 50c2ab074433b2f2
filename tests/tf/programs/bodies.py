"""Elastic trainings of Keras whose loop counts bodies; see tests/torch/programs/bodies.py."""

from __future__ import annotations

import os
import signal
from typing import Any

import keras
import numpy as np

import hvdlite_tf.keras as hvd

ROWS = 12
"""Of a global batch, which all sizes of worlds here divide."""


def compiled(distributed: bool) -> Any:
    """Return a model of float64."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(hvd.DistributedOptimizer(optimizer) if distributed else optimizer, "mse")
    return model


def rows(body: int) -> tuple[Any, Any]:
    """Return the samples of a body, whatever the world."""
    chance = np.random.default_rng(body)
    return chance.normal(size=(ROWS, 5)), chance.normal(size=(ROWS, 2))


def flat(model: Any) -> list[float]:
    """Return all parameters."""
    return [float(value) for each in model.get_weights() for value in each.flat]


def undisturbed(bodies: int) -> list[float]:
    """Return the parameters after so many bodies in one process."""
    model = compiled(distributed=False)
    for body in range(bodies):
        model.train_on_batch(*rows(body))
    return flat(model)


def count(bodies: int, victim: int, where: str, at: int) -> dict[str, Any]:
    """Train for some bodies; in one, a member kills itself "before" or "after" its step, or at the "copy" of a boundary."""
    hvd.init()
    model = compiled(distributed=True)
    state = hvd.elastic.KerasState(model, body=0)
    member = int(os.environ["HVDLITE_MEMBER"])
    ran: list[tuple[int, int]] = []

    def fail(here: str) -> None:
        if (member, here, state.body) == (victim, where, at):
            os.kill(os.getpid(), signal.SIGKILL)

    copy = state._small_copy

    def failing(room: Any) -> Any:
        fail("copy")
        return copy(room)
    vars(state)["_small_copy"] = failing

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.body < bodies:
            state._begin_body()
            share = ROWS // hvd.size()
            x, y = (each[hvd.rank() * share:][:share] for each in rows(state.body))
            ran.append((state.body, hvd.size()))
            fail("before")
            model.train_on_batch(x, y)
            fail("after")
            state.body += 1
        state._end_bodies()

    train(state)
    hvd.shutdown()
    return {"parameters": flat(model), "ran": ran, "alone": undisturbed(bodies)}
