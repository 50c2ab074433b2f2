"""Elastic training: stub."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Stub."""
    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        return func(state, *args, **kwargs)
    return wrapper
