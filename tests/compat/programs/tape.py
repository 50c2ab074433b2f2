"""Horovod's example with a gradient tape."""

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import Sum, allreduce, size, size_op
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

hvd.init()
assert mpi_ops is hvd and Compression is hvd.Compression and SyncBatchNormalization is hvd.SyncBatchNormalization
assert SyncBatchNormalization(fused=False)(tf.ones((2, 3)), training=True).shape == (2, 3)
assert float(allreduce(tf.constant(1.0), op=Sum)) == size() == int(size_op())
keras.utils.set_random_seed(hvd.rank())
x, y = tf.random.normal((64, 5)), tf.random.uniform((64,), maxval=3, dtype=tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(64).batch(16)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = keras.optimizers.Adam(0.001 * hvd.size())

@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return loss_value

for batch, (images, labels) in enumerate(dataset.take(20 // hvd.size())):
    loss_value = training_step(images, labels, batch == 0)
    if batch == 0:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)
sums = hvd.allgather_object(sum(float(tf.reduce_sum(v.value)) for v in model.trainable_variables))
assert abs(sums[0] - sums[1]) < 1e-5, sums

layer = model.layers[0]
with tf.GradientTape() as tape:
    value = tf.reduce_sum(model(tf.fill((2, 5), 1.0 + hvd.rank())))
tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
variables = [variable.value for variable in model.trainable_variables]
mine = hvd.allgather_object([gradient.numpy().tolist() for gradient in tape.gradient(value, variables)])
assert mine[0][2] == mine[1][2]
print("done")
