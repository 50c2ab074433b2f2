"""Elastic training of a tiny TensorFlow model by a schedule, as a script for Horovod."""

import horovod.tensorflow as hvd
import tensorflow as tf

from tests.compat.programs.scheduled import Schedule

RATE = 0.001

hvd.init()
schedule = Schedule()
x, y = tf.random.uniform([8, 2]), tf.one_hot(tf.random.uniform([8], maxval=2, dtype=tf.int64), 2)
model = tf.keras.Sequential([tf.keras.layers.Dense(2, activation="softmax")])
optimizer = tf.optimizers.SGD(RATE * hvd.size())


@tf.function
def step(reduces=True):
    with tf.GradientTape() as tape:
        loss = tf.losses.categorical_crossentropy(y, model(x, training=True))
    if reduces:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def scale_learning_rate():
    optimizer.learning_rate.assign(RATE * hvd.size())


@hvd.elastic.run
def train(state):
    schedule.train(hvd, state, step)


step(reduces=False)  # makes the variables, also on a rank that joins
state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0, commits=0, worlds=0)
state.register_reset_callbacks([scale_learning_rate])
train(state)
