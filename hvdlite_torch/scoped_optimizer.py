"""Optimizers that are made in a strategy's scope.

A parameter's gradient is reduced once a backward pass, by the first living optimizer of the scope that has it. Others that
have it too share that reduction: their `step` waits for it, and their `zero_grad` clears it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch

from hvdlite_torch.gradients.hooks import Hooks
from hvdlite_torch.optimizer import Distributed
from hvdlite_torch.state import load_exactly

if TYPE_CHECKING:
    from hvdlite_torch.scope_registry import ScopeRegistry


class ScopedOptimizer:
    """Mixed into an optimizer that is made in a scope, before what `DistributedOptimizer` mixes in."""

    _scope: ScopeRegistry
    _shared_reducers: list[Hooks]  # of other optimizers, which reduce gradients for this one
    _optimizer_id: int  # in order of construction in the scope
    _hooks: Hooks
    _active: bool

    def _watch(self, parameter: torch.Tensor) -> None:
        owner = self._scope.owner(parameter)
        if self._active:
            _ask_in_backward(self, owner or self._hooks)
        if owner is not None and owner is not self._hooks:
            if owner not in self._shared_reducers:
                self._shared_reducers.append(owner)
        elif self._active:
            super()._watch(parameter)  # type: ignore[misc]
            self._scope.own(parameter, self._hooks)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the base class's; mirrors the new parameters before the next step. Call it on all ranks."""
        self._scope.scale([param_group])
        self._scope.schedule.due = True
        super().add_param_group(param_group)  # type: ignore[misc]
        self._scope.apply_weight()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Like the base class's, whose arguments it takes; reductions under way are completed first."""
        for hooks in self._shared_reducers:
            hooks.cleared()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _sources(self) -> Sequence[Hooks]:
        return [*super()._sources(), *self._shared_reducers]  # type: ignore[misc]

    def _loss_weight(self) -> float:
        return self._scope.weight.value

    def join(self, *models: torch.nn.Module, **settings: Any) -> AbstractContextManager[Any]:
        """Like the base class's; mirrors first if that is due, because a rank may have no batch and take no step."""
        self._scope.schedule.agree()
        self._scope.mirror_if_due()
        joining: AbstractContextManager[Any] = super().join(*models, **settings)  # type: ignore[misc]
        return joining

    def no_sync(self) -> AbstractContextManager[Any]:
        """Accumulate gradients locally; the first backward pass after it reduces the sums."""
        stack = ExitStack()
        stack.enter_context(super().no_sync())  # type: ignore[misc]
        for hooks in self._shared_reducers:
            stack.enter_context(hooks.reducer.suspended())
        return stack

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like the base class's, into the dicts and lists there are; everything is mirrored before the next step."""
        self._scope.schedule.has_loaded = True
        for hooks in self._shared_reducers:
            hooks.cleared()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

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


def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Step hook: mirrors if this rank or another one has a reason."""
    assert isinstance(optimizer, ScopedOptimizer) and isinstance(optimizer, Distributed)
    optimizer._scope.schedule.agree_in_step(optimizer._optimizer_id)
    optimizer._scope.mirror_if_due()


def after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Step hook: tells the optimizers that reduce shared parameters that their gradients are used."""
    assert isinstance(optimizer, ScopedOptimizer)
    for hooks in optimizer._shared_reducers:
        hooks.stepped()


def load_from_replica_0(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load replica 0's state dict; unlike `load_state_dict`, this is no reason to mirror again."""
    load_exactly(optimizer, state, super(Distributed, optimizer).load_state_dict)  # type: ignore[misc]
