"""`optimizer.step(closure)`: gradients are final when the closure returns, on every rank and after every call of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Closure = Callable[[], Any]


class FinalClosure:
    """A closure for one step, after which the gradients that it computed are final.

    A rank whose closure has no `backward()` takes part in the others' reduction. An optimizer may call the closure several
    times in a step; each call computes gradients anew.

    Args:
        expect_gradients: called before each call but the first, before which the script may have computed them itself.
        make_final: called after each call.
        reduce_loss: makes what the closure returned the same on all ranks, for optimizers that decide by it how to go on.
    """

    def __init__(self, closure: Closure, expect_gradients: Callable[[], None], make_final: Callable[[], None],
                 reduce_loss: Callable[[Any], Any]) -> None:
        self._closure, self._expect_gradients, self._make_final = closure, expect_gradients, make_final
        self._reduce_loss = reduce_loss
        self._was_called = False

    def __call__(self) -> Any:
        """Call the closure."""
        if self._was_called:
            self._expect_gradients()
        self._was_called = True
        loss = self._closure()
        self._make_final()
        return self._reduce_loss(loss)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure among the arguments of `step`, the optimizer first; None when there is none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `step` with another closure."""
    return ((args[0], closure, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": closure})
