"""The scope of a `MirroredStrategy`: models and optimizers that are made or compiled inside are distributed.

Keras' optimizer, layer and variable classes are patched while some thread is inside a scope, and restored afterwards; on
other threads they behave as usual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import ReduceOp
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite.training.mirrored.scopes import LaunchableStrategy, Scopes
from hvdlite.training.mirrored.shares import Shares
from hvdlite.training.objects import broadcast_object
from hvdlite_tf.keras import step
from hvdlite_tf.keras.optimizer import distribute_when_used, is_distributed
from hvdlite_tf.keras.order import sync_random_state
from hvdlite_tf.keras.variable_mirror import VariableMirror

METRICS_ASK_FOR_SUMS = not hasattr(keras.Variable, "synchronization")
"""Whether variables of metrics ask for a sum over replicas, and not when to make it: before Keras 3.10."""


class BaseStrategy(LaunchableStrategy):
    """The common base of the strategies of all backends: the interface for the scope and the models.

    Args:
        devices: how many ranks `launch` starts when no launcher has; a number, or as many as the list is long.
        cross_device_ops: accepted for TensorFlow's sake.
        scale_learning_rate: multiply the learning rates of optimizers by the number of replicas.
        shares: of each rank in global batches of training: None for equal ones, a number for each rank (a list) or for each
            rank of a host (a dict by host name), or "auto": in `fit` they follow the ranks' speeds.
        max_rows: the most rows of a rank in a batch, or a list with a number for each.

    Attributes:
        rank: this rank.
        scales_learning_rate: as above.
        variable_mirror: mirrors the scope's variables.
        has_shares: whether shares or limits of rows were given.
        has_local_input: whether datasets currently contain only this rank's shard.
        scope: returns the context of the strategy.
    """

    scope: Callable[[], Any]

    def __init__(self, devices: int | Sequence[str] | None = None, cross_device_ops: Any = None, *,
                 scale_learning_rate: bool = False, shares: str | Sequence[float] | Mapping[str, float] | None = None,
                 max_rows: int | Sequence[int] | None = None) -> None:
        if not api.is_initialized():
            api.init()
        super().__init__(devices)
        runtime = api.runtime()
        self.rank, self._size = runtime.world.rank, runtime.world.size
        self.scales_learning_rate = scale_learning_rate
        self.variable_mirror = VariableMirror(self.rank, self._size)
        self.has_local_input = False
        self.replicas = ReplicaGroup(runtime, GLOBAL_PROCESS_SET_ID)
        self.shares, self.has_shares = Shares(self.replicas, shares, max_rows), not (shares is None and max_rows is None)
        self._seed = int(broadcast_object(runtime, int(np.random.default_rng().integers(1 << 30)), 0,
                                          runtime.names.unnamed("keras", "strategy_seed")))
        sync_random_state()
        self._set_up()

    def _set_up(self) -> None:
        """Finish the constructor of a backend's strategy."""

    def is_summed_on_read(self, variable: Any) -> bool:
        """Return whether a variable of a metric has each rank's part, and reading it gives the sum over all ranks.

        Args:
            variable: of Keras.
        """
        return False

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of ranks; 1 inside `train_step` and `test_step`, where Keras sees one replica."""
        return self._size if step.current() is None else 1

    def making(self) -> AbstractContextManager[Any]:
        """Return a context in which new variables get rank 0's values immediately."""
        return nullcontext()

    def building(self) -> AbstractContextManager[Any]:
        """Return a context in which an optimizer of the scope can be built."""
        return nullcontext()

    def weighted_step(self, samples: Any, variables: Callable[[], Sequence[Any]]) -> AbstractContextManager[None]:
        """Return the context of a model's step, for the gradients of collectives in it; see `hvdlite_tf.step_weight`.

        Args:
            samples: this rank's number of samples, by which gradients of variables are weighted; None for equal weights.
            variables: returns these variables.
        """
        return nullcontext()

    def check_applies(self) -> None:
        """Raise an error where gradients cannot be applied."""


@contextmanager
def entered(strategy: BaseStrategy) -> Iterator[None]:
    """Return the context of a strategy's scope; nested ones are allowed. At its end, new variables are mirrored.

    Raises:
        RuntimeError: inside another strategy's scope, or while another thread is in this one's.
    """
    is_outermost = scopes.current() is None
    with scopes.entered(strategy):
        yield
    if is_outermost:
        strategy.variable_mirror.mirror_pending()


@contextmanager
def making(strategy: BaseStrategy) -> Iterator[None]:
    """Return a strategy's scope for ranks that are in step: new variables get rank 0's values immediately."""
    with scopes.entered(strategy), strategy.variable_mirror.immediately(), strategy.making():
        yield


def distribute_optimizer(strategy: BaseStrategy, optimizer: Any) -> None:
    """Distribute an optimizer; may be called again.

    Raises:
        ValueError: for one that `DistributedOptimizer` has wrapped.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if is_distributed(inner):
        if "_hvdlite_strategy" not in vars(inner):
            raise ValueError(f"this {type(inner).__name__} was wrapped by DistributedOptimizer before it came into a "
                             "MirroredStrategy's scope, which distributes optimizers itself: leave out "
                             "DistributedOptimizer, or the scope")
        object.__setattr__(inner, "_hvdlite_strategy", strategy)
        return
    _scale_learning_rate(strategy, inner)
    distribute_when_used(inner, ReduceOp.AVERAGE)
    object.__setattr__(inner, "_hvdlite_strategy", strategy)
    object.__setattr__(inner, "apply", _applying(inner))
    object.__setattr__(inner, "build", _building(inner))
    if keras.backend.backend() == "tensorflow":
        inner._distribution_strategy = strategy


def _scale_learning_rate(strategy: BaseStrategy, optimizer: Any) -> None:
    if not strategy.scales_learning_rate:
        return
    rate = optimizer._learning_rate
    if not hasattr(rate, "assign"):
        raise ValueError("scale_learning_rate=True multiplies a number; multiply the values of a "
                         f"{type(rate).__name__} by strategy.num_replicas_in_sync yourself")
    optimizer.learning_rate = float(keras.ops.convert_to_numpy(rate)) * strategy.num_replicas_in_sync


def _constructed(strategy: BaseStrategy, optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # which does not have its inner optimizer yet
        return
    if is_distributed(optimizer):  # before Keras 3.15 constructors run twice on torch
        _scale_learning_rate(strategy, optimizer)
    else:
        distribute_optimizer(strategy, optimizer)


def _applying(optimizer: Any) -> Callable[..., Any]:
    """Return an optimizer's `apply`, extended for optimizers of a scope."""
    original = optimizer.apply

    @functools.wraps(original)
    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        optimizer._hvdlite_strategy.check_applies()
        grads = step.prepared(grads, bool(optimizer.gradient_accumulation_steps))
        return original(grads, trainable_variables)
    return apply


def _building(optimizer: Any) -> Callable[..., Any]:
    original = optimizer.build

    @functools.wraps(original)
    def build(variables: Sequence[Any]) -> Any:
        with optimizer._hvdlite_strategy.building():
            return original(variables)
    return build


def _builds_in_step(strategy: BaseStrategy, layer: Any) -> None:
    """Mirror the variables of a layer of the scope that is built outside of the scope."""
    original = layer.build

    @functools.wraps(original)
    def build(*arguments: Any, **named: Any) -> Any:
        if scopes.current() is not None or strategy.variable_mirror.is_deferred:
            return original(*arguments, **named)
        with making(strategy):
            return original(*arguments, **named)
    object.__setattr__(layer, "build", build)


def _record_variable(strategy: BaseStrategy, variable: Any) -> None:
    is_metrics = variable.aggregation == "sum" if METRICS_ASK_FOR_SUMS else variable.synchronization == "on_read"
    if not is_metrics:
        strategy.variable_mirror.created(variable)


_made: dict[type, Callable[[BaseStrategy, Any], None]] = {keras.optimizers.Optimizer: _constructed,
                                                          keras.layers.Layer: _builds_in_step}
if keras.backend.backend() != "tensorflow":  # which reports variables to its strategies
    _made[keras.Variable] = _record_variable
scopes: Scopes[BaseStrategy] = Scopes(_made, "MirroredStrategy")
