"""Counts steps, and the time of their parts, in scripts whose default process group lives on the job's runtime."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdlite import api
from hvdlite_torch.optimizer import is_distributed
from hvdlite_torch.step_hooks import once_a_step
from hvdlite_torch.step_parts import count_training


def count() -> None:
    """Count in the ledger of the job's runtime from now on, where there is one; again changes nothing else."""
    if api.is_initialized() and not api.is_provisional():
        count_training(api.runtime())
        _count_steps()


@functools.cache
def _count_steps() -> None:
    """Count the outermost steps of all optimizers of this process, but those of hvdlite's own, which count themselves."""
    register_optimizer_step_post_hook(once_a_step(_count_step, of_all=True))


def _count_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    if not is_distributed(optimizer) and api.is_initialized() and not api.is_provisional():
        api.runtime().progress.round()
