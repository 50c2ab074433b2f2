"""The parts of a training step with torch, for `hvdrun --profile`: forward, backward, optimizer; waits are counted apart."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.nn.modules import module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvdlite.diagnostics.progress import Progress


class StepParts:
    """Counts the time of the thread that trains.

    The forward part is that of outermost modules, the optimizer's that of outermost `step()`s; what lies between them (the
    loss, `zero_grad`, `backward()`) is the backward part.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._modules = self._steps = 0  # depths of calls
        self._begun = self._waited = 0.0
        self._is_forward_over = False

    def install(self) -> None:
        """Hook every module and every optimizer of the process, from now on."""
        module.register_module_forward_pre_hook(self._enter_module)
        module.register_module_forward_hook(self._leave_module, always_call=True)
        register_optimizer_step_pre_hook(self._enter_step)
        register_optimizer_step_post_hook(self._leave_step)

    def _elapsed(self) -> float:
        """Return the seconds since the last call, without waits for collectives."""
        now, waited = time.perf_counter(), self.progress.blocked
        elapsed = max(0.0, now - self._begun - (waited - self._waited))
        self._begun, self._waited = now, waited
        return elapsed

    def _enter_module(self, called: torch.nn.Module, arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._modules += 1
            if self._modules == 1:
                self._elapsed()

    def _leave_module(self, called: torch.nn.Module, arguments: Any, result: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._modules -= 1
            if not self._modules and torch.is_grad_enabled():  # else an evaluation
                self.progress.part("forward", self._elapsed())
                self._is_forward_over = True

    def _enter_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self._steps += 1
        if self._steps == 1:
            elapsed = self._elapsed()
            if self._is_forward_over:
                self.progress.part("backward", elapsed)
                self._is_forward_over = False

    def _leave_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self._steps -= 1
        if not self._steps:
            self.progress.part("optimizer", self._elapsed())


_installed: list[StepParts] = []


def count_parts(progress: Progress) -> None:
    """Count the parts of steps in a rank's ledger from now on; those of an earlier world no more."""
    if _installed:
        _installed[0].progress = progress
    else:
        _installed.append(StepParts(progress))
        _installed[0].install()
