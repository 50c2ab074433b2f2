"""An optimizer that was made outside of a scope, for a module that was made inside it, would train each replica alone."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdlite_torch.optimizer import is_distributed

if TYPE_CHECKING:
    from hvdlite_torch.scoped import Holdings


def refuse_foreign_optimizers(holdings: Holdings) -> None:
    """Let the steps of such optimizers raise `RuntimeError`, as long as `holdings` lives.

    Parameters that an optimizer of the scope has too are left to both: their gradients are reduced.
    """
    handle = register_optimizer_step_pre_hook(torch.compiler.disable(_Guard(holdings)))
    weakref.finalize(holdings, handle.remove).atexit = False


class _Guard:
    """A hook on the steps of all optimizers of the process, also those of other threads; it looks at each one once."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = weakref.ref(holdings)
        self._groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # that were looked at, by optimizer

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        holdings = self._holdings()
        if is_distributed(optimizer) or holdings is None or self._groups.get(optimizer) == len(optimizer.param_groups):
            return
        paths = holdings.paths()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in paths and holdings.owner(parameter) is None:
                    raise RuntimeError(
                        f"{type(optimizer).__name__}, which was made outside of the strategy's scope, trains "
                        f"'{paths[id(parameter)]}', which was made inside it: its gradients are not averaged, so the "
                        "replicas would differ. Make the optimizer inside `with strategy.scope():` too, or wrap it with "
                        "hvd.DistributedOptimizer")
        self._groups[optimizer] = len(optimizer.param_groups)
