"""The objects made in a strategy's scope: modules are remembered, optimizers are distributed, and both are mirrored.

`TorchReplicaGroup` exchanges tensors between the replicas of a strategy.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvdlite.core.errors import MismatchError
from hvdlite.core.process_set import ProcessSet
from hvdlite.core.types import ReduceOp
from hvdlite.training.mirrored.mirroring import MirrorSchedule, TensorKind, agreed_names, matching_tensors
from hvdlite.training.mirrored.replica_group import ReplicaGroup
from hvdlite.training.mirrored.scopes import LivingObjects
from hvdlite_torch.arrays.tensors import as_array, contiguous
from hvdlite_torch.collectives.broadcasts import (
    ModuleHook,
    broadcast_structure,
    broadcast_tensors,
    gather_tensors,
    load_exactly,
)
from hvdlite_torch.compression import Compressor
from hvdlite_torch.gradients.owners import owners
from hvdlite_torch.gradients.weights import GradientWeight
from hvdlite_torch.mirrored.scoped_optimizer import ScopedOptimizer
from hvdlite_torch.optimizer import Distributed, is_distributed
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer
from hvdlite_torch.sync_batch_norm import SyncBatchNorm


class TorchReplicaGroup(ReplicaGroup):
    """A group of replicas with collectives on torch tensors; alone, all of them do nothing."""

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], kind: str) -> None:
        """Overwrite tensors with replica 0's."""
        if self.size > 1:
            broadcast_tensors(self.runtime, tensors, self.root, self.name(kind), self.process_set)

    def broadcast_structure(self, value: Any, kind: str) -> Any:
        """Return replica 0's structure of dicts, lists, tuples, tensors and objects."""
        if self.size == 1:
            return value
        return broadcast_structure(self.runtime, value, self.root, self.name(kind), self.process_set)

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Return the reduction of a tensor, which is moved through host memory; not differentiable."""
        result = contiguous(tensor.detach().cpu(), "reduce").clone()
        if self.size > 1:
            name = self.name("reduce")
            array = as_array(result, name)
            self.runtime.allreduce(name, array, array, op, process_set=self.process_set, blocking=True).wait()
        return result.to(tensor.device)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every replica's tensor; shapes may differ along the first dimension. Not differentiable.

        Raises:
            MismatchError: on all ranks, when something else differs.
        """
        if self.size == 1:
            return [tensor.detach().clone()]
        parts = gather_tensors(self.runtime, tensor, self.name("gather"), self.process_set)
        kinds = [(tuple(part.shape), str(part.dtype).removeprefix("torch.")) for part in parts]
        for replica_id, (shape, dtype) in enumerate(kinds):
            if (shape[1:], len(shape), dtype) != (kinds[0][0][1:], len(kinds[0][0]), kinds[0][1]):
                raise MismatchError(f"gather: shapes must be equal but for the axis: replica 0 has {kinds[0][1]} "
                                    f"{kinds[0][0]}, replica {replica_id} {dtype} {shape}")
        return parts


class ScopeRegistry:
    """The objects made in one strategy's scope, as long as they live.

    Args:
        learning_rate_factor: a factor on learning rates.
        sync_batch_norm: whether BatchNorm layers become `SyncBatchNorm`.

    Attributes:
        schedule: decides when everything is mirrored.
        weight: weights this rank's gradients in the current batch.
    """

    def __init__(self, replicas: TorchReplicaGroup, process_set: ProcessSet, *, learning_rate_factor: float,
                 sync_batch_norm: bool, backward_passes_per_step: int, compression: type[Compressor]) -> None:
        lazy: list[weakref.ref[torch.Tensor]] = []
        self._lazy = lazy  # without a shape when everything was mirrored last
        self.schedule = MirrorSchedule(replicas, lambda: any(
            tensor is not None and not is_lazy(tensor) for tensor in (reference() for reference in lazy)))
        self.learning_rate_factor = learning_rate_factor
        self._replicas = replicas
        self._process_set = process_set
        self._sync_batch_norm = sync_batch_norm
        self._passes = backward_passes_per_step
        self._compression = compression
        self._modules: LivingObjects[torch.nn.Module] = LivingObjects()
        self._counts: collections.Counter[str] = collections.Counter()  # of modules, by the names of their classes
        self._optimizers: LivingObjects[Any] = LivingObjects()
        self.weight = GradientWeight(replicas.runtime)
        self._awaiting: list[Any] = []  # hooks on modules with lazy parameters, while there is a weight
        if replicas.size > 1:
            refuse_foreign_optimizers(self)

    # --- what is made ------------------------------------------------------------------------------------------------

    def add_module(self, module: torch.nn.Module) -> None:
        """Remember a module; only `torch.nn.Module.__init__` has run, the subclass may not be initialized."""
        kind = type(module).__name__
        self._modules.add(f"{kind}{self._counts[kind]}", module)
        self._counts[kind] += 1
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_load_state_dict_post_hook(ModuleHook(self._note_loaded))

    def _note_loaded(self) -> None:
        """A module has loaded a checkpoint; its hook keeps the registry alive, also without the strategy."""
        self.schedule.has_loaded = True

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Distribute an optimizer and mirror its parameters; only `torch.optim.Optimizer.__init__` has run.

        Raises:
            MismatchError: on all ranks, when their parameters differ in number, shape or dtype.
        """
        if is_distributed(optimizer):
            return
        self._convert()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        described = list(zip(self._names(parameters), map(_kind, parameters), strict=True))
        names = agreed_names(self._replicas, described)
        self.scale(optimizer.param_groups)
        if not any(other.defaults is optimizer.defaults for _, other in self._optimizers):
            self.scale([optimizer.defaults])
        optimizer_id = self._optimizers.count
        optimizer._scope, optimizer._optimizer_id = self, optimizer_id  # type: ignore[attr-defined]
        wrap_optimizer(optimizer, list(zip(names, parameters, strict=True)), self._compression, self._passes,
                       process_set=self._process_set, runtime=self._replicas.runtime,
                       label=f"{self._replicas.label}.{optimizer_id}", kind=ScopedOptimizer)
        self._optimizers.add(f"optimizer{optimizer_id}", optimizer)
        self._replicas.broadcast_tensors([each.detach() for each in parameters if not is_lazy(each)], "parameters")
        self.schedule.due = True
        self.apply_weight()

    def scale(self, groups: Sequence[dict[str, Any]]) -> None:
        """Multiply the learning rates of parameter groups, except groups that another optimizer of the scope has already."""
        if self.learning_rate_factor != 1:
            scaled = {id(group) for _, optimizer in self._optimizers for group in optimizer.param_groups}
            for group in groups:
                if "lr" in group and id(group) not in scaled:
                    group["lr"] = group["lr"] * self.learning_rate_factor

    def paths(self) -> dict[int, str]:
        """Return the paths of the parameters of the scope's modules, by the parameters' identity."""
        paths: dict[int, str] = {}
        walked: set[torch.nn.Module] = set()  # walk each submodule once, not once for each module around it
        for name, module in self._living_modules():
            for prefix, part in module.named_modules(walked, name):
                for attribute, parameter in part._parameters.items():
                    if parameter is not None:
                        paths.setdefault(id(parameter), f"{prefix}.{attribute}")
        return paths

    def _names(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return unique names for parameters: their paths in their models, with a prefix where needed."""
        paths: dict[int, tuple[str, str]] = {}
        for name, module in self._living_modules():
            for path, parameter in module.named_parameters():
                paths.setdefault(id(parameter), (name, path))
        found = [paths.get(id(parameter), ("noname", str(index))) for index, parameter in enumerate(parameters)]
        times = collections.Counter(path for _, path in found)
        return [path if times[path] == 1 and name != "noname" else f"{name}.{path}" for name, path in found]

    # --- mirroring ---------------------------------------------------------------------------------------------------

    def mirror_if_due(self) -> None:
        """Mirror what has been made or loaded since the last time, if anything; all ranks call this together."""
        if self.schedule.due:
            self.mirror()

    def mirror(self) -> None:
        """Give all parameters, buffers and optimizer state replica 0's values; all ranks call this together.

        Raises:
            MismatchError: on all ranks, when a tensor's shape or dtype differs.
        """
        self._convert()
        if self._replicas.size > 1:
            self._mirror_tensors()
        self.schedule.done()  # not if the matching has raised, on all ranks
        if self._replicas.size > 1:
            self._mirror_optimizers()

    def _mirror_tensors(self) -> None:
        named = self._tensors()
        tensors = matching_tensors(self._replicas, named, _kind, _make)
        # `data`: a graph that is under way stays valid, whichever way a tensor lies in memory.
        self._replicas.broadcast_tensors([tensor.data for tensor in tensors], "tensors")
        self._lazy[:] = [weakref.ref(tensor) for tensor in named.values() if is_lazy(tensor)]

    def _mirror_optimizers(self) -> None:
        known = dict(self._optimizers)
        for name in self._replicas.broadcast_object(list(known), "optimizers"):
            optimizer = known.get(name)
            state = self._replicas.broadcast_structure(None if optimizer is None else optimizer.state_dict(), "state")
            if optimizer is not None and self._replicas.replica_id > 0:
                # Not the optimizer's own `load_state_dict`, which is a reason to mirror again.
                load_exactly(optimizer, state, super(Distributed, optimizer).load_state_dict)  # type: ignore[misc]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors to mirror by name; a tensor has a name for each path to it."""
        named: dict[str, torch.Tensor] = {}
        for name, optimizer in self._optimizers:
            for group, settings in enumerate(optimizer.param_groups):
                named.update((f"{name}.{group}.{index}", each) for index, each in enumerate(settings["params"]))
        modules = list(self._living_modules())
        for name, module in modules:
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    named[f"{name}.{attribute}"] = tensor
        for name, module in modules:  # includes submodules that were copied or unpickled: their `__init__` did not run
            for path, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                named.setdefault(f"{name}.{path}", tensor)
        return {name: tensor for name, tensor in named.items() if tensor.device.type != "meta"}

    def _living_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((name, module) for name, module in self._modules if hasattr(module, "_parameters"))

    def _convert(self) -> None:
        """Convert BatchNorm layers to `SyncBatchNorm` in place, so that references to them stay valid."""
        if not self._sync_batch_norm:
            return
        for _, root in self._living_modules():
            for module in root.modules():
                if type(module) in (BatchNorm1d, BatchNorm2d, BatchNorm3d, torch.nn.SyncBatchNorm):
                    module.__class__ = SyncBatchNorm
                    module.process_set = self._process_set  # type: ignore[assignment]

    # --- weights -----------------------------------------------------------------------------------------------------

    def set_weight(self, weight: float) -> None:
        """Multiply gradients by `weight` from now on, before they are accumulated.

        Gradients that `torch.autograd.grad` returns are not multiplied, because they are not accumulated. Gradients that a
        script sets itself are multiplied before they are reduced.
        """
        if weight != self.weight.value or self.weight.is_outdated:
            self.apply_weight(weight)

    def apply_weight(self, weight: float | None = None) -> None:
        """Apply the weight to all parameters that there are now, including frozen ones; to lazy ones with their shapes.

        Args:
            weight: a new one.
        """
        weight = self.weight.value if weight is None else weight
        optimizers = [optimizer for _, optimizer in self._optimizers]
        for hook in self._awaiting:
            hook.remove()
        self._awaiting = []
        parameters = {id(parameter): parameter for optimizer in optimizers
                      for group in optimizer.param_groups for parameter in group["params"]}
        self.weight.set(weight, parameters.values())
        for optimizer in optimizers:
            optimizer._hooks.weight = self.weight
        lazy = {key for key, parameter in parameters.items() if weight != 1 and is_lazy(parameter)}
        if lazy:
            modules = {module for _, root in self._living_modules() for module in root.modules()}
            # torch's own hook, which gives the parameters their shapes, comes first.
            self._awaiting = [module.register_forward_pre_hook(ModuleHook(self.apply_weight)) for module in modules
                              if any(id(parameter) in lazy for parameter in module._parameters.values())]


def refuse_foreign_optimizers(registry: ScopeRegistry) -> None:
    """Make steps of optimizers raise `RuntimeError` that were made outside of the scope for a module that was made in it.

    That ends with the registry.

    Parameters that a distributed optimizer also has, of the scope or not, are allowed: their gradients are reduced.
    """
    handle = register_optimizer_step_pre_hook(torch.compiler.disable(_ForeignOptimizers(registry)))
    weakref.finalize(registry, handle.remove).atexit = False


class _ForeignOptimizers:
    """A hook on the steps of all optimizers of the process, also those of other threads.

    It examines each optimizer once, and again when the optimizer gets new parameters or when hooks that reduced gradients
    of its parameters are removed.
    """

    def __init__(self, registry: ScopeRegistry) -> None:
        self._registry = weakref.ref(registry)
        # By optimizer that was examined: the number of its parameters, and the hooks that reduce gradients of some.
        self._examined: weakref.WeakKeyDictionary[Any, tuple[int, set[weakref.ref[Any]]]] = weakref.WeakKeyDictionary()

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        registry = self._registry()
        if is_distributed(optimizer) or registry is None:
            return
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        examined, owners_then = self._examined.get(optimizer, (-1, set()))
        if examined == count and all(owner() is not None for owner in owners_then):
            return
        paths = registry.paths()
        reducing: set[weakref.ref[Any]] = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in paths or not (parameter.is_floating_point() or parameter.is_complex()):
                    continue  # one of integers has no gradient
                reduced_by = owners(parameter)
                if not reduced_by:
                    raise RuntimeError(
                        f"{type(optimizer).__name__}, which was made outside of the strategy's scope, trains "
                        f"'{paths[id(parameter)]}', which was made inside it: its gradients are not averaged, so the "
                        "replicas would differ. Make the optimizer inside `with strategy.scope():` too, or wrap it with "
                        "hvd.DistributedOptimizer")
                reducing.add(weakref.ref(reduced_by[0]))
        self._examined[optimizer] = count, reducing


def _kind(tensor: torch.Tensor) -> TensorKind:
    return TensorKind(None if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."),
                      tensor.requires_grad, tensor.device.type)


def _make(kind: TensorKind) -> torch.Tensor:
    return torch.empty(kind.shape, dtype=getattr(torch, kind.dtype), device=kind.device)
