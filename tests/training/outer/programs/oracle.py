"""The training of several workers in NumPy, on one process: what `training.outer` is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvdlite.core.array import Array
from hvdlite.training.outer.settings import DiLoCo

Learn = Callable[[int, int, list[Array]], None]
"""Makes a worker's step: (worker, step from 1, its parameters, which are changed)."""


def train(settings: DiLoCo, initial: Sequence[Array], parts: Sequence[Sequence[int]], workers: int, steps: int,
          learn: Learn) -> tuple[list[list[Array]], list[Array]]:
    """Return each worker's parameters and the global ones; for delay=0 and wire=None.

    Args:
        parts: the indices of the parameters of each fragment.
    """
    local = [[each.copy() for each in initial] for _ in range(workers)]
    weights = [each.copy() for each in initial]
    momentum = [np.zeros_like(each) for each in initial]
    for step in range(1, steps + 1):
        for worker in range(workers):
            learn(worker, step, local[worker])
        for fragment, part in enumerate(parts):
            if step % settings.every != fragment * settings.every // len(parts):
                continue
            for index in part:
                total = weights[index] - local[0][index]
                for worker in range(1, workers):
                    total = total + (weights[index] - local[worker][index])
                gradient = total / workers
                if settings.momentum:
                    momentum[index] = settings.momentum * momentum[index] + gradient
                    gradient = (gradient + settings.momentum * momentum[index] if settings.nesterov else momentum[index])
                weights[index] = weights[index] - settings.lr * gradient
                for worker in range(workers):
                    local[worker][index] = weights[index].copy()
    return local, weights
