"""The scope of a `MirroredStrategy`: what is made or compiled inside is distributed.

Keras' optimizer class is changed while some thread is inside a scope, and as it was afterwards; on threads that are not, it
behaves as always.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import keras

from hvdlite.core.types import ReduceOp
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


_local = threading.local()
_lock = threading.Lock()
_inside = 0  # scopes that are open, over all threads
_original: Any = None  # the optimizer class's own __init__, or None when it has none


def current() -> Mirrored | None:
    """Return the strategy in whose scope this thread is."""
    stack: list[Mirrored] = getattr(_local, "stack", [])
    return stack[-1] if stack else None


@contextmanager
def entered(strategy: Mirrored) -> Iterator[None]:
    """Be in the scope of a strategy; again in the same one is fine.

    Raises:
        RuntimeError: inside another strategy's scope.
    """
    other = current()
    if other is not None and other is not strategy:
        raise RuntimeError("this is inside the scope of another MirroredStrategy; make one strategy, and use it everywhere")
    stack: list[Mirrored] = _local.__dict__.setdefault("stack", [])
    _patch(1)
    stack.append(strategy)
    try:
        yield
    finally:
        stack.pop()
        _patch(-1)


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


def _patch(step: int) -> None:
    global _inside, _original
    with _lock:
        _inside += step
        optimizer = keras.optimizers.Optimizer
        if _inside == 1 and step == 1:
            _original = vars(optimizer).get("__init__")
            optimizer.__init__ = _constructing(optimizer.__init__)
        elif _inside == 0:
            if _original is None:
                del optimizer.__init__
            else:
                optimizer.__init__ = _original


def _constructing(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        strategy = current()
        if strategy is not None and not isinstance(self, keras.optimizers.LossScaleOptimizer):
            adopt_optimizer(strategy, self)
    return __init__
