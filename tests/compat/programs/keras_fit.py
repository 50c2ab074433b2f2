"""Horovod's example with Keras."""

import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
x, y = np.random.rand(128, 7).astype("float32"), np.random.rand(128, 1).astype("float32")
model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
opt = hvd.DistributedOptimizer(keras.optimizers.Adadelta(1.0 * hvd.size()))
model.compile(loss="mse", optimizer=opt, metrics=["mae"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=1.0 * hvd.size(), warmup_epochs=2, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=1.0 * hvd.size(), multiplier=1e-1, start_epoch=2),
]
model.fit(x, y, batch_size=16, callbacks=callbacks, epochs=3, verbose=1 if hvd.rank() == 0 else 0)
score = hvd.allreduce(model.evaluate(x, y, verbose=0)[0])
assert hvd.allgather([float(score)]).shape == (2,)
print("done")
