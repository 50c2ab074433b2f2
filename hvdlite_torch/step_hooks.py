"""Hooks around an optimizer's `step` that run once per step.

torch runs an instance's hooks in every `step` that it has prepared for hooks: in the `step` of each class of which an
optimizer was created in this process. A class whose `step` calls its base class's runs them twice if a plain optimizer of
the base class was created too, which may be true on some ranks only.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_HOOKED_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The code that runs hooks around a `step`."""


def once_a_step(hook: Callable[..., Any], *, of_all: bool = False) -> Callable[..., Any]:
    """Return a step hook that does nothing in nested steps, and that compiled steps call too.

    Args:
        of_all: whether a step counts as nested in the step of another optimizer, too, and not only in one of its own.
    """
    @functools.wraps(hook)
    def hook_of_the_outermost(optimizer: torch.optim.Optimizer, *arguments: Any) -> Any:
        return hook(optimizer, *arguments) if _step_depth(None if of_all else optimizer) <= 1 else None
    outermost: Callable[..., Any] = torch.compiler.disable(hook_of_the_outermost)
    return outermost


def _step_depth(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the number of nested steps of this optimizer, or of all, that run hooks; a compiled one does not count."""
    depth, frame = 0, sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _HOOKED_STEP and (optimizer is None or frame.f_locals.get("self") is optimizer)
        frame: FrameType | None = frame.f_back  # type: ignore[no-redef]
    return depth
