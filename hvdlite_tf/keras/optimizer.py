"""`DistributedOptimizer` for Keras 3: the user's optimizer, with gradients that are reduced before they are applied.

The optimizer's class is swapped in place for a subclass, so slots and settings stay; to Keras it goes on saying that it is
what it was, so that saved models load without hvdlite. `apply`, which is public, is where gradients come in, before Keras
clips them. With `gradient_accumulation_steps` Keras calls `apply` for every part of a step; then gradients are reduced
where it clips them, which happens once a step. Under a `LossScaleOptimizer`, gradients are reduced before it tests them
(hooks.py). `load_model` (checkpoints.py) wraps the optimizer of a loaded model again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.training.arguments import WRAPPED, check_passes, chosen_groups
from hvdlite.training.outer.settings import DiLoCo, check_outer
from hvdlite.training.step_reducer import StepReducer, weighing, weighted_by
from hvdlite_tf.compression import Compression, Compressor
from hvdlite_tf.keras.backends import call, create_step_reducer
from hvdlite_tf.variables import local_variables

if TYPE_CHECKING:
    from hvdlite_tf.keras.outer import Exchanges
    from hvdlite_tf.keras.sharded import Shards


@dataclasses.dataclass(frozen=True)
class _Settings:
    """The settings by which an optimizer exchanges gradients.

    Attributes:
        arguments: of its `StepReducer`.
        scales_local: whether gradients of local variables are divided by the number of ranks.
        summed: how many backward passes are summed; 1 when they are averaged, as Keras does.
        sharded: whether each rank has the state of some variables only.
        exchanges: between workers, see `outer`; None without it.
    """

    arguments: dict[str, Any]
    scales_local: bool = True
    summed: int = 1
    sharded: bool = False
    exchanges: Exchanges | None = None


@dataclasses.dataclass(eq=False)
class _State:
    """Of one distributed optimizer.

    Attributes:
        reducer: reduces its gradients; None until it is needed.
        local: variables that are left to this rank, by identity.
        applied: variables whose accumulated gradients are applied at the moment.
        are_reduced: whether the gradients that come in at the moment have been reduced already.
        has_begun: whether gradients have been reduced, or are from now on while they are computed.
        shards: who owns which variable, from when a sharded optimizer is built.
    """

    reducer: StepReducer | None = None
    local: dict[int, Any] = dataclasses.field(default_factory=dict)
    applied: Sequence[Any] = ()
    are_reduced: bool = False
    has_begun: bool = False
    shards: Shards | None = None


class Distributed:
    """Mixed into the user's optimizer class; every wrapping makes a class of its own, with these attributes."""

    _hvdlite_base: type
    _hvdlite_settings: _Settings

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The optimizer's original class, for Keras and `isinstance`."""
        return self._hvdlite_base

    @classmethod
    def from_config(cls, config: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        """Like the base class's; the new optimizer is distributed in the same way."""
        return _wrap(cls._hvdlite_base.from_config(config, *arguments, **named),  # type: ignore[attr-defined]
                     cls._hvdlite_settings)

    def build(self, variables: Sequence[Any]) -> None:
        """Like the base class's."""
        super().build(variables)  # type: ignore[misc]
        self._hvdlite_watch(variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None, weight: Any = None) -> Any:
        """Like the base class's, of gradients that are reduced over all ranks.

        Args:
            weight: what this rank's loss is a mean over, as in `DistributedGradientTape`. Where the weights of all ranks are
                0, nothing is applied.

        Raises:
            UnsupportedError: for a weight where gradients accumulate, and on torch; beside those of the tape.
        """
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore
        backend, accumulates = keras.backend.backend(), self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if weight is not None and (accumulates or backend == "torch"):
            raise UnsupportedError(
                f"rank {api.rank()}: weight={weight!r} comes too late: " + (
                    "it is for one batch, and gradients of several accumulate" if accumulates else
                    "on torch, backward() reduces gradients. Use the optimizer of hvdlite_torch, which has set_weight"))
        with weighted_by(weight, self._hvdlite_settings.arguments["op"]):
            if not accumulates:
                grads = self._hvdlite_reduced(list(grads), variables)
        base = super()

        def apply() -> Any:
            return base.apply(grads, None if trainable_variables is None else variables)  # type: ignore[attr-defined]
        if weight is None:
            return apply()
        if not self.built:  # type: ignore[has-type]
            self.build(variables)
            self.built = True
        reducer = self._hvdlite_step_reducer()
        if backend != "tensorflow":
            return None if reducer.is_weightless(float(weight)) else apply()
        is_weightless, = call(lambda arrays: [np.array(reducer.is_weightless(float(arrays[0])), np.float32)],
                              [keras.ops.convert_to_tensor(weight, "float32")])
        return keras.ops.cond(is_weightless > 0, lambda: None, apply)

    def apply_gradients(self, grads_and_vars: Any, weight: Any = None) -> Any:
        """Like the base class's, see `apply`."""
        if weight is None:
            return super().apply_gradients(grads_and_vars)  # type: ignore[misc]
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables, weight)
        return self._iterations  # type: ignore[attr-defined]

    def register_local_var(self, var: Any) -> None:
        """Leave the gradients of a variable to this rank; before the first step, and before the optimizer is built.

        Raises:
            ValueError: for what is no variable, or when gradients are reduced already.
            UnsupportedError: for an optimizer that is sharded, or of several workers.
        """
        if not (isinstance(var, keras.Variable) or hasattr(var, "assign")):
            raise ValueError(f"register_local_var takes a variable, such as layer.kernel, and no {type(var).__name__}")
        if self._hvdlite_settings.sharded:
            raise UnsupportedError("sharded=True: variables that are left to each rank have no owner; leave out local "
                                   "layers, or sharded")
        if self._hvdlite_settings.exchanges is not None:
            raise UnsupportedError("outer=: workers exchange all variables of the optimizer; leave out local layers, or "
                                   "outer")
        if self._hvdlite_state.has_begun:
            raise ValueError("register_local_var comes too late: this optimizer has been built or has made a step, and "
                             "exchanges the variable's gradients; call it right after hvd.DistributedOptimizer(...)")
        self._hvdlite_state.local[id(var)] = var

    @property
    def _hvdlite_state(self) -> _State:
        state = vars(self).get("_hvdlite_own_state")
        if state is None:
            state = _State()
            object.__setattr__(self, "_hvdlite_own_state", state)
        return state

    def _hvdlite_step_reducer(self) -> StepReducer:
        state = self._hvdlite_state
        if state.reducer is None:
            state.reducer = create_step_reducer(**self._hvdlite_settings.arguments)
        return state.reducer

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> Any:
        self._hvdlite_state.applied = trainable_variables
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            grads = self._hvdlite_reduced_once_a_step(list(grads), list(self._hvdlite_state.applied))
            summed = self._hvdlite_settings.summed
            if summed > 1:  # Keras has divided them
                grads = [gradient * summed for gradient in grads]
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence[Any]) -> Any:
        return grads_and_vars  # a strategy's reduction, after clipping; ours was before it

    @contextmanager
    def _hvdlite_reducing(self, grads: Sequence[Any], variables: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Reduce gradients before `apply` is called, inside; accumulated ones are left to it."""
        if self.gradient_accumulation_steps or len(grads) != len(variables):  # type: ignore[attr-defined]
            yield grads
            return
        grads = self._hvdlite_reduced(list(grads), list(variables))
        self._hvdlite_state.are_reduced = True
        try:
            yield grads
        finally:
            self._hvdlite_state.are_reduced = False

    def _hvdlite_watch(self, variables: Sequence[Any]) -> None:
        if not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            state = self._hvdlite_state
            state.has_begun = state.has_begun or keras.backend.backend() == "torch"
            self._hvdlite_step_reducer().watch([variable for variable in variables if id(variable) not in state.local])

    def _hvdlite_reduced_once_a_step(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        """Reduce accumulated gradients, all of which count alike."""
        with weighing(None):
            if keras.backend.backend() != "jax":
                return self._hvdlite_reduced(grads, variables)
            # Keras updates on every batch there, and keeps the update of the last one of a step.
            ends = (self._iterations + 1) % self.gradient_accumulation_steps == 0  # type: ignore[attr-defined]
            return list(keras.ops.cond(ends, lambda: self._hvdlite_reduced(list(grads), variables), lambda: grads))

    def _hvdlite_reduced(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        state = self._hvdlite_state
        if state.are_reduced or len(variables) != len(grads):  # for which Keras has a better error
            return grads
        if not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            self._hvdlite_watch(variables)
        state.has_begun = True
        reducer = self._hvdlite_step_reducer()
        shared = [index for index, variable in enumerate(variables) if id(variable) not in state.local]
        reduced = reducer.reduce([grads[index] for index in shared], [variables[index] for index in shared])
        for index, gradient in zip(shared, reduced, strict=True):
            grads[index] = gradient
        if self._hvdlite_settings.scales_local and len(shared) < len(grads) and reducer.is_used:
            divisor = reducer.divisor()
            for index in set(range(len(grads))) - set(shared):
                if grads[index] is not None:
                    grads[index] = grads[index] / keras.ops.cast(divisor, grads[index].dtype)
        return grads

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self._hvdlite_base, self.get_config(), self._hvdlite_settings)  # type: ignore[attr-defined]


if TYPE_CHECKING:
    class WrappedOptimizer(Distributed, keras.optimizers.Optimizer, Any):
        """What type checkers show of a wrapped optimizer: its methods, and those of the user's class (`Any`)."""


def DistributedOptimizer(optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
                         compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                         gradient_predivide_factor: float = 1.0, op: ReduceOp = ReduceOp.AVERAGE,
                         backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: Any = None, process_set: ProcessSet = global_process_set,
                         scale_local_gradients: bool = True, use_locking: bool = False, sharded: bool = False,
                         outer: DiLoCo | None = None) -> WrappedOptimizer:
    """Make a Keras 3 optimizer average its gradients over all ranks; returns the same object.

    Clipping, loss scaling, weight decay, moving averages and Keras' own gradient accumulation act on reduced gradients.
    Saved models hold the plain optimizer. A model that was trained with this optimizer already goes on with reduced
    gradients.

    Args:
        optimizer: an optimizer of Keras 3, or a `LossScaleOptimizer`.
        name, device_dense, device_sparse, use_locking: accepted for Horovod's sake.
        compression: `Compression.none`, `.fp16` or `.bf16`: dtype on the wire for float32 and float64 gradients.
        sparse_as_dense: densify the gradients of embeddings, instead of gathering their rows. (Keras' Adam treats the two
            differently.)
        gradient_predivide_factor: for Average: divide by this before the sum, and by size/this after it.
        op: Average or Sum.
        backward_passes_per_step: gradients accumulated before each update; sets Keras' `gradient_accumulation_steps`, of
            the inner optimizer of a `LossScaleOptimizer`.
        average_aggregated_gradients: divide accumulated gradients by `backward_passes_per_step`, as Keras by itself does;
            else they are summed, as in Horovod.
        num_groups: deprecated; use `groups`.
        groups: gradients that are reduced together: a number of groups, or a list of lists of variables.
        process_set: the ranks that share gradients.
        scale_local_gradients: divide gradients of local variables (`register_local_var`, `PartialDistributedOptimizer`) by
            the number of ranks.
        sharded: whether each rank has the optimizer state of some variables only, which it updates for all ranks.
        outer: `hvd.DiLoCo(...)` or `hvd.LocalSGD(...)`: gradients are averaged among the ranks of a host only, and hosts
            exchange changes of the variables every few steps (docs/slow-links.md). All ranks call this then.

    Raises:
        ValueError: for another op, an optimizer that is wrapped already or is not Keras 3's, and for a built one that would
            have to begin to accumulate.
        UnsupportedError: for an optimizer that cannot be sharded, and what `outer` does not go with.
        NotInitializedError: before `init()`.
    """
    _check_optimizer(optimizer)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if is_distributed(optimizer) or is_distributed(inner):
        raise ValueError(WRAPPED)
    check_passes(backward_passes_per_step)
    exchanges = None
    if outer is not None:
        check_outer(outer, ReduceOp(op), process_set, (sharded, "sharded=True gives variables to owners on all ranks"),
                    (inner.use_ema, "use_ema=True replaces variables by this rank's averages"))
        from hvdlite_tf.keras.outer import Exchanges
        exchanges = Exchanges(outer)
        process_set = exchanges.process_set
    arguments = {"compression": compression, "sparse_as_dense": sparse_as_dense, "op": op,
                 "gradient_predivide_factor": gradient_predivide_factor, "process_set": process_set,
                 "groups": chosen_groups(groups, num_groups)}
    if backward_passes_per_step > 1:
        _accumulate(inner, backward_passes_per_step)
    summed = 1 if average_aggregated_gradients else backward_passes_per_step
    if sharded:
        from hvdlite_tf.keras.sharded import check_sharded  # it extends `Distributed`
        check_sharded(inner)
    _wrap(inner, _Settings(arguments, scale_local_gradients, summed, sharded, exchanges))
    return optimizer


def PartialDistributedOptimizer(optimizer: Any, *arguments: Any, local_layers: Any = None, **named: Any) -> Any:
    """Like `DistributedOptimizer`; the variables of some layers are left to each rank.

    Args:
        arguments, named: those of `DistributedOptimizer`.
        local_layers: a layer or a list of layers, which have been built.

    Raises:
        ValueError: for what is not a layer, or has not been built.
        UnsupportedError: for local layers of a sharded optimizer.
    """
    local = local_variables(local_layers)
    wrapped = DistributedOptimizer(optimizer, *arguments, **named)
    inner: Any = getattr(wrapped, "inner_optimizer", wrapped)
    for variable in local:
        inner.register_local_var(variable)
    return wrapped


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer is one that `DistributedOptimizer` has wrapped."""
    return issubclass(type(optimizer), Distributed)


def distributed_in(optimizer: Any) -> Any:
    """Return the distributed optimizer that an optimizer is or scales the loss for; None when there is none."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner if is_distributed(inner) else None


def distribute_when_used(optimizer: Any, op: ReduceOp) -> None:
    """Make a Keras optimizer a distributed one whose names follow the order in which optimizers are first used.

    Loading a model makes more optimizers than it keeps, maybe on one rank only.
    """
    _wrap(optimizer, _Settings({"op": op}), when_used=True)


def _wrap(optimizer: Any, settings: _Settings, when_used: bool = False) -> Any:
    base, kind = type(optimizer), Distributed
    if settings.sharded:
        from hvdlite_tf.keras.sharded import Sharded  # it extends `Distributed`
        kind = Sharded
    if settings.exchanges is not None:
        from hvdlite_tf.keras.outer import WithOuter
        kind = WithOuter
        object.__setattr__(optimizer, "hvdlite_exchanges", settings.exchanges)  # Keras saves it, too
    fields = {"__module__": base.__module__, "_hvdlite_base": base, "_hvdlite_settings": settings}
    if not when_used:  # names follow the order in which optimizers are made
        state = _State(create_step_reducer(**settings.arguments))
        object.__setattr__(optimizer, "_hvdlite_own_state", state)
    object.__setattr__(optimizer, "__class__", type(base.__name__, (kind, base), fields))
    if (settings.exchanges is not None or optimizer.gradient_accumulation_steps) and keras.backend.backend() == "torch":
        from hvdlite_torch.uncompiled import leave_to_python
        leave_to_python(kind.apply)
        object.__setattr__(optimizer, "apply", optimizer.apply)  # torch.compile looks in the class that `__class__` names
    return optimizer


def _rebuilt(base: type, config: dict[str, Any], settings: _Settings) -> Any:
    """Undo pickling: an optimizer without slots, wrapped again where there is a runtime."""
    optimizer = base.from_config(config)  # type: ignore[attr-defined]
    return _wrap(optimizer, settings) if api.is_initialized() else optimizer


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let a Keras optimizer accumulate; updates that it has made go on counting as updates."""
    before = optimizer.gradient_accumulation_steps
    if optimizer.built and not before:
        raise ValueError(f"backward_passes_per_step={passes}: optimizer '{optimizer.name}' has been built without variables "
                         "that gradients accumulate in, and Keras cannot add them; wrap it before the model's first batch, "
                         f"or make it with gradient_accumulation_steps={passes}")
    updates = int(keras.ops.convert_to_numpy(optimizer.iterations))
    optimizer.gradient_accumulation_steps = passes
    if optimizer.built and passes != before:  # Keras counts backward passes
        optimizer._iterations.assign(updates * passes)
        optimizer._backend_reset_gradient_accumulators()


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return
    owners = {owner.__module__.partition(".")[0] for owner in type(optimizer).__mro__}
    if "tf_keras" in owners or any(".legacy" in owner.__module__ for owner in type(optimizer).__mro__):
        raise ValueError(f"{type(optimizer).__name__} is an optimizer of Keras 2 (tf_keras), and DistributedOptimizer takes "
                         "Keras 3's: unset TF_USE_LEGACY_KERAS, or import keras instead of tf.keras. Loops of your own over "
                         "Keras 2's optimizers can use hvdlite_tf.DistributedGradientTape")
    raise ValueError(f"DistributedOptimizer takes a Keras 3 optimizer, not {type(optimizer).__name__}")
