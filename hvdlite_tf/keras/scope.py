"""The scope of a `MirroredStrategy`: what is made or compiled inside is distributed.

Keras' optimizer class is changed while some thread is inside a scope, and as it was afterwards; on threads that are not, it
behaves as always.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import keras

from hvdlite.core.types import ReduceOp
from hvdlite.training.scopes import Scopes
from hvdlite_tf.keras.optimizer import distribute_when_used, is_distributed


class Mirrored(Protocol):
    """What the scope and the models need of a strategy.

    Attributes:
        rank, num_replicas_in_sync: this rank's number among how many.
        gradient_op: how gradients are reduced: Sum where Keras divides the loss by the number of replicas, else Average.
        scales_learning_rate: whether to multiply learning rates by the number of replicas.
        has_local_input: whether datasets hold this rank's share only, at the moment.
    """

    rank: int
    gradient_op: ReduceOp
    scales_learning_rate: bool

    has_local_input: bool

    @property
    def num_replicas_in_sync(self) -> int: ...

    def scope(self) -> Any:
        """Return the context of the strategy."""

    def next_seed(self) -> int:
        """Return a number that is the same on all ranks, and another one in each call."""


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
