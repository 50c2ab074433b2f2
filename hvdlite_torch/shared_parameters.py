"""Parameters of several living optimizers, and the order of the hooks of parameters.

Two optimizers that both reduced one gradient would take it from each other. So each shared parameter's gradients are reduced
by the optimizer that was last wrapped, stepped or cleared with `zero_grad()`. For the others they count as missing, until
that optimizer is gone, or another one comes to its step and finds that they are not reduced.

An optimizer that the script has dropped lives until the garbage collector finds it, which is at different moments on
different ranks. So when an optimizer is wrapped, others of its parameters that have made a step hand nothing over, not even
gradients of other parameters, until they are used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.training.gradients.before_step import BeforeStep
from hvdlite.training.gradients.reducer import Reducer

Elsewhere = dict[int, weakref.ref[Any]]
_OWNER = "hvdlite_owner"


class SharedParameters:
    """Base of what hands an optimizer's gradients over.

    Attributes:
        elsewhere: parameters, by identity, whose gradients another optimizer reduces now, which is referred to.
        has_stepped: whether the optimizer has made a step.
        before_step: of the reducer.
    """

    def __init__(self, reducer: Reducer[torch.Tensor], before_step: BeforeStep[torch.Tensor]) -> None:
        self._own: dict[int, torch.Tensor] = {}  # by identity
        self._sharers: weakref.WeakSet[SharedParameters] = weakref.WeakSet()
        self.elsewhere: Elsewhere = {}
        self._resting: list[torch.Tensor] = []  # own parameters, of which nothing is handed over
        self.has_stepped = False
        self._reducer = reducer
        self.before_step = before_step
        reducer.members.elsewhere = self.elsewhere

    def claim(self) -> None:
        """Reduce all gradients of the own parameters from now on."""
        self.wake()
        self.elsewhere.clear()
        for other in self._sharers:
            shared = self._own.keys() & other._own.keys()
            for key in shared:
                other.elsewhere[key] = weakref.ref(self)
            other.before_step.used_elsewhere(map(self._own.__getitem__, shared))

    def take_back(self) -> None:
        """Before gradients are used: let those count that the other optimizer has not reduced."""
        for other in {reference() for reference in self.elsewhere.values()}:
            if other is not None:
                other.finish()
        for key, reference in list(self.elsewhere.items()):
            other = reference()
            if other is None or self.before_step.take_over(self._own[key], other._reducer):
                del self.elsewhere[key]

    def retire_others(self) -> None:
        """The optimizer was wrapped: let others of its parameters that have stepped rest."""
        for other in list(self._sharers):
            if other.has_stepped:
                other.rest()

    def rest(self) -> None:
        """Hand nothing over until the optimizer is used again."""
        self._resting = self._resting or list(self._own.values())
        self.unwatch()

    def wake(self) -> None:
        """The optimizer is used: hand over what no other one reduces."""
        resting, self._resting = self._resting, []
        for parameter in resting:
            self.watch(parameter, claims=False)

    def watch(self, parameter: torch.Tensor, *, claims: bool = True) -> None:
        """Hand a parameter's gradients over."""
        raise NotImplementedError

    def unwatch(self) -> None:
        """Hand nothing over any more."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the round that is under way, if there is one."""
        raise NotImplementedError

    def _share(self, parameter: torch.Tensor, hook: Callable[[torch.Tensor], None], *, claims: bool) -> RemovableHandle:
        """Register a hook of the own, which hands the parameter's gradients over from now on if it `claims` them."""
        key = id(parameter)
        self._own[key] = parameter
        for other in owners(parameter):
            if other is not self:
                self._sharers.add(other)
                other._sharers.add(self)
                if claims:
                    other.elsewhere[key] = weakref.ref(self)
                elif key not in other.elsewhere:
                    self.elsewhere[key] = weakref.ref(other)
        self._belongs(hook)
        return parameter.register_post_accumulate_grad_hook(hook)

    def _belongs(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Let `owners` find these gradients' owner by a hook."""
        setattr(hook, _OWNER, weakref.ref(self))

    def _unshare(self) -> None:
        """Hand nothing over any more."""
        for other in self._sharers:
            other._sharers.discard(self)
            for key in [key for key, reference in other.elsewhere.items() if reference() is self]:
                del other.elsewhere[key]
        self._sharers.clear()
        self.elsewhere.clear()
        self._own.clear()


def is_elsewhere(parameter: torch.Tensor, elsewhere: Elsewhere) -> bool:
    """Return whether another optimizer reduces the parameter's gradients."""
    reference = elsewhere.get(id(parameter))
    return reference is not None and reference() is not None


def owners(parameter: torch.Tensor) -> Iterator[SharedParameters]:
    """Return the living hooks that hand a parameter's gradients over, of whichever optimizers."""
    with torch._C.DisableTorchFunctionSubclass():  # a lazy parameter refuses the attribute
        hooks = list((parameter._post_accumulate_grad_hooks or {}).values())
    for hook in hooks:
        owner = getattr(hook, _OWNER, lambda: None)()
        if owner is not None:
            yield owner


def come_last(handles: Iterable[RemovableHandle], running: torch.Tensor) -> bool:
    """Move hooks on parameters behind those that were registered since.

    Return whether one of them was on `running`, whose hooks torch is calling, so that other hooks of it are still to come.
    """
    is_early = False
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks and handle.id in hooks and next(reversed(hooks)) != handle.id:
            hooks[handle.id] = hooks.pop(handle.id)
            is_early = is_early or hooks is running._post_accumulate_grad_hooks
    return is_early
