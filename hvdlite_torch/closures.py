"""`optimizer.step(closure)`: gradients are final when the closure returns, on every rank and after every call of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlite_torch.optimizer import Distributed

Closure = Callable[[], Any]


def final_closure(closure: Closure, optimizer: Distributed) -> Closure:
    """Return a closure for one step, after which the gradients that it computed are final.

    A rank whose closure has no `backward()` takes part in the others' reduction. An optimizer may call the closure several
    times in a step; each call computes gradients anew, or accumulates onto those of the call before.
    """
    calls = itertools.count()

    def final() -> Any:
        with ExitStack() as stack:
            if next(calls):  # before the first one the script may have computed gradients
                for hooks in optimizer._sources:
                    stack.enter_context(hooks.before_step.later_call())
            loss = closure()
            optimizer._make_final(in_step=True)
        return optimizer._reduce_loss(loss)
    return final


def with_final_closure(args: tuple[Any, ...], kwargs: dict[str, Any],
                       optimizer: Distributed) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of `step`, the optimizer first, with the final closure; None when there is no closure."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    final = final_closure(closure, optimizer)
    return ((args[0], final, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": final})
