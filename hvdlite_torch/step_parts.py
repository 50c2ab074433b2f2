"""The parts of a training step with torch, for `hvdrun --profile`: forward, backward, optimizer; and waits for batches.

torch runs an instance's step hooks in every `step` that it has prepared for hooks: in the `step` of each class of which an
optimizer was created in this process. A class whose `step` calls its base class's runs them twice if a plain optimizer of
the base class was created too, which may be true on some ranks only. `once_a_step` makes hooks that run once.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader
from torch.utils.hooks import RemovableHandle

from hvdlite import api
from hvdlite.diagnostics.progress import Progress
from hvdlite.runtime.runtime import Runtime

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


class StepParts:
    """Counts the time of the thread that trains.

    The forward part is that of outermost modules, also of those that activation checkpointing calls again; the optimizer's
    is that of outermost `step()`s. What lies between a forward part and the next part of the same step (the loss,
    `backward()`, `zero_grad`) is the backward part.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._modules = 0  # depth of calls
        self._begun = self._waited = 0.0
        self._is_forward_over = False

    def follow(self, progress: Progress) -> None:
        """Count in another ledger from now on."""
        self.progress, self._waited, self._is_forward_over = progress, 0.0, False

    def install(self) -> list[RemovableHandle]:
        """Hook every module and every optimizer of the process, from now on."""
        return [module.register_module_forward_pre_hook(self._enter_module),
                module.register_module_forward_hook(self._leave_module, always_call=True),
                register_optimizer_step_pre_hook(once_a_step(self._enter_step, of_all=True)),
                register_optimizer_step_post_hook(once_a_step(self._leave_step, of_all=True))]

    def _elapsed(self) -> float:
        """Return the seconds since the last call, without waits for collectives and for batches."""
        now, waited = time.perf_counter(), self.progress.blocked + self.progress.input
        elapsed = max(0.0, now - self._begun - (waited - self._waited))
        self._begun, self._waited = now, waited
        return elapsed

    def _enter_module(self, called: torch.nn.Module, arguments: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._modules += 1
        if self._modules == 1:
            self._end_backward()

    def _leave_module(self, called: torch.nn.Module, arguments: Any, result: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._modules -= 1
        if not self._modules:
            elapsed = self._elapsed()
            if torch.is_grad_enabled():  # else an evaluation
                self.progress.part("forward", elapsed)
                self._is_forward_over = True

    def _enter_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._end_backward()
            self._is_forward_over = False

    def _leave_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self.progress.part("optimizer", self._elapsed())
            self._is_forward_over = False

    def _end_backward(self) -> None:
        """A module or a step begins: what has come after a forward part was the backward part."""
        elapsed = self._elapsed()
        if self._is_forward_over:
            self.progress.part("backward", elapsed)


@functools.cache
def _installed() -> StepParts:
    """Return what counts in this process; the first call installs its hooks."""
    parts = StepParts(Progress())
    parts.install()
    return parts


def count_training(runtime: Runtime) -> None:
    """Count in a rank's ledger from now on, no more in that of an earlier world: waits for batches, and parts of steps."""
    count_input()
    if runtime.config.step_parts:
        _installed().follow(runtime.progress)


def count_steps() -> None:
    """Count steps and parts of steps in the ledger of the job's runtime, if there is one; for torch's process groups."""
    if api.is_initialized() and not api.is_provisional():
        count_training(api.runtime())
        _count_steps()


@functools.cache
def _count_steps() -> None:
    """Count the outermost steps of all optimizers of this process, except hvdlite's own, which count themselves."""
    from hvdlite_torch.optimizer import is_distributed

    def count_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        if not is_distributed(optimizer) and api.is_initialized() and not api.is_provisional():
            api.runtime().progress.round()
    register_optimizer_step_post_hook(once_a_step(count_step, of_all=True))


def count_input() -> None:
    """Count the time in which any `DataLoader` of this process waits for a batch, from now on; again changes nothing.

    A loader whose data set reads another loader counts once.
    """
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    next_batch = getattr(base, "__next__", None)
    if base is None or next_batch is None or hasattr(next_batch, "counts_for_hvdlite"):
        return  # another torch: then this time is part of what is not known

    loading = threading.local()

    @functools.wraps(next_batch)
    def counted(self: Any) -> Any:
        if getattr(loading, "is_nested", False):
            return next_batch(self)
        loading.is_nested = True
        begun, cpu = time.perf_counter(), time.thread_time()
        try:
            return next_batch(self)
        finally:
            loading.is_nested = False
            if api.is_initialized() and not api.is_provisional():
                api.runtime().progress.loaded(time.perf_counter() - begun, time.thread_time() - cpu)

    counted.counts_for_hvdlite = True  # type: ignore[attr-defined]
    base.__next__ = counted
