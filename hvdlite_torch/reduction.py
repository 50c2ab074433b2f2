"""The reduction of an optimizer's gradients: settings that outlive a world, from which each world's reducer is made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch

from hvdlite import api
from hvdlite.core.process_set import ProcessSet
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradient_reducer import GradientReducer
from hvdlite.training.hook_round import HookRounds
from hvdlite.training.waiting import WaitIn
from hvdlite_torch import cuda
from hvdlite_torch.compression import Compressor
from hvdlite_torch.cuda_gradients import CudaGradients
from hvdlite_torch.framework import TorchGradients
from hvdlite_torch.gradients.hooks import Hooks
from hvdlite_torch.hook_exchange import CommHook, Exchange, reduce_round
from hvdlite_torch.step_parts import count_training


@dataclasses.dataclass
class ReductionSettings:
    """The arguments of a distributed optimizer.

    Attributes:
        names: of all parameters.
        group_ids: by a parameter's identity; those without one are in no group.
        passes: backward passes whose gradients are accumulated before each reduction.
        process_set: the ranks that take part.
        wait_in: None for the knob's value.
        comm_hook: reduces the gradients instead of an allreduce.
        exchange: the hook's collectives; a hook knows its optimizer by it, so it outlives worlds.
        unseen_sparse_dims: see `TorchGradients`.
    """

    names: dict[torch.Tensor, str]
    group_ids: dict[int, int]
    op: ReduceOp
    prescale: float
    postscale: float
    compression: type[Compressor]
    passes: int
    sparse_as_dense: bool
    process_set: ProcessSet
    wait_in: WaitIn | None
    comm_hook: CommHook | None
    unseen_sparse_dims: int
    exchange: Exchange = dataclasses.field(default_factory=Exchange)

    def make_hooks(self, runtime: Runtime, label: str) -> Hooks:
        """Return the hooks and the reducer of one world, without parameters.

        Args:
            label: equal on all ranks.

        Raises:
            UnsupportedError: when the process set is not registered.
        """
        process_set_id = api.set_id(self.process_set)
        count_training(runtime)
        rounds = None
        if self.comm_hook is not None:
            self.exchange.attach(runtime, f"{label}.hook", process_set_id)
            rounds = HookRounds(functools.partial(reduce_round, self.comm_hook, self.exchange),
                                is_repeatable=getattr(self.comm_hook, "is_repeatable", False))
        make_framework = functools.partial(framework_for, runtime, self.compression, self.sparse_as_dense, list(self.names),
                                           self.unseen_sparse_dims)
        reducer: GradientReducer[torch.Tensor] = GradientReducer(
            runtime, make_framework(), label, op=self.op, prescale=self.prescale, postscale=self.postscale,
            passes=self.passes, process_set=process_set_id, wait_in=self.wait_in or WaitIn(runtime.config.wait_in),
            rounds=rounds)
        reducer.looks_for_own = True
        reducer.gradients.is_idempotent = self.op is ReduceOp.AVERAGE and (
            self.comm_hook is None or getattr(self.comm_hook, "is_idempotent", False))
        hooks = Hooks(reducer)
        hooks.on_moved = make_framework
        return hooks

    def detach(self) -> None:
        """The world has ended."""
        if self.comm_hook is not None:
            self.exchange.detach()


def framework_for(runtime: Runtime, compression: type[Compressor], sparse_as_dense: bool,
                  parameters: Iterable[torch.Tensor], unseen_sparse_dims: int = 0) -> TorchGradients:
    """Return the gradients' keeper: that for GPUs where there is a parameter on one, and a plane for it.

    Args:
        unseen_sparse_dims: see `TorchGradients`.
    """
    devices, as_view = runtime.devices, runtime.config.gradient_as_bucket_view
    if devices is None or not any(map(cuda.is_on_gpu, parameters)) or devices.unavailable_reason():
        framework = TorchGradients(compression, sparse_as_dense, as_view)
    else:
        framework = CudaGradients(compression, sparse_as_dense, as_view, devices)
    framework.unseen_sparse_dims = unseen_sparse_dims
    return framework


def chosen_wait(wait_in: str | None) -> WaitIn | None:
    """Return where the results are waited for; None for the knob's value.

    Raises:
        ValueError: for something else.
    """
    try:
        return None if wait_in is None else WaitIn(wait_in)
    except ValueError:
        raise ValueError(f"wait_in must be \"backward\" or \"step\", not {wait_in!r}") from None
