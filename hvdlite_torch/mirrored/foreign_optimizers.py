"""Detection of optimizers that were created outside a scope for a module that was created inside it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdlite_torch.gradients.owners import owners
from hvdlite_torch.optimizer import is_distributed

if TYPE_CHECKING:
    from hvdlite_torch.mirrored.scope_registry import ScopeRegistry


def refuse_foreign_optimizers(registry: ScopeRegistry) -> None:
    """Make the steps of such optimizers raise `RuntimeError`, as long as `registry` lives.

    Parameters that a distributed optimizer also has, of the scope or not, are allowed: their gradients are reduced.
    """
    handle = register_optimizer_step_pre_hook(torch.compiler.disable(_Guard(registry)))
    weakref.finalize(registry, handle.remove).atexit = False


class _Guard:
    """A hook on the steps of all optimizers of the process, also those of other threads.

    It examines each optimizer once, and again when the optimizer gets new parameters or when hooks that reduced gradients
    of its parameters are removed.
    """

    def __init__(self, registry: ScopeRegistry) -> None:
        self._registry = weakref.ref(registry)
        self._seen: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()  # by optimizer

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        registry = self._registry()
        if is_distributed(optimizer) or registry is None:
            return
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        seen = self._seen.get(optimizer)
        if seen is not None and seen.count == count and all(owner() is not None for owner in seen.owners):
            return
        paths = registry.paths()
        reducing: set[weakref.ref[Any]] = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in paths or not (parameter.is_floating_point() or parameter.is_complex()):
                    continue  # one of integers has no gradient
                reduced_by = owners(parameter)
                if not reduced_by:
                    raise RuntimeError(
                        f"{type(optimizer).__name__}, which was made outside of the strategy's scope, trains "
                        f"'{paths[id(parameter)]}', which was made inside it: its gradients are not averaged, so the "
                        "replicas would differ. Make the optimizer inside `with strategy.scope():` too, or wrap it with "
                        "hvd.DistributedOptimizer")
                reducing.add(weakref.ref(reduced_by[0]))
        self._seen[optimizer] = _Seen(count, tuple(reducing))


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The result of examining an optimizer: the number of its parameters, and the hooks that reduce gradients of some."""

    count: int
    owners: tuple[weakref.ref[Any], ...]
