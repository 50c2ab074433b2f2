"""Optimizers that are made in a strategy's scope.

A parameter's gradient is reduced once a backward pass, by the first living optimizer of the scope that has it. Others that
have it too share that reduction: their `step` waits for it, and their `zero_grad` clears it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.core.errors import UnsupportedError
from hvdlite_torch.gradients.hooks import Hooks
from hvdlite_torch.gradients.owners import owner_in
from hvdlite_torch.optimizer import Distributed
from hvdlite_torch.optimizer.base import Joined

if TYPE_CHECKING:
    from hvdlite_torch.mirrored.scope_registry import ScopeRegistry


class ScopedOptimizer(Distributed):
    """Mixed into the class of an optimizer that is made in a scope."""

    _scope: ScopeRegistry
    _optimizer_id: int  # in order of construction in the scope

    def _watch(self, parameter: torch.Tensor) -> None:
        if not self._active:
            return
        self._hooks.scope = self._scope
        owner = owner_in(self._scope, parameter) or self._hooks
        assert isinstance(owner, Hooks)
        _ask_in_backward(self, owner)
        if owner is self._hooks:
            super()._watch(parameter)
        elif owner not in self._sources:
            self._sources.append(owner)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the base class's; mirrors the new parameters before the next step. Call it on all ranks."""
        self._scope.scale([param_group])
        self._scope.schedule.due = True
        super().add_param_group(param_group)
        self._scope.apply_weight()

    def set_weight(self, weight: float) -> None:
        """Not possible: the strategy weighs each rank by its rows."""
        raise UnsupportedError("set_weight is for optimizers outside of a scope: in a MirroredStrategy, losses are means "
                               "over a rank's rows, and the strategy weighs them. For tokens, use hvd.DistributedOptimizer")

    @contextmanager
    def join(self, *models: torch.nn.Module, synchronize: bool = True) -> Iterator[Joined]:
        """Like the base class's; mirrors first if that is due, because a rank may have no batch and take no step."""
        self._scope.schedule.agree()
        self._scope.mirror_if_due()
        with super().join(*models, synchronize=synchronize) as joined:
            yield joined

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like the base class's, into the dicts and lists there are; everything is mirrored before the next step."""
        self._scope.schedule.has_loaded = True
        return super().load_state_dict(*args, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copy loaded state into the existing dicts and lists, which optimizers around this one share."""
        if state.keys() == {"state", "param_groups"} and "param_groups" in self.__dict__:
            groups, tensors = self.__dict__["param_groups"], self.__dict__["state"]
            for group, loaded in zip(groups, state["param_groups"], strict=True):
                group.clear()
                group.update(loaded)
            tensors.clear()
            tensors.update(state["state"])
            state = {"state": tensors, "param_groups": groups}
        super().__setstate__(state)  # type: ignore[misc]

    def _mirror(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mirror if this rank or another one has a reason."""
        self._scope.schedule.agree_in_step(self._optimizer_id)
        self._scope.mirror_if_due()

    _stages_before = (*Distributed._stages_before, _mirror)


class _Asking:
    """Asks the other ranks at the beginning of a backward pass, so that the answers arrive before the step.

    Args:
        optimizers: the optimizers whose gradients the pass computes.
    """

    def __init__(self, optimizers: weakref.WeakSet[ScopedOptimizer]) -> None:
        self.optimizers = optimizers

    def __call__(self) -> bool:
        for optimizer in self.optimizers:
            optimizer._scope.schedule.ask_in_step(optimizer._optimizer_id)
        return True


def _ask_in_backward(optimizer: ScopedOptimizer, hooks: Hooks) -> None:
    if not isinstance(hooks.on_begin, _Asking):
        hooks.on_begin = _Asking(weakref.WeakSet())
    hooks.on_begin.optimizers.add(optimizer)
