"""Checks what always holds of a reducer, after each of the calls in which gradients become final or are used."""

from __future__ import annotations

import functools
from typing import Any

from hvdlite.training.gradients.before_step import BeforeStep
from hvdlite.training.gradients.reducer import Reducer


def watch() -> None:
    """Let every reducer of this process be checked from now on."""
    for owner, name in ((BeforeStep, "make_final"), (BeforeStep, "stepped"), (BeforeStep, "cleared"), (Reducer, "end_pass"),
                        (Reducer, "wait_and_make_due"), (Reducer, "make_round"), (Reducer, "finish")):
        setattr(owner, name, _checked(getattr(owner, name)))


def _checked(method: Any) -> Any:
    @functools.wraps(method)
    def checked(self: Any, *arguments: Any, **keywords: Any) -> Any:
        result = method(self, *arguments, **keywords)
        reducer = self if isinstance(self, Reducer) else self.reducer
        with reducer.lock:  # another thread may be in the middle of a round
            reducer.check_invariants()
        return result
    return checked
