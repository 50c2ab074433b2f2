"""Buffers (BatchNorm's running statistics) from one rank: on demand, or before forward passes as DDP does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch.collectives.broadcasts import broadcast_tensors
from hvdlite_torch.uncompiled import leave_module_to_python


def broadcast_buffers(model: torch.nn.Module, root_rank: int = 0, process_set: ProcessSet = global_process_set, *,
                      every_forward: bool = False) -> RemovableHandle | None:
    """Give all ranks rank `root_rank`'s buffers of a model, now; all ranks of the process set call this together.

    Args:
        every_forward: also do it from now on as `DistributedDataParallel(broadcast_buffers=True)` does: before the first
            forward pass, and before each one that follows a forward pass with gradients. All ranks must then make the same
            forward passes of this model (not of its parts). `no_sync()` of an optimizer changes nothing here. Copies and
            pickles of the model broadcast nothing.

    Returns:
        With `every_forward`: a handle, whose `remove()` ends that.

    Raises:
        UnsupportedError: for an unregistered process set.
        MismatchError: on all ranks, when a buffer's shape or dtype differs.
    """
    broadcast = BufferBroadcast(model, root_rank, process_set)
    broadcast()
    if not every_forward:
        return None
    uncompiled: Callable[[], None] = torch.compiler.disable(broadcast)
    is_due = True

    def before_forward() -> None:
        nonlocal is_due
        if is_due:
            uncompiled()
        is_due = torch.is_grad_enabled()
    return model.register_forward_pre_hook(ModuleHook(before_forward))


class ModuleHook:
    """A hook of one module, which calls a function; in copies and pickles of the module it does nothing."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __reduce__(self) -> Any:
        return ModuleHook, (_nothing,)

    def __call__(self, module: torch.nn.Module, argument: Any) -> None:
        self._function()


def _nothing() -> None:
    pass


class BufferBroadcast:
    """Overwrites a model's buffers with one rank's, whenever it is called.

    Buffers that DDP is told to ignore (`_ddp_params_and_buffers_to_ignore`) are left alone.
    """

    _runtime: Runtime | None = None  # of this world

    def __init__(self, model: torch.nn.Module, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
        self._model, self._root, self._process_set = model, root_rank, process_set
        runtime = api.attached_runtime()
        api.follow(self)
        if runtime is not None:
            self._attach(runtime, "torch.buffers")

    def _attach(self, runtime: Runtime, adapter: str) -> None:
        self._process_set_id = api.set_id(self._process_set)
        self._label = runtime.names.label(adapter, self._process_set_id)
        self._runtime = runtime

    def world_ended(self) -> None:
        """Let go of the runtime."""
        self._runtime = None

    def world_began(self, runtime: Runtime) -> None:
        """Broadcast among the ranks of another world from now on."""
        if self._process_set.process_set_id is not None:
            self._attach(runtime, "torch.buffers.earlier")  # only some ranks may have made it in an earlier world

    def __call__(self) -> None:
        runtime = self._runtime
        if runtime is None:  # this process joins an elastic job, whose buffers it gets with the other state
            return
        ignored = getattr(self._model, "_ddp_params_and_buffers_to_ignore", ())
        buffers = [buffer.detach() for name, buffer in self._model.named_buffers() if name not in ignored]
        members = runtime.members(self._process_set_id)
        if len(members) > 1 and runtime.world.rank in members and buffers:
            name = runtime.names.unnamed(self._label, "buffers", self._process_set_id)
            broadcast_tensors(runtime, buffers, self._root, name, self._process_set_id)


leave_module_to_python(vars())
