"""Counts steps, and the time of their parts, in scripts whose default process group lives on the job's runtime."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvdlite import api
from hvdlite_torch.input_time import count_input
from hvdlite_torch.optimizer import is_distributed
from hvdlite_torch.step_parts import count_parts


class StepCount(threading.local):
    """Counts the outermost `step()`s of optimizers; those of hvdlite's own count themselves."""

    def __init__(self) -> None:
        self._running: list[int] = []  # identities of the optimizers, from the outside

    def enter(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """A step begins."""
        if id(optimizer) in self._running:  # its last step has raised
            del self._running[self._running.index(id(optimizer)):]
        self._running.append(id(optimizer))

    def leave(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """It ends."""
        if id(optimizer) in self._running:
            del self._running[self._running.index(id(optimizer)):]
        if not self._running and not is_distributed(optimizer) and api.is_initialized() and not api.is_provisional():
            api.runtime().progress.round()


_installed: list[StepCount] = []


def count() -> None:
    """Count in the ledger of the job's runtime from now on, where there is one; again changes nothing else."""
    if not api.is_initialized() or api.is_provisional():
        return
    runtime = api.runtime()
    count_input()
    if runtime.config.step_parts:
        count_parts(runtime.progress)
    if not _installed:
        _installed.append(StepCount())
        register_optimizer_step_pre_hook(torch.compiler.disable(_installed[0].enter))
        register_optimizer_step_post_hook(torch.compiler.disable(_installed[0].leave))
