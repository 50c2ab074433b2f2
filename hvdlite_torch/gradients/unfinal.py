"""Gradients that are not final yet: reading or writing `.grad` of such a parameter waits for its reduction first.

Between `backward()` and the end of a round, `.grad` would be None or half reduced. For that time a parameter gets a subclass
of its own class in which `grad` is a property. Everything that looks at gradients from Python (clipping, GradScaler,
optimizers, user code) goes through it. torch itself changes parameters' classes in this way when lazy modules get shapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

_plain: Any = torch.Tensor.grad  # what torch itself reads and writes
_classes: dict[type, type] = {}  # by a parameter's own class
_GUARD = "_hvdlite_guard"
_changing = threading.Lock()  # held while classes are changed


class UnfinalGradient:
    """Mixed into a parameter's class while its gradient is not final."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, once it is final."""
        _finish(self)
        return get_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _finish(self)
        set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _finish(self)
        return _own(self).__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _finish(self)
        return _own(self).__reduce_ex__(self, protocol)


def _finish(parameter: Any) -> None:
    """Wait until the gradient is final; from then on the parameter has its own class again."""
    guard = parameter.__dict__.get(_GUARD)
    # Without a guard, its class came from elsewhere. torch.compile looks whether there is a gradient, and what it makes for
    # the guarded class is used again only if the class stays.
    if guard is not None and torch._guards.TracingContext.try_get() is None:
        guard.finish()


get_grad: Callable[[Any], torch.Tensor | None] = _plain.__get__
"""Return a parameter's gradient as it is, final or not."""
set_grad: Callable[[Any, torch.Tensor | None], None] = _plain.__set__
"""Set a parameter's gradient, final or not."""


class Guard:
    """Lets whatever reads some parameters' gradients call `finish` first, until it is lifted. From any thread.

    Raises:
        TypeError: for a parameter whose class cannot be changed.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], finish: Callable[[], None]) -> None:
        self.finish = finish
        self._parameters = list(parameters)
        with _changing:
            for parameter in self._parameters:
                kind = type(parameter)
                if not issubclass(kind, UnfinalGradient):
                    parameter.__class__ = _classes.get(kind) or _unfinal(kind)
                parameter.__dict__[_GUARD] = self

    def lift(self) -> None:
        """The gradients are final, or another guard has these parameters."""
        with _changing:
            for parameter in self._parameters:
                if parameter.__dict__.get(_GUARD) is self:
                    parameter.__class__ = _own(parameter)
                    del parameter.__dict__[_GUARD]
            self._parameters = []
            self.finish = _nothing  # which refers to this, so that it would be garbage


def _nothing() -> None:
    pass


def _unfinal(kind: type) -> type:
    """Return the class for parameters of class `kind`; what is computed with them is as if they had their own."""
    members: dict[str, Any] = {"__module__": kind.__module__}
    computed: Any = kind.__torch_function__  # type: ignore[attr-defined]
    if computed is not torch._C._disabled_torch_function_impl:
        def as_own(cls: type, function: Any, types: Iterable[type], arguments: Any = (), keywords: Any = None) -> Any:
            return computed(function, tuple(kind if each is cls else each for each in types), arguments, keywords or {})
        members["__torch_function__"] = classmethod(as_own)
    made = _classes[kind] = type(kind)(kind.__name__, (UnfinalGradient, kind), members)
    return made


def _own(parameter: Any) -> Any:
    """Return a parameter's own class."""
    kind = type(parameter)
    return kind.__mro__[2] if issubclass(kind, UnfinalGradient) else kind
