"""`DistributedOptimizer`: what it takes, and which class it makes the user's optimizer one of."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.arguments import (
    WRAPPED,
    check_compression,
    check_passes,
    chosen_groups,
    factors,
    group_ids,
)
from hvdlite.training.outer.settings import DiLoCo, check_outer
from hvdlite_torch.comm_hooks.exchange import CommHook, check_hook
from hvdlite_torch.compression import Compression, Compressor
from hvdlite_torch.optimizer.adasum import DistributedAdasum, check_whole_job
from hvdlite_torch.optimizer.base import DistributedBase, is_distributed
from hvdlite_torch.optimizer.distributed import Distributed, numbered
from hvdlite_torch.optimizer.outer import WithOuter
from hvdlite_torch.optimizer.reduction import ReductionSettings, chosen_wait
from hvdlite_torch.optimizer.sharded import Sharded, check_sharded


class WrappedOptimizer(Sharded, WithOuter, torch.optim.Optimizer, Any if TYPE_CHECKING else object):  # type: ignore[misc]
    """For type checkers: the class of wrapped optimizers, with the methods of all kinds, and of the user's class (`Any`)."""


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    comm_hook: CommHook | None = None,
    wait_in: str | None = None,
    sharded: bool = False,
    outer: DiLoCo | None = None,
) -> WrappedOptimizer:
    """Make `optimizer` average its gradients over all ranks; returns the same object.

    Each gradient is handed over by a hook as soon as it is accumulated, so communication overlaps `backward()`. When the
    (outermost) `backward()` returns, gradients are final: you can clip, unscale and read them. With
    `wait_in="step"` they are final in `step()`, after `synchronize()`, or when one is read from Python, whichever comes
    first. A parameter without a gradient on some ranks counts as zeros there; without one on all ranks it keeps None. A
    parameter that is frozen when the optimizer is wrapped is reduced from the step in which it is trainable on all ranks.
    The optimizer keeps its class name, `isinstance`, state, defaults, hooks and schedulers. Copies and pickles are plain.

    Several `backward()` calls before a step work when all ranks make the same number of them, over the same parameters:
    each one is reduced, and gradients add up. It is cheaper to sum the losses, to use `backward_passes_per_step`, or
    `optimizer.no_sync()` for all but the last. For other ops than Average, and
    with communication hooks that are not exact, one of these is needed: a second pass onto reduced gradients is an error.

    Gradients that a script sets itself (`p.grad = ...`, by `torch.autograd.grad` or torch.func, of float32 copies) are
    reduced in `step()` or `synchronize()`, on all ranks. So are those with which it replaces reduced ones; what it changes
    in place after the reduction (clipping) stays as it is.

    `step(closure)`: gradients are final when the closure returns, also on a rank whose closure had no `backward()`. For
    `torch.optim.LBFGS`, which decides by the losses how often it calls the closure, losses are reduced like gradients. For
    other optimizers that do, return `hvd.allreduce(loss)` from the closure.

    Args:
        optimizer: an optimizer of torch, or of a subclass.
        named_parameters: names for messages and matching; `model.named_parameters()`. Default: numbered.
        compression: `Compression.none`, `.fp16` or `.bf16`: dtype on the wire for float32 and float64 gradients.
        backward_passes_per_step: gradients accumulated (summed) locally before each reduction.
        op: Average, Sum, Product, Min, Max or Adasum (of the changes of the ranks' steps, see `optimizer.adasum`).
        gradient_predivide_factor: for Average: divide by this before the sum and by size/this after it, against overflow.
        num_groups: deprecated; use `groups`.
        groups: gradients that are reduced together: a number of groups, or a list of lists of parameters.
        sparse_as_dense: densify sparse gradients, instead of gathering their rows. Gathered ones are gathered again when
            backward passes accumulate.
        process_set: the ranks that share gradients; on other ranks the optimizer trains alone.
        comm_hook: a communication hook, see `comm_hooks`; with op=Average and no other argument that changes what
            travels.
        wait_in: "backward" or "step", Horovod's contract: where ranks wait for the reduced gradients, the same on all ranks:
            they make different numbers of reductions where passes compute different gradients. Default: the knob
            `HVDLITE_WAIT_IN`, "backward" (`hvdrun --horovod-compat` and `hvdlite.horovod_compat` make it "step").
        sharded: whether each rank has the optimizer state of some parameters only, which it updates for all ranks.
        outer: `hvd.DiLoCo(...)` or `hvd.LocalSGD(...)`: gradients are averaged among the ranks of a host only, and hosts
            exchange changes of the parameters every few steps (docs/slow-links.md).

    Raises:
        ValueError: for invalid arguments, and an optimizer that is wrapped already; parameters without a name or with the
            same name are listed.
        UnsupportedError: for an unregistered process set, and parameters that are `DTensor`s.
        NotImplementedError: for Adasum on some of the ranks.
        NotInitializedError: before `init()`.
    """
    made = wrap_optimizer(optimizer, named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor,
                          num_groups, groups, sparse_as_dense, process_set, comm_hook, wait_in, sharded, outer,
                          runtime=api.attached_runtime())
    api.follow(made)
    return made


def wrap_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    comm_hook: CommHook | None = None,
    wait_in: str | None = None,
    sharded: bool = False,
    outer: DiLoCo | None = None,
    *,
    runtime: Runtime | None,
    label: str | None = None,
    kind: type[DistributedBase] = Distributed,
) -> WrappedOptimizer:
    """Like `DistributedOptimizer`, on one runtime: the optimizer follows its process into no other world.

    Args:
        runtime: that of this world; None where there is none yet.
        label: of the gradient set. Default: numbered.
        kind: the class that is mixed in, unless other arguments decide it.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if is_distributed(optimizer):
        raise ValueError(WRAPPED)
    op = ReduceOp(op)
    groups = chosen_groups(groups, num_groups)
    check_passes(backward_passes_per_step)
    check_compression(compression)
    prescale, postscale = factors(op, gradient_predivide_factor)
    names = _names(optimizer, named_parameters)
    _check_not_sharded(names)
    ids = group_ids(groups, list(names))
    if comm_hook is not None and (op is not ReduceOp.AVERAGE or compression is not Compression.none or groups is not None
                                  or gradient_predivide_factor != 1.0):
        raise ValueError("comm_hook decides itself how gradients are averaged: leave op, compression, groups and "
                         "gradient_predivide_factor at their defaults")
    if comm_hook is not None:
        check_hook(comm_hook)
    waiting = chosen_wait(wait_in)
    if runtime is not None:
        api.set_id(process_set)  # raises before anything is changed
    if sharded:
        check_sharded(optimizer, op)
        kind = Sharded
    if outer is not None:
        check_outer(outer, op, process_set,
                    (comm_hook is not None, "comm_hook decides itself with whom gradients are exchanged"),
                    (sharded, "sharded=True gives parameters to owners on all ranks"),
                    (isinstance(optimizer, torch.optim.SparseAdam), "SparseAdam has sparse gradients"))
        kind = WithOuter
    if op is ReduceOp.ADASUM:
        kind = DistributedAdasum
        if runtime is not None and runtime.world.size > 1:
            check_whole_job(process_set)
    base, made = type(optimizer), cast(DistributedBase, optimizer)
    unseen_sparse_dims = int(isinstance(optimizer, torch.optim.SparseAdam))  # it takes no dense gradients
    made.__class__ = type(base.__name__, (kind, base), {"__module__": base.__module__})
    made._prepare(ReductionSettings(
        names, ids, op, prescale, postscale, compression, backward_passes_per_step, sparse_as_dense, process_set,
        waiting, comm_hook, unseen_sparse_dims, outer))
    if runtime is not None:
        made._attach(runtime, label)
    return cast("WrappedOptimizer", optimizer)


def _check_not_sharded(names: Mapping[torch.Tensor, str]) -> None:
    """Raise `UnsupportedError` for a `DTensor`; whoever has one has imported its module."""
    module = sys.modules.get("torch.distributed.tensor")
    for parameter, name in names.items() if module is not None else ():
        if isinstance(parameter, module.DTensor):
            raise UnsupportedError(
                f"parameter '{name}' is a DTensor (of FSDP2 or tensor parallel), {parameter.placements} over "
                f"{parameter.device_mesh}: torch reduces its gradients itself. Leave the optimizer as it is, name the "
                "backend in torch.distributed.init_process_group('hvdlite'), and give the mesh a dimension for the data")


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None) -> dict[torch.Tensor, str]:
    """Return a unique name for every parameter of the optimizer."""
    parameters = {parameter: numbered(group_index, index) for group_index, group in enumerate(optimizer.param_groups)
                  for index, parameter in enumerate(group["params"])}
    if named is None:
        return parameters
    pairs = list(named) if isinstance(named, Iterable) else [named]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ValueError("named_parameters must be (name, parameter) pairs, such as model.named_parameters()")
    seen: set[str] = set()
    twice = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if twice:
        raise ValueError(f"parameter names must be unique; these occur more than once: {', '.join(twice)}")
    given = {parameter: name for name, parameter in pairs}
    unnamed = [f"group {number}" for parameter, number in parameters.items() if parameter not in given]
    if unnamed:
        raise ValueError(f"{len(unnamed)} of the optimizer's parameters have no name in named_parameters (group.index): "
                         f"{', '.join(name.removeprefix('group noname.') for name in unnamed[:10])}; pass "
                         "model.named_parameters() of the very model whose parameters the optimizer has, or leave it out")
    return {parameter: given[parameter] for parameter in parameters}
