"""Distributed optimizers that live longer than a world: they leave the one that has ended, and take part in the next."""

from __future__ import annotations

from typing import Any

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.runtime.followers import Learner
from hvdlite.runtime.names import Names
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.gradients.unfinal import set_grad

_EARLIER = "torch.earlier"
"""Begins the labels of optimizers that were made before the world."""


class FollowsWorlds(Learner):
    """Mixed into distributed optimizers; see `api.Follower`.

    Between worlds, and in a process that has no world yet, an optimizer is detached: it has its arguments, and nothing of a
    runtime. When a world begins, optimizers attach in order of construction, so they have equal labels on all ranks. These
    are not those of optimizers that are made in that world, because only some ranks may have kept older ones.
    """

    param_groups: list[dict[str, Any]]
    _runtime: Runtime  # missing while the optimizer is detached
    _process_set_given: ProcessSet
    _active = False
    """Whether other ranks take part."""

    @property
    def _is_attached(self) -> bool:
        return "_runtime" in vars(self)

    def world_ended(self) -> None:
        """Leave the world: gradients are cleared, because they may be half reduced, and in memory that goes with it."""
        if not self._is_attached:
            return
        self._detach()
        self._active = False
        del self._runtime
        for group in self.param_groups:
            for parameter in group["params"]:
                set_grad(parameter, None)

    def world_began(self, runtime: Runtime) -> None:
        """Take part in a world with the same arguments as in the last one, and counts that start anew."""
        process_set = self._process_set_given.process_set_id
        if process_set is not None:  # else it may be registered before the next step
            self._attach(runtime, runtime.label(_EARLIER, process_set))

    def next_label(self, names: Names) -> str:
        """Return the label that `world_began` will give."""
        return names.label(_EARLIER) if self._process_set_given is global_process_set else ""

    def _take_part(self) -> None:
        """Attach before gradients are used, if that was not possible before.

        Raises:
            NotInitializedError: in a process without a world.
            UnsupportedError: when the process set is not registered.
        """
        if not self._is_attached:
            self._attach(api.runtime())

    def _attach(self, runtime: Runtime, label: str | None = None) -> None:
        raise NotImplementedError

    def _detach(self) -> None:
        raise NotImplementedError
