"""`DistributedOptimizer` for Keras 3: the user's optimizer, with gradients that are reduced before they are applied.

The optimizer's class is swapped in place for a subclass, so slots and settings stay; to Keras it goes on saying that it is
what it was, so that saved models load without hvdlite. `apply`, which is public, is where gradients come in, before Keras
clips them. With `gradient_accumulation_steps` Keras calls `apply` for every part of a step; then gradients are reduced
where it clips them, which happens once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.training.arguments import WRAPPED, check_passes, chosen_groups
from hvdlite.training.exchange import Exchange, counting
from hvdlite_tf.compression import Compression, Compressor
from hvdlite_tf.keras.exchange import exchange as make_exchange
from hvdlite_tf.local_layers import local_variables


class _Distributed:
    """Mixed into the user's optimizer class."""

    _hvdlite_exchange: Callable[[], Exchange]
    _hvdlite_applied: Sequence[Any]
    _hvdlite_local: frozenset[int]
    _hvdlite_scales_local: bool
    _hvdlite_summed: int
    _hvdlite_base: type

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What Keras (and `isinstance`) is told: the class that it was."""
        return self._hvdlite_base

    def build(self, variables: Sequence[Any]) -> None:
        """Like the base class's."""
        super().build(variables)  # type: ignore[misc]
        self._hvdlite_watch(variables)

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """Like the base class's, of gradients that are reduced over all ranks."""
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)  # type: ignore
        if len(variables) == len(grads) and not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            self._hvdlite_watch(variables)
            grads = self._hvdlite_reduced(list(grads), variables)
        return super().apply(grads, None if trainable_variables is None else variables)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Sequence[Any], trainable_variables: Sequence[Any]) -> Any:
        object.__setattr__(self, "_hvdlite_applied", trainable_variables)
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            with counting(None):  # steps of an accumulation count alike
                grads = self._hvdlite_reduced(list(grads), list(self._hvdlite_applied))
            if self._hvdlite_summed > 1:  # Keras has divided them
                grads = [gradient * self._hvdlite_summed for gradient in grads]
        return super()._clip_gradients(grads)  # type: ignore[misc]

    def _hvdlite_watch(self, variables: Sequence[Any]) -> None:
        if not self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            self._hvdlite_exchange().watch([variable for variable in variables if id(variable) not in self._hvdlite_local])

    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence[Any]) -> Any:
        return grads_and_vars  # a strategy's reduction, after clipping; ours was before it

    def _hvdlite_reduced(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        exchange = self._hvdlite_exchange()
        shared = [index for index, variable in enumerate(variables) if id(variable) not in self._hvdlite_local]
        reduced = exchange.reduce([grads[index] for index in shared], [variables[index] for index in shared])
        for index, gradient in zip(shared, reduced, strict=True):
            grads[index] = gradient
        if self._hvdlite_scales_local and exchange.is_shared:
            for index in set(range(len(grads))) - set(shared):
                if grads[index] is not None:
                    grads[index] = grads[index] / exchange.size
        return grads

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self._hvdlite_base, self.get_config(), self._hvdlite_arguments)  # type: ignore[attr-defined]


def DistributedOptimizer(optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
                         compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                         gradient_predivide_factor: float = 1.0, op: ReduceOp = ReduceOp.AVERAGE,
                         backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: Any = None, process_set: ProcessSet = global_process_set,
                         scale_local_gradients: bool = True) -> Any:
    """Make a Keras 3 optimizer average its gradients over all ranks; returns the same object.

    Clipping, loss scaling, weight decay, moving averages and Keras' own gradient accumulation act on reduced gradients.
    Saved models hold the plain optimizer.

    Args:
        name, device_dense, device_sparse: accepted for Horovod's sake.
        compression: `Compression.none`, `.fp16` or `.bf16`: dtype on the wire for float32 and float64 gradients.
        sparse_as_dense: densify the gradients of embeddings, instead of gathering their rows. (Keras' Adam treats the two
            differently.)
        gradient_predivide_factor: for Average: divide by this before the sum, and by size/this after it.
        op: Average or Sum.
        backward_passes_per_step: gradients accumulated before each update; sets Keras' `gradient_accumulation_steps`.
        average_aggregated_gradients: divide accumulated gradients by `backward_passes_per_step`, as Keras by itself does;
            else they are summed, as in Horovod.
        num_groups: deprecated; use `groups`.
        groups: gradients that are reduced together: a number of groups, or a list of lists of variables.
        process_set: the ranks that share gradients.
        scale_local_gradients: divide gradients of local variables (`PartialDistributedOptimizer`) by the number of ranks.

    Raises:
        ValueError: for another op, an optimizer that is wrapped already or is not Keras'.
        NotInitializedError: before `init()`.
    """
    del name, device_dense, device_sparse
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"DistributedOptimizer takes a Keras 3 optimizer, not {type(optimizer).__name__}")
    inner = getattr(optimizer, "inner_optimizer", None)
    if is_distributed(optimizer) or is_distributed(inner):
        raise ValueError(WRAPPED)
    check_passes(backward_passes_per_step)
    if backward_passes_per_step > 1:
        optimizer.gradient_accumulation_steps = backward_passes_per_step
    arguments = {"compression": compression, "sparse_as_dense": sparse_as_dense, "op": op,
                 "gradient_predivide_factor": gradient_predivide_factor, "process_set": process_set,
                 "groups": chosen_groups(groups, num_groups)}
    summed = 1 if average_aggregated_gradients else backward_passes_per_step
    _wrap(optimizer if inner is None else inner, arguments, scale_local_gradients, summed)  # hooks.py has more on scaling
    return optimizer


def PartialDistributedOptimizer(optimizer: Any, *arguments: Any, local_layers: Any = None, **named: Any) -> Any:
    """Like `DistributedOptimizer`; the variables of some layers are left to each rank.

    Args:
        local_layers: a layer or a list of layers, which have been built.

    Raises:
        ValueError: for what is not a layer, or has not been built.
    """
    local = frozenset(map(id, local_variables(local_layers)))
    wrapped = DistributedOptimizer(optimizer, *arguments, **named)
    object.__setattr__(getattr(wrapped, "inner_optimizer", wrapped), "_hvdlite_local", local)
    return wrapped


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer is one that `DistributedOptimizer` has wrapped."""
    return issubclass(type(optimizer), _Distributed)


def distribute_when_used(optimizer: Any, op: ReduceOp) -> None:
    """Make a Keras optimizer a distributed one whose names follow the order in which optimizers are first used.

    Loading a model makes more optimizers than it keeps, maybe on one rank only.
    """
    _wrap(optimizer, {"op": op}, True, 1, when_used=True)


def _wrap(optimizer: Any, arguments: dict[str, Any], scales_local: bool, summed: int, when_used: bool = False) -> Any:
    # Else made now: names follow the order in which optimizers are made.
    made: list[Exchange] = [] if when_used else [make_exchange(**arguments)]

    def exchange() -> Exchange:
        if not made or not made[0].is_current:
            made[:] = [make_exchange(**arguments)]
        return made[0]
    base = type(optimizer)
    subclass = type(base.__name__, (_Distributed, base), {"__module__": base.__module__})
    for field, value in (("_hvdlite_exchange", exchange), ("_hvdlite_local", frozenset()), ("_hvdlite_base", base),
                         ("_hvdlite_scales_local", scales_local), ("_hvdlite_summed", summed),
                         ("_hvdlite_arguments", (arguments, scales_local, summed))):
        object.__setattr__(optimizer, field, value)
    object.__setattr__(optimizer, "__class__", subclass)
    return optimizer


def _rebuilt(base: type, config: dict[str, Any], arguments: tuple[dict[str, Any], bool, int]) -> Any:
    """Undo pickling: an optimizer without slots, wrapped again where there is a runtime."""
    optimizer = base.from_config(config)  # type: ignore[attr-defined]
    return _wrap(optimizer, *arguments) if api.is_initialized() else optimizer
