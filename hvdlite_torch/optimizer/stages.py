"""The steps of distributed optimizers: stages before and after the step of the user's class, in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from hvdlite.training.replicas import check_replicas
from hvdlite_torch.arrays.tensors import on_host
from hvdlite_torch.copying import PlainCopies
from hvdlite_torch.optimizer.follows_worlds import FollowsWorlds
from hvdlite_torch.optimizer.uneven_inputs import UnevenInputs
from hvdlite_torch.step_hooks import once_a_step

Stage = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A method that gets the arguments of `step`, the optimizer first. A stage before the step may return others."""


class StagedSteps(FollowsWorlds, PlainCopies, UnevenInputs):
    """Mixed into the user's optimizer class: what all distributed optimizers have in common.

    Stages are hooks around the base class's `step`, so any way to call it works (schedulers replace it on the instance).
    """

    _stages_before: tuple[Stage, ...]
    _stages_after: tuple[Stage, ...]
    _parameter_names: dict[torch.Tensor, str]
    _check_name: str  # of comparisons of the replicas
    _steps: int  # in this world

    def _stage_steps(self, *, first: bool) -> None:
        """Let steps have stages from now on.

        Args:
            first: whether they come before the hooks that the optimizer has already, and not after them.
        """
        assert isinstance(self, torch.optim.Optimizer)
        for hooks, register, hook in ((self._optimizer_step_pre_hooks, self.register_step_pre_hook, _before_step),
                                      (self._optimizer_step_post_hooks, self.register_step_post_hook, _after_step)):
            handle = register(once_a_step(hook))
            if first:
                hooks.move_to_end(handle.id, last=False)  # type: ignore[union-attr]

    def _join_world(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._take_part()

    def _check_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the parameters of all ranks, in as many steps as the user wants."""
        if not self._active:
            return
        self._steps += 1
        every = self._runtime.config.replica_check_steps
        if every and self._steps % every == 0:
            parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
            named = [(name := self._parameter_names.get(parameter, f"noname.{index}"), on_host(parameter, name))
                     for index, parameter in enumerate(parameters)]
            check_replicas(self._runtime, named, self._check_name, self._process_set)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    assert isinstance(optimizer, StagedSteps)
    for stage in optimizer._stages_before:
        args, kwargs = stage(optimizer, args, kwargs) or (args, kwargs)
    return args, kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, StagedSteps)
    for stage in optimizer._stages_after:
        stage(optimizer, args, kwargs)
