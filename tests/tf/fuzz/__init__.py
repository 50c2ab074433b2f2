"""A fuzz of Keras: random models, data, losses and options on two ranks, against one process.

    python -m tests.tf.fuzz --seeds 0:1000

`draws.py` draws a training from a seed. `rank.py` carries it out on this rank, with a `DistributedOptimizer` and this rank's
part of the data or in the scope of a `MirroredStrategy` with global batches; rank 0 alone repeats it with plain Keras on all
data, and compares. `jobs.py` starts the ranks, many trainings in one job for each backend, and names failing seeds.
"""
