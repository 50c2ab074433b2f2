"""A member of an elastic job whose compiled functions outlive worlds."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf as hvd
import hvdlite_tf.keras as hvd_keras
from hvdlite.core import launch_contract


def train_elastically(gate: str) -> tuple[list[tuple[int, int]], list[float], int]:
    """Train until the file `gate` exists; return rank and size in each world, the weights, and how often was traced.

    The loss of a function is half of a weight, so each of its steps takes what the learning rate says whatever the number of
    ranks: a step that is not averaged over them, or averaged over those of another world, is seen. On rank 0 one variable
    has no gradient, which ranks agree about when a function is traced.
    """
    hvd.init()
    shared, unused, local = tf.Variable([0.0]), tf.Variable([0.0]), tf.Variable([0.0])
    dense = keras.Variable(np.zeros(2, np.float32))
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([dense])
    traces: list[None] = []
    worlds: list[tuple[int, int]] = []
    state = hvd.elastic.TensorFlowState([shared, dense], steps=0)

    @tf.function
    def by_tape(own: tf.Tensor) -> None:
        traces.append(None)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.register_local_source(local)
            loss = (tf.reduce_sum(shared) + tf.reduce_sum(local)) * own
        gradients = tape.gradient(loss, [shared, unused, local])
        shared.assign_sub(gradients[0])
        local.assign(gradients[2])
        assert gradients[1] is None

    @tf.function
    def by_optimizer(own: tf.Tensor) -> None:
        traces.append(None)
        optimizer.apply([own * tf.ones(2)], [dense])

    @hvd.elastic.run
    def train(state: Any) -> None:
        worlds.append((hvd.rank(), hvd.size()))
        done = False
        while not done:
            done = bool(hvd.allreduce(tf.constant(float(os.path.exists(gate))), op=hvd.Max, name="done"))
            own = tf.constant(2.0 * (hvd.rank() + 1) / (hvd.size() + 1))  # 1 on average
            by_tape(own)
            np.testing.assert_allclose(local.numpy(), own.numpy() / hvd.size(), rtol=1e-5)
            by_optimizer(own)
            state.steps += 1
            print(f"trained in world {os.environ.get(launch_contract.EPOCH, '1')}", flush=True)
            state.commit()
    train(state)
    np.testing.assert_allclose(shared.numpy(), -state.steps, rtol=1e-4)
    np.testing.assert_allclose(dense.numpy(), -state.steps, rtol=1e-4)
    return worlds, len(traces)
