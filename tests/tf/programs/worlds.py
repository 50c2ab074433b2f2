"""Members of elastic jobs whose optimizers and compiled functions outlive worlds."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite_tf as hvd
import hvdlite_tf.keras as hvd_keras
from hvdlite import ops
from hvdlite.core import launch_contract


def train_elastically(gate: str) -> tuple[list[tuple[int, int]], int]:
    """Train until the file `gate` exists; return rank and size in each world, and how often was traced.

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


def fit_elastically(gate: str) -> list[tuple[int, int]]:
    """Fit a model for as long as the file `gate` does not exist, with an optimizer made before the first world."""
    hvd_keras.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    state = hvd_keras.elastic.KerasState(model, batch=0, epoch=0)
    worlds: list[tuple[int, int]] = []
    random = np.random.default_rng()  # another one in each member

    @hvd_keras.elastic.run
    def train(state: Any) -> None:
        worlds.append((hvd_keras.rank(), hvd_keras.size()))
        done = False
        while not done:
            done = bool(hvd_keras.allreduce(np.float32(os.path.exists(gate)), op=hvd_keras.Max, name="done"))
            model.fit(random.random((8, 4), np.float32), random.random((8, 1), np.float32), batch_size=4, verbose=0)
            print(f"trained in world {os.environ.get(launch_contract.EPOCH, '1')}", flush=True)
            state.commit()
    train(state)
    weights = np.concatenate([np.ravel(keras.ops.convert_to_numpy(variable.value)) for variable in
                              (*model.trainable_variables, *model.optimizer.variables)])
    everybodys = ops.allgather(weights[None], name="weights")
    np.testing.assert_array_equal(everybodys, np.repeat(weights[None], hvd_keras.size(), 0))
    return worlds
