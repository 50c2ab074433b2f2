"""Owners: which optimizer reduces a parameter that several have.

Two optimizers that both reduced one gradient would take it from each other. So each shared parameter's gradients are reduced
by the optimizer that was last wrapped, stepped or cleared with `zero_grad()`. For the others they count as missing, until
that optimizer is gone, or another one comes to its step and finds that they are not reduced. In a strategy's scope it is the
first living optimizer that has the parameter; the others use its reduction.

An optimizer that the script has dropped lives until the garbage collector finds it, which is at different moments on
different ranks. So when an optimizer is wrapped, others of its parameters that have made a step hand nothing over, not even
gradients of other parameters, until they are used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.training.gradients.before_step import BeforeStep
from hvdlite.training.gradients.reducer import Reducer

_having = WeakTensorKeyDictionary()
"""By parameter: weak references to the owners that have it, or had it in an earlier world, in the order of construction."""


class Owner:
    """Base of what hands an optimizer's gradients over: has hooks on parameters, and tracks whose gradients count here.

    Args:
        hook: is called with a parameter whose gradient has been accumulated; does not keep the owner alive, because torch
            does not let Python see the cycle that would make.

    Attributes:
        reducer, before_step: of the gradients.
        scope: whatever optimizers have in common of which one reduces for all: a strategy's scope; None for no others.
        elsewhere: parameters, by identity, whose gradients another optimizer reduces now, which is referred to.
        has_stepped: whether the optimizer has made a step.
    """

    def __init__(self, reducer: Reducer[torch.Tensor], before_step: BeforeStep[torch.Tensor],
                 hook: Callable[[torch.Tensor], None]) -> None:
        self.before_step = before_step
        self.scope: object = None
        self.elsewhere: dict[int, weakref.ref[Any]] = {}
        self.has_stepped = False
        self.reducer = reducer
        self._hook = hook
        self._own: dict[int, torch.Tensor] = {}  # parameters with a hook, by identity
        self._hooks: dict[int, RemovableHandle] = {}  # by the parameter's identity
        weakref.finalize(self, _remove, self._hooks).atexit = False
        self._registered = -1  # torch's count of hooks when ours were last known to be called last
        self._resting: list[torch.Tensor] = []  # parameters that get a hook when the optimizer is used again
        self._sharers: weakref.WeakSet[Owner] = weakref.WeakSet()  # that have hooks on some of these parameters too
        reducer.members.elsewhere = self.elsewhere

    def watch(self, parameter: torch.Tensor, *, claims: bool = True) -> None:
        """Hand this parameter's gradients over from now on, whenever it is trainable; the reducer has it already.

        Args:
            claims: whether they are reduced here from now on if another optimizer has the parameter too.
        """
        if id(parameter) in self._hooks or not (parameter.is_floating_point() or parameter.is_complex()):
            return  # it is watched already, or can never have one
        frozen = not parameter.requires_grad
        if frozen:  # torch takes no hook then, but keeps one when a parameter is frozen
            if parameter.is_inference():
                return
            parameter.requires_grad_(True)
        try:
            with torch._C.DisableTorchFunctionSubclass():  # a lazy parameter refuses it, but keeps the hook
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._hook)
        finally:
            if frozen:
                parameter.requires_grad_(False)
        self._share(parameter, claims)

    def unwatch(self) -> None:
        """Hand nothing over any more."""
        _remove(self._hooks)
        for other in self._sharers:
            other._sharers.discard(self)
            for key in [key for key, reference in other.elsewhere.items() if reference() is self]:
                del other.elsewhere[key]
        self._sharers.clear()
        self.elsewhere.clear()
        self._own.clear()

    def claim(self) -> None:
        """The optimizer was used: reduce all gradients of its parameters from now on."""
        self.wake()
        self.elsewhere.clear()
        for other in self._sharers:
            shared = self._own.keys() & other._own.keys()
            other.elsewhere.update(dict.fromkeys(shared, weakref.ref(self)))
            other.before_step.used_elsewhere(map(self._own.__getitem__, shared))

    def take_back(self) -> None:
        """Before gradients are used: let those count that the other optimizer has not reduced."""
        for other in {reference() for reference in self.elsewhere.values()}:
            if other is not None:
                other.finish()
        for key, reference in list(self.elsewhere.items()):
            other = reference()
            if other is None or self.before_step.take_over(self._own[key], other.reducer):
                del self.elsewhere[key]

    def retire_others(self, scope: object = None) -> None:
        """The optimizer was wrapped: let others of its parameters that have stepped hand nothing over until they are used.

        Args:
            scope: let others of this scope do so instead, whether they have stepped or not.
        """
        for other in list(self._sharers):
            if (scope is None and other.has_stepped) or (scope is not None and other.scope is scope):
                other._resting = list(other._own.values())
                other.unwatch()

    def wake(self) -> bool:
        """The optimizer is used: hand over what no other one reduces. Return whether it had rested."""
        resting, self._resting = self._resting, []
        for parameter in resting:
            self.watch(parameter, claims=False)
        return bool(resting)

    def _share(self, parameter: torch.Tensor, claims: bool) -> None:
        """Be one of those that have a parameter."""
        key, living = id(parameter), _owners_of(parameter)
        for other in living:
            if other is not self and key in other._own:
                self._sharers.add(other)
                other._sharers.add(self)
                if claims:
                    other.elsewhere[key] = weakref.ref(self)
                elif key not in other.elsewhere:
                    self.elsewhere[key] = weakref.ref(other)
        self._own[key] = parameter
        if self not in living:
            _having[parameter] = [*map(weakref.ref, living), weakref.ref(self)]

    def _comes_early(self, running: torch.Tensor) -> bool:
        """Move the hooks behind those that were registered since the last call.

        Return whether one of them was on `running`, whose hooks torch is calling, so that others of it are still to come.
        """
        is_early = False
        if self._registered != RemovableHandle.next_id:
            self._registered = RemovableHandle.next_id
            for handle in self._hooks.values():
                hooks = handle.hooks_dict_ref()
                if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
                    hooks[handle.id] = hooks.pop(handle.id)
                    is_early = is_early or hooks is running._post_accumulate_grad_hooks
        return is_early


def owners(parameter: torch.Tensor) -> list[Owner]:
    """Return the owners, of whichever optimizers, that hand a parameter's gradients over if they count there."""
    return [owner for owner in _owners_of(parameter) if id(parameter) in owner._own]


def owner_in(scope: object, parameter: torch.Tensor) -> Owner | None:
    """Return the owner of a parameter among the optimizers of a strategy's scope: the first living one that has it."""
    return next((owner for owner in _owners_of(parameter) if owner.scope is scope), None)


def _owners_of(parameter: torch.Tensor) -> list[Owner]:
    references = _having.get(parameter, ())
    return [owner for owner in (reference() for reference in references) if owner is not None]


def _remove(hooks: dict[int, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()
