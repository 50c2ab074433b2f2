"""Elastic training as Horovod's documentation has it for Keras, until a file exists."""

import os
import sys

import horovod.keras as hvd
import keras
import numpy as np

gate = sys.argv[1]
hvd.init()
x, y = np.random.rand(64, 7).astype("float32"), np.random.rand(64, 1).astype("float32")
model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())))
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    model.optimizer.learning_rate.assign(0.001 * hvd.size())


class StopAtGate(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hvd.allreduce(float(os.path.exists(gate))) > 0:
            self.model.stop_training = True


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} trains in process {os.getpid()} from epoch {state.epoch}", flush=True)
    model.fit(x, y, batch_size=8, steps_per_epoch=8 // hvd.size(), epochs=10**6 - state.epoch, verbose=0, callbacks=[
        hvd.elastic.CommitStateCallback(state, 2), hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state), StopAtGate()])


state.register_reset_callbacks([on_state_reset])
train(state)
weights = hvd.allgather(np.concatenate([each.ravel() for each in model.get_weights()])[None])
assert (np.asarray(weights) == np.asarray(weights)[0]).all(), weights
print(f"done with {hvd.size()}")
