"""The scope of a `MirroredStrategy`: what is made or compiled inside is distributed.

Keras' optimizer class is changed while some thread is inside a scope, and as it was afterwards; on threads that are not, it
behaves as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.types import ReduceOp
from hvdlite.training.objects import broadcast_object
from hvdlite.training.scopes import Scopes
from hvdlite.training.strategies import Launching
from hvdlite_tf.keras.optimizer import distribute_when_used, is_distributed
from hvdlite_tf.keras.order import follow_rank_0


class Mirrored(Launching):
    """What the strategies of all backends have in common, and what the scope and the models need of one.

    Args:
        adapter: names the strategies of a backend.
        gradient_op: how gradients are reduced: Sum where Keras divides the loss by the number of replicas, else Average.
        scale_learning_rate: whether to multiply learning rates by the number of replicas.

    Attributes:
        rank, num_replicas_in_sync: this rank's number among how many.
        gradient_op, scales_learning_rate: as above.
        has_local_input: whether datasets hold this rank's share only, at the moment.
        scope: returns the context of the strategy.
    """

    scope: Callable[[], Any]

    def __init__(self, adapter: str, devices: int | Sequence[str] | None, gradient_op: ReduceOp,
                 scale_learning_rate: bool) -> None:
        super().__init__(devices)
        if not api.is_initialized():
            api.init()
        runtime = api.runtime()
        self.rank, self._size = runtime.world.rank, runtime.world.size
        self.gradient_op, self.scales_learning_rate = gradient_op, scale_learning_rate
        self.has_local_input = False
        self._seed = int(broadcast_object(runtime, int(np.random.default_rng().integers(1 << 30)), 0,
                                          runtime.unnamed(adapter, "strategy_seed")))
        follow_rank_0()

    @property
    def num_replicas_in_sync(self) -> int:
        """How many ranks there are."""
        return self._size


def current() -> Mirrored | None:
    """Return the strategy in whose scope this thread is."""
    return _scopes.current()


def entered(strategy: Mirrored) -> AbstractContextManager[None]:
    """Return the scope of a strategy; again in the same one is fine.

    Raises:
        RuntimeError: inside another strategy's scope, or when another thread is in this one's.
    """
    return _scopes.entered(strategy)


def adopt_optimizer(strategy: Mirrored, optimizer: Any) -> None:
    """Make an optimizer one of the scope, unless it is distributed already."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if is_distributed(inner):
        return
    if strategy.scales_learning_rate:
        rate = inner._learning_rate
        if not hasattr(rate, "assign"):
            raise ValueError("scale_learning_rate=True multiplies a number; multiply the values of a "
                             f"{type(rate).__name__} by strategy.num_replicas_in_sync yourself")
        inner.learning_rate = float(keras.ops.convert_to_numpy(rate)) * strategy.num_replicas_in_sync
    distribute_when_used(inner, strategy.gradient_op)
    if keras.backend.backend() == "tensorflow":
        inner._distribution_strategy = strategy


def _constructed(strategy: Mirrored, optimizer: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # which has its inner one not yet
        adopt_optimizer(strategy, optimizer)


_scopes: Scopes[Mirrored] = Scopes({keras.optimizers.Optimizer: _constructed}, "MirroredStrategy")
