"""The order of samples, which rank 0 determines for all ranks.

Ranks take rows of the same global batches, so the choice of each batch's samples must be equal on all ranks:

- arrays and the batches of a PyDataset: the seed of their order comes from rank 0;
- Python's and NumPy's global random numbers, with which datasets and generators shuffle: ranks copy rank 0's state when a
  strategy is created, when `fit` begins, and before a PyDataset's `on_epoch_begin` and `on_epoch_end`;
- TensorFlow's global seed: ranks copy rank 0's when a strategy is created, for datasets that are created later;
- the sampler of a torch DataLoader: rank 0's indices are broadcast.

The seeds of a tf.data shuffle are fixed when it is created, and compared when the dataset is used.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from hvdlite import api
from hvdlite.core.errors import MismatchError
from hvdlite.training.objects import allgather_object, broadcast_object


def sync_random_state() -> None:
    """Copy the state of rank 0's global random numbers in Python and NumPy."""
    runtime = api.runtime()
    if runtime.world.size == 1:
        return
    own = (random.getstate(), np.random.get_state())
    states = broadcast_object(runtime, own, 0, runtime.names.unnamed("keras", "random_states"))
    random.setstate(states[0])
    np.random.set_state(states[1])


def order_seed(count: int) -> list[int]:
    """Return a seed that depends on Python's global random numbers, without drawing any.

    So the script draws the same numbers as in one process. Call it after `sync_random_state`.

    Args:
        count: the number of seeds so far, which makes this one different.
    """
    probe = random.Random()
    probe.setstate(random.getstate())
    return [probe.getrandbits(32), count]


def checked(dataset: Any) -> Any:
    """Return a tf.data.Dataset after comparing the seeds of its shuffles between ranks.

    Raises:
        MismatchError: on all ranks, when a shuffle has no seed or different seeds.
    """
    runtime = api.runtime()
    if runtime.world.size == 1:
        return dataset
    own = [(int(each._seed), int(each._seed2)) for each in lineage(dataset)
           if hasattr(each, "_seed") and hasattr(each, "_seed2")]
    everywhere = allgather_object(runtime, own, runtime.names.unnamed("keras", "shuffle_seeds"))
    remedy = ("ranks would take their rows of batches that hold different samples. Make the dataset after the "
              "MirroredStrategy, and set the same seed on all ranks (keras.utils.set_random_seed, tf.random.set_seed) "
              "or none")
    for rank, theirs in enumerate(everywhere):
        if theirs != everywhere[0]:
            raise MismatchError(f"a tf.data.Dataset shuffles with the seeds {everywhere[0]} on rank 0 and {theirs} on rank "
                                f"{rank}: {remedy}")
    if (0, 0) in own:
        raise MismatchError(f"a tf.data.Dataset shuffles without a seed: {remedy}")
    return dataset


def lineage(dataset: Any) -> Iterator[Any]:
    """Yield a tf.data.Dataset and all its inputs, recursively."""
    waiting, seen = [dataset], set()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting.extend(getattr(each, "_inputs", tuple)())
