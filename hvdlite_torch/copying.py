"""Copies of a distributed optimizer (`copy.deepcopy`, `copy.copy`, pickles, `torch.save`), which are plain optimizers.

A copy has the base class and the same settings and state; it does not communicate. Why: docs/decisions/0032.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch

from hvdlite.runtime.runtime import Runtime


class PlainCopies:
    """Mixed into distributed optimizers."""

    _runtime: Runtime
    _active: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the base class, so that a pickle can be loaded where hvdlite is not installed."""
        reduced: Any = super().__reduce_ex__(0)  # later protocols require the object's own class
        make, arguments, *rest = reduced
        plain = plain_class(type(self))
        return (make, tuple(plain if argument is type(self) else argument for argument in arguments), *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain optimizer of the copied parameters; its first step warns that it trains alone."""
        make, arguments, state, *_ = self.__reduce_ex__(4)
        copied = memo[id(self)] = make(*arguments)
        copied.__setstate__(copy.deepcopy(state, memo))
        return self._told_apart(copied)

    def __copy__(self) -> Any:
        """Return a plain optimizer of the same parameters, with the same state; its first step warns as well."""
        make, arguments, state, *_ = self.__reduce_ex__(4)
        copied = make(*arguments)
        copied.__setstate__(state)
        return self._told_apart(copied)

    def _told_apart(self, copied: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make a copy warn in its first step."""
        if self._active:
            copied.register_step_pre_hook(torch.compiler.disable(_WarnsOnce(self._runtime.world.rank)))
        return copied


def plain_class(kind: type) -> type:
    """Return an optimizer's class before it was wrapped, given its present class."""
    return next(base for base in kind.__mro__
                if issubclass(base, torch.optim.Optimizer) and not issubclass(base, PlainCopies))


class _WarnsOnce:
    """A step hook of copies; does nothing when the copy has been wrapped itself."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_warned = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_warned or isinstance(optimizer, PlainCopies):
            return
        self._has_warned = True
        warnings.warn(f"rank {self._rank}: this {type(optimizer).__name__} is a copy of a distributed optimizer and trains "
                      "on this rank alone; to train in step with the other ranks, wrap the copy on all ranks: "
                      "hvd.DistributedOptimizer(copy, copied_model.named_parameters())", UserWarning, stacklevel=4)


class ModuleHook:
    """Base class of hooks that belong to one module: in its copies and pickles they do nothing."""

    def __reduce__(self) -> Any:
        return _hook_of_copies, ()


def _hook_of_copies() -> Any:
    return _nothing


def _nothing(module: torch.nn.Module, argument: Any) -> None:
    return
