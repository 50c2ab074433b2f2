"""A fuzz of PyTorch trainings as users write them: on several ranks, against one process.

    python -m tests.torch.trainings --seeds 0:1000

`draws.py` draws a training from a seed: a model, an optimizer, options and a loop. `loop.py` is the script. It runs on this
rank, with a `DistributedOptimizer` and this rank's part of each batch or in the scope of a `MirroredStrategy` with global
batches (`sides.py`); rank 0 repeats it with plain torch on the global batches, and `rank.py` compares. `models.py` has the
models and data, `optimizers.py` the optimizers and schedulers. `jobs.py` starts the ranks, many trainings in one job, and
names failing seeds.

`tests/torch/fuzz` draws what this does not: which rank has which gradient when, over bare parameters, on two and four ranks.
"""
