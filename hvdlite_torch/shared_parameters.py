"""Parameters of several living optimizers, and the order of the hooks of parameters.

Two optimizers that both reduced one gradient would take it from each other. So each shared parameter's gradients are reduced
by the optimizer that was last wrapped, stepped or cleared with `zero_grad()`. For the others they count as missing, until
that optimizer is gone, or another one comes to its step and finds that they are not reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.training.framework import Framework
from hvdlite.training.gradient_reducer import GradientReducer
from hvdlite_torch.framework import TorchGradients

_OWNER = "hvdlite_owner"


class SharedParameters:
    """Base of what hands an optimizer's gradients over.

    Attributes:
        elsewhere: parameters, by identity, whose gradients another optimizer reduces now, which is referred to.
    """

    def __init__(self, reducer: GradientReducer[torch.Tensor]) -> None:
        self._own: dict[int, torch.Tensor] = {}  # by identity
        self._sharers: weakref.WeakSet[SharedParameters] = weakref.WeakSet()
        self.elsewhere: dict[int, weakref.ref[Any]] = {}
        self._reducer = reducer
        self._tell(reducer.framework)

    def claim(self) -> None:
        """Reduce all gradients of the own parameters from now on."""
        self.elsewhere.clear()
        for other in self._sharers:
            shared = self._own.keys() & other._own.keys()
            for key in shared:
                other.elsewhere[key] = weakref.ref(self)
            other._reducer.used_elsewhere(map(self._own.__getitem__, shared))

    def take_back(self) -> None:
        """Before gradients are used: let those count that the other optimizer has not reduced."""
        for other in {reference() for reference in self.elsewhere.values()}:
            if other is not None:
                other.finish()
        for key, reference in list(self.elsewhere.items()):
            other, parameter = reference(), self._own[key]
            if other is None or not other._reducer.is_current(parameter):
                del self.elsewhere[key]
                if other is not None and other._reducer.has_accumulated(parameter):
                    self._reducer.note_accumulated(parameter)

    def finish(self) -> None:
        """End the round that is under way, if there is one."""
        raise NotImplementedError

    def _tell(self, framework: Framework[torch.Tensor]) -> None:
        """Let a keeper of gradients know which ones it does not have."""
        if isinstance(framework, TorchGradients):
            framework.elsewhere = self.elsewhere

    def _share(self, parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Register a hook of the own, which hands the parameter's gradients over from now on."""
        self._own[id(parameter)] = parameter
        for other in owners(parameter):
            if other is not self:
                self._sharers.add(other)
                other._sharers.add(self)
                other.elsewhere[id(parameter)] = weakref.ref(self)
        setattr(hook, _OWNER, weakref.ref(self))
        return parameter.register_post_accumulate_grad_hook(hook)

    def _unshare(self) -> None:
        """Hand nothing over any more."""
        for other in self._sharers:
            other._sharers.discard(self)
            for key in [key for key, reference in other.elsewhere.items() if reference() is self]:
                del other.elsewhere[key]
        self._sharers.clear()
        self.elsewhere.clear()
        self._own.clear()


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
