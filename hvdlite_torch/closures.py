"""`optimizer.step(closure)`: gradients are final when the closure returns, on every rank and after every call of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlite_torch.optimizer import Distributed

Closure = Callable[[], Any]


class FinalClosure:
    """A closure for one step, after which the gradients that it computed are final.

    A rank whose closure has no `backward()` takes part in the others' reduction. An optimizer may call the closure several
    times in a step; each call computes gradients anew, or accumulates onto those of the call before.
    """

    def __init__(self, closure: Closure, optimizer: Distributed) -> None:
        self._closure, self._optimizer = closure, optimizer
        self._was_called = False

    def __call__(self) -> Any:
        """Call the closure."""
        is_later, self._was_called = self._was_called, True
        with self._optimizer._later_call() if is_later else nullcontext():
            loss = self._closure()
            self._optimizer._make_final(in_step=True)
        return self._optimizer._reduce_loss(loss)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure among the arguments of `step`, the optimizer first; None when there is none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `step` with another closure."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})
