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
from hvdlite.training.gradients.before_step import BeforeStep
from hvdlite.training.gradients.reducer import Reducer
from hvdlite.training.gradients.round import WaitIn
from hvdlite.training.outer.settings import DiLoCo
from hvdlite_torch.arrays import cuda
from hvdlite_torch.comm_hooks.exchange import CommHook, Exchange
from hvdlite_torch.comm_hooks.hook_bucket import HookBucket
from hvdlite_torch.compression import Compressor
from hvdlite_torch.gradients.hooks import Hooks
from hvdlite_torch.gradients.torch_gradients import TorchGradients
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
        exchange: the hook's collectives; a hook identifies its optimizer by it, so it outlives worlds.
        unseen_sparse_dims: see `TorchGradients`.
        outer: see `optimizer.outer`.
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
    outer: DiLoCo | None = None
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
        make_bucket = None
        if self.comm_hook is not None:
            self.exchange.attach(runtime, f"{label}.hook", process_set_id)
            make_bucket = functools.partial(HookBucket, self.comm_hook, self.exchange)
        framework = gradients_of(runtime, self.compression, self.sparse_as_dense, list(self.names), self.unseen_sparse_dims)
        reducer: Reducer[torch.Tensor] = Reducer(
            runtime, framework, label, op=self.op, prescale=self.prescale, postscale=self.postscale,
            passes=self.passes, process_set=process_set_id, wait_in=self.wait_in or WaitIn(runtime.config.wait_in),
            make_bucket=make_bucket, is_idempotent=self.op is ReduceOp.AVERAGE and (
                self.comm_hook is None or getattr(self.comm_hook, "is_idempotent", False)))
        return Hooks(reducer, BeforeStep(reducer))

    def detach(self) -> None:
        """The world has ended."""
        if self.comm_hook is not None:
            self.exchange.detach()


def gradients_of(runtime: Runtime, compression: type[Compressor], sparse_as_dense: bool,
                 parameters: Iterable[torch.Tensor], unseen_sparse_dims: int = 0) -> TorchGradients:
    """Return what handles the gradients of parameters, wherever these are.

    Args:
        unseen_sparse_dims: see `TorchGradients`.
    """
    gradients = TorchGradients(compression, sparse_as_dense, runtime.config.gradient_as_bucket_view, runtime.devices,
                               unseen_sparse_dims)
    if any(map(cuda.is_on_gpu, parameters)):
        gradients.use_plane()
    return gradients


def chosen_wait(wait_in: str | None) -> WaitIn | None:
    """Return where the results are waited for; None for the knob's value.

    Raises:
        ValueError: for something else.
    """
    try:
        return None if wait_in is None else WaitIn(wait_in)
    except ValueError:
        raise ValueError(f"wait_in must be \"backward\" or \"step\", not {wait_in!r}") from None
