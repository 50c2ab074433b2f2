"""The objects made in a strategy's scope: modules are remembered, optimizers are distributed, all of them are mirrored.

Rules
- A parameter's gradient is reduced once a backward pass, by the first living optimizer of the scope that has it. Others that
  have it too share that reduction: their `step` waits for it, their `zero_grad` clears it.
- Whatever decides that ranks communicate is the same on all of them: an optimizer is made, a batch or a step is the first
  one after that. A `load_state_dict` may happen on one rank only, so ranks ask each other first: in every step, where the
  question travels together with the gradients, in `run`, and at the beginning of a distributed epoch.
- Modules are known by class and number of construction; what ranks have besides replica 0 stays as it is.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Generic, TypeVar

import torch
from torch.nn.modules.batchnorm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.core.errors import MismatchError
from hvdlite.core.process_set import ProcessSet
from hvdlite_torch.backward import BackwardHooks
from hvdlite_torch.compression import Compressor
from hvdlite_torch.copying import ModuleHook
from hvdlite_torch.foreign_optimizers import refuse_foreign_optimizers
from hvdlite_torch.gradient_weights import GradientWeight
from hvdlite_torch.optimizer import Distributed, DistributedOptimizer, is_distributed
from hvdlite_torch.replica import Replica
from hvdlite_torch.state import load_exactly
from hvdlite_torch.step_hooks import once_a_step
from hvdlite_torch.sync_batch_norm import SyncBatchNorm

Kind = TypeVar("Kind")


class ScopeRegistry:
    """The objects made in one strategy's scope, as long as they live.

    Args:
        learning_rate_factor: learning rates are multiplied by it.
        sync_batch_norm: whether BatchNorm layers become `SyncBatchNorm`.

    Attributes:
        due: whether something is to be mirrored before the next batch or step; the same on all ranks.
        has_loaded: whether something of the scope has loaded a checkpoint on this rank since the last time.
        weight: of this rank's gradients in the current batch.
        is_to_be_mirrored: whether this rank wants everything to be mirrored: something has loaded a checkpoint, or a lazy
            tensor has got its shape, since the last time.
    """

    def __init__(self, replica: Replica, process_set: ProcessSet, *, learning_rate_factor: float, sync_batch_norm: bool,
                 backward_passes_per_step: int, compression: type[Compressor]) -> None:
        self.due = self.has_loaded = False
        self.learning_rate_factor = learning_rate_factor
        self._replica, self._process_set = replica, process_set
        self._sync_batch_norm = sync_batch_norm
        self._passes, self._compression = backward_passes_per_step, compression
        self._modules: _Living[torch.nn.Module] = _Living()
        self._counts: collections.Counter[str] = collections.Counter()
        self._optimizers: _Living[Any] = _Living()
        self._owners = WeakTensorKeyDictionary()  # by parameter: a weak reference to the hooks that hand its gradient over
        self.weight = GradientWeight(replica.runtime)
        self._awaiting: list[Any] = []  # hooks on modules whose parameters are to be weighed, and have no shapes yet
        if replica.size > 1:
            refuse_foreign_optimizers(self)
        self._lazy: list[weakref.ref[torch.Tensor]] = []  # had no shape yet when everything was mirrored last

    @property
    def is_to_be_mirrored(self) -> bool:
        """See above."""
        lazy = (reference() for reference in self._lazy)
        return self.has_loaded or any(tensor is not None and not is_lazy(tensor) for tensor in lazy)

    # --- what is made ------------------------------------------------------------------------------------------------

    def add_module(self, module: torch.nn.Module) -> None:
        """Remember a module, of which only `torch.nn.Module.__init__` is over yet."""
        kind = type(module).__name__
        self._modules.add(f"{kind}{self._counts[kind]}", module)
        self._counts[kind] += 1
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_load_state_dict_post_hook(_Reloaded(self))

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Distribute an optimizer, of which only `torch.optim.Optimizer.__init__` is over yet; its parameters are mirrored.

        Raises:
            MismatchError: on all ranks, when their parameters differ in number, shape or dtype.
        """
        if is_distributed(optimizer):
            return
        self._convert()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        names = self._agreed_names(parameters)
        self.scale(optimizer.param_groups)
        if not any(other.defaults is optimizer.defaults for _, other in self._optimizers.living()):
            self.scale([optimizer.defaults])
        number = self._optimizers.count
        optimizer._registry, optimizer._shared_reducers = self, []  # type: ignore[attr-defined]
        optimizer._answer, optimizer._number = None, number  # type: ignore[attr-defined]
        DistributedOptimizer(optimizer, list(zip(names, parameters, strict=True)), compression=self._compression,
                             backward_passes_per_step=self._passes, process_set=self._process_set,
                             _runtime=self._replica.runtime, _label=f"{self._replica.label}.{number}",
                             _mixin=ScopedOptimizer)
        optimizer.register_step_pre_hook(once_a_step(_before_step))
        optimizer.register_step_post_hook(once_a_step(_after_step))
        self._optimizers.add(f"optimizer{number}", optimizer)
        self._replica.broadcast_tensors([each.detach() for each in parameters if not is_lazy(each)], "parameters")
        self.due = True
        self.weigh_anew()

    def scale(self, groups: Sequence[dict[str, Any]]) -> None:
        """Multiply the learning rates that parameter groups have, unless another optimizer of the scope has them already."""
        if self.learning_rate_factor != 1:
            scaled = {id(group) for _, optimizer in self._optimizers.living() for group in optimizer.param_groups}
            for group in groups:
                if "lr" in group and id(group) not in scaled:
                    group["lr"] = group["lr"] * self.learning_rate_factor

    def owner(self, parameter: torch.Tensor) -> BackwardHooks | None:
        """Return who hands a parameter's gradient over already."""
        reference = self._owners.get(parameter)
        return None if reference is None else reference()

    def paths(self) -> dict[int, str]:
        """Return the paths of the parameters of the scope's modules, by the parameters' identity."""
        paths: dict[int, str] = {}
        walked: set[torch.nn.Module] = set()  # so that no submodule is walked again for each module around it
        for name, module in self._living_modules():
            for prefix, part in module.named_modules(walked, name):
                for attribute, parameter in part._parameters.items():
                    if parameter is not None:
                        paths.setdefault(id(parameter), f"{prefix}.{attribute}")
        return paths

    def own(self, parameter: torch.Tensor, hooks: BackwardHooks) -> None:
        """Note who hands a parameter's gradient over."""
        self._owners[parameter] = weakref.ref(hooks)

    def _agreed_names(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return replica 0's names for an optimizer's parameters."""
        own = list(zip(self._names(parameters), map(_kind, parameters), strict=True))
        everywhere = self._replica.allgather_object(own, "optimizer")
        for number, theirs in enumerate(everywhere):
            first, others = [kind for _, kind in everywhere[0]], [kind for _, kind in theirs]
            if first != others:
                index = next((index for index, (one, other) in enumerate(zip(first, others, strict=False)) if one != other),
                             min(len(first), len(others)))
                told = [f"'{each[index][0]}', {_told(each[index][1])}" if index < len(each) else "no more"
                        for each in (everywhere[0], theirs)]
                raise MismatchError(f"the optimizers that ranks make in the scope differ at parameter {index}: replica 0 "
                                    f"has {told[0]}, replica {number} {told[1]}; all ranks must make the same ones, in the "
                                    "same order")
        return [name for name, _ in everywhere[0]]

    def _names(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """Return parameters' paths in their models, which are made unique where needed."""
        paths: dict[int, tuple[str, str]] = {}
        for name, module in self._living_modules():
            for path, parameter in module.named_parameters():
                paths.setdefault(id(parameter), (name, path))
        found = [paths.get(id(parameter), ("noname", str(index))) for index, parameter in enumerate(parameters)]
        times = collections.Counter(path for _, path in found)
        return [path if times[path] == 1 and name != "noname" else f"{name}.{path}" for name, path in found]

    # --- mirroring ---------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Find out whether some rank has loaded a checkpoint; all ranks call this together."""
        if not self.due:
            self.due = self._replica.ask("loaded", self.is_to_be_mirrored)()

    def ask(self, optimizer: ScopedOptimizer) -> None:
        """Begin asking whether some rank has loaded a checkpoint, once for every step of an optimizer."""
        if optimizer._answer is None:
            optimizer._answer = self._replica.ask(f"loaded.{optimizer._number}", self.is_to_be_mirrored)

    def agree_in_step(self, optimizer: ScopedOptimizer) -> None:
        """Mirror when something is due, or when some rank had loaded a checkpoint before it asked; in every step."""
        self.ask(optimizer)
        answer, optimizer._answer = optimizer._answer, None
        assert answer is not None
        if answer() or self.due:
            self.mirror()

    def mirror_if_due(self) -> None:
        """Mirror what has been made or loaded since the last time, if anything; all ranks call this together."""
        if self.due:
            self.mirror()

    def mirror(self) -> None:
        """Give all parameters, buffers and optimizer state replica 0's values; all ranks call this together.

        Raises:
            MismatchError: on all ranks, when a tensor's shape or dtype differs.
        """
        self._convert()
        if self._replica.size == 1:
            self.due = self.has_loaded = False
            return
        self._mirror_tensors()
        self.due = self.has_loaded = False  # not before what raises on all ranks
        known = dict(self._optimizers.living())
        for name in self._replica.broadcast_object(list(known), "optimizers"):
            optimizer = known.get(name)
            state = self._replica.broadcast_structure(None if optimizer is None else optimizer.state_dict(), "state")
            if optimizer is not None and self._replica.number > 0:
                _take(optimizer, state)

    def _mirror_tensors(self) -> None:
        """Send the tensors that replica 0 knows; elsewhere each is looked for under any of the names it has there."""
        own = self._tensors()
        aliases: dict[int, list[str]] = {}
        for name, tensor in own.items():
            aliases.setdefault(id(tensor), []).append(name)
        sent = [own[names[0]].detach() for names in aliases.values() if not is_lazy(own[names[0]])]
        mine = [(names, *_kind(own[names[0]])[:2], own[names[0]].device.type) for names in aliases.values()
                 if not is_lazy(own[names[0]])]
        listed = self._replica.broadcast_object(mine, "mirror")
        targets, taken, problem = [], set(), ""
        for names, shape, dtype, device in listed:
            found = next((own[name] for name in names if name in own and id(own[name]) not in taken), None)
            if found is None:
                targets.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
                continue
            taken.add(id(found))
            targets.append(found.detach())
            if _kind(found)[:2] != (shape, dtype):
                problem = problem or (f"'{names[0]}' is {_told((shape, dtype, True))} on replica 0 and "
                                      f"{_told((*_kind(found)[:2], True))} on replica {self._replica.number}")
        problems = [text for text in self._replica.allgather_object(problem, "problems") if text]
        if problems:
            raise MismatchError(f"{problems[0]}; all ranks must make the same modules in the scope, in the same order")
        self._replica.broadcast_tensors(targets if self._replica.number else sent, "tensors")
        self._lazy = [weakref.ref(tensor) for tensor in own.values() if is_lazy(tensor)]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return what is to be mirrored, by name; a tensor has as many names as there are ways to it."""
        named: dict[str, torch.Tensor] = {}
        for name, optimizer in self._optimizers.living():
            for group, settings in enumerate(optimizer.param_groups):
                named.update((f"{name}.{group}.{index}", each) for index, each in enumerate(settings["params"]))
        modules = list(self._living_modules())
        for name, module in modules:
            for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    named[f"{name}.{attribute}"] = tensor
        for name, module in modules:  # with submodules that were copied or unpickled, so that nothing told of them
            for path, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
                named.setdefault(f"{name}.{path}", tensor)
        return {name: tensor for name, tensor in named.items() if tensor.device.type != "meta"}

    def _living_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return ((name, module) for name, module in self._modules.living() if hasattr(module, "_parameters"))

    def _convert(self) -> None:
        """Make BatchNorm layers synchronise, in place, so that whoever has one keeps it."""
        if not self._sync_batch_norm:
            return
        for _, root in self._living_modules():
            for module in root.modules():
                if type(module) in (BatchNorm1d, BatchNorm2d, BatchNorm3d, torch.nn.SyncBatchNorm):
                    module.__class__ = SyncBatchNorm
                    module.process_set = self._process_set  # type: ignore[assignment]

    # --- weights -----------------------------------------------------------------------------------------------------

    def weigh(self, weight: float) -> None:
        """Multiply gradients by `weight` from now on, before they are accumulated; nothing is done to them when it is 1.

        What `torch.autograd.grad` returns is not multiplied: it accumulates nothing. Gradients that a script sets itself
        are, before they are reduced.
        """
        if weight != self.weight.value:
            self.weight.value = weight
            self.weigh_anew()

    def weigh_anew(self) -> None:
        """Let the weight be that of all parameters there are: frozen ones may be trained, lazy ones get shapes."""
        optimizers = [optimizer for _, optimizer in self._optimizers.living()]
        for optimizer in optimizers:
            optimizer._hooks.own_weight = self.weight.value
        for hook in self._awaiting:
            hook.remove()
        self._awaiting = []
        parameters = {id(parameter): parameter for optimizer in optimizers
                      for group in optimizer.param_groups for parameter in group["params"]}
        self.weight.apply_to(parameters.values())
        lazy = {key for key, parameter in parameters.items() if self.weight.value != 1 and is_lazy(parameter)}
        if lazy:
            modules = {module for _, root in self._living_modules() for module in root.modules()}
            self._awaiting = [module.register_forward_pre_hook(_Materialized(self)) for module in modules
                              if any(id(parameter) in lazy for parameter in module._parameters.values())]


class ScopedOptimizer:
    """Mixed into an optimizer that is made in a scope, before what `DistributedOptimizer` mixes in."""

    _registry: ScopeRegistry
    _shared_reducers: list[BackwardHooks]  # of other optimizers, which reduce gradients for this one
    _answer: Callable[[], bool] | None  # of the ranks that were asked for the next step; see `ScopeRegistry.ask`
    _number: int  # among the optimizers of the scope
    _hooks: BackwardHooks
    _active: bool

    def _watch(self, parameter: torch.Tensor) -> None:
        owner = self._registry.owner(parameter)
        if self._active:
            _ask_in_backward(self, owner or self._hooks)
        if owner is not None and owner is not self._hooks:
            if owner not in self._shared_reducers:
                self._shared_reducers.append(owner)
        elif self._active:
            super()._watch(parameter)  # type: ignore[misc]
            self._registry.own(parameter, self._hooks)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the base class's; the new parameters are mirrored before the next step, and reduced. Call it on all ranks."""
        self._registry.scale([param_group])
        self._registry.due = True
        super().add_param_group(param_group)  # type: ignore[misc]
        self._registry.weigh_anew()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Like the base class's, whose arguments it takes; reductions under way are completed first."""
        for hooks in self._shared_reducers:
            hooks.cleared()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _sources(self) -> Sequence[BackwardHooks]:
        return [*super()._sources(), *self._shared_reducers]  # type: ignore[misc]

    def _loss_weight(self) -> float:
        return self._registry.weight.value

    def join(self, *models: torch.nn.Module, **settings: Any) -> AbstractContextManager[Any]:
        """Like the base class's; what is due is mirrored before, because a rank may have no batch and take no step."""
        self._registry.agree()
        self._registry.mirror_if_due()
        joining: AbstractContextManager[Any] = super().join(*models, **settings)  # type: ignore[misc]
        return joining

    def no_sync(self) -> AbstractContextManager[Any]:
        """Accumulate gradients locally; the first backward pass after it reduces the sums."""
        stack = ExitStack()
        stack.enter_context(super().no_sync())  # type: ignore[misc]
        for hooks in self._shared_reducers:
            stack.enter_context(hooks.reducer.suspended())
        return stack

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like the base class's, into the dicts and lists there are; everything is mirrored before the next step."""
        self._registry.has_loaded = True
        for hooks in self._shared_reducers:
            hooks.cleared()
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `load_state_dict` has made; optimizers around this one hold on to its dicts and lists."""
        if state.keys() == {"state", "param_groups"} and "param_groups" in self.__dict__:
            groups, tensors = self.__dict__["param_groups"], self.__dict__["state"]
            for group, loaded in zip(groups, state["param_groups"], strict=True):
                group.clear()
                group.update(loaded)
            tensors.clear()
            tensors.update(state["state"])
            state = {"state": tensors, "param_groups": groups}
        super().__setstate__(state)  # type: ignore[misc]


class _Living(Generic[Kind]):
    """The living objects of a scope, in order, with names.

    Attributes:
        count: of all that were ever made.
    """

    def __init__(self) -> None:
        self.count = 0
        self._entries: dict[int, tuple[str, weakref.ref[Kind]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, value: Kind) -> None:
        """Remember it until it is gone."""
        entries, number = self._entries, self.count
        entries[number] = name, weakref.ref(value, lambda gone: _forget(entries, number))
        self.count += 1

    def living(self) -> Iterator[tuple[str, Kind]]:
        """Return what is alive."""
        for name, reference in list(self._entries.values()):
            value = reference()
            if value is not None:
                yield name, value


def _forget(entries: dict[int, Any], number: int) -> None:
    entries.pop(number, None)


class _Asking:
    """Questions to the other ranks, sent at the beginning of a backward pass, so that the step does not wait for answers.

    Args:
        optimizers: whose gradients are computed in it.
    """

    def __init__(self, optimizers: weakref.WeakSet[ScopedOptimizer]) -> None:
        self.optimizers = optimizers

    def __call__(self) -> bool:
        for optimizer in self.optimizers:
            optimizer._registry.ask(optimizer)
        return True


def _ask_in_backward(optimizer: ScopedOptimizer, hooks: BackwardHooks) -> None:
    if not isinstance(hooks.on_begin, _Asking):
        hooks.on_begin = _Asking(weakref.WeakSet())
    hooks.on_begin.optimizers.add(optimizer)


class _Reloaded(ModuleHook):
    """A hook that reports that a module has loaded a checkpoint; copies of the module do not report."""

    def __init__(self, registry: ScopeRegistry) -> None:
        self._registry = registry  # lives as long as what was made in the scope, which a strategy need not

    def __call__(self, module: torch.nn.Module, keys: Any) -> None:
        self._registry.has_loaded = True


class _Materialized(ModuleHook):
    """Before a lazy module's forward pass, after torch has given its parameters shapes: let them be weighed too."""

    def __init__(self, registry: ScopeRegistry) -> None:
        self._registry = registry

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        self._registry.weigh_anew()


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, ScopedOptimizer) and isinstance(optimizer, Distributed)
    optimizer._registry.agree_in_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert isinstance(optimizer, ScopedOptimizer)
    for hooks in optimizer._shared_reducers:
        hooks.stepped()


def _take(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load replica 0's state dict, without telling anybody."""
    load_exactly(optimizer, state, super(Distributed, optimizer).load_state_dict)  # type: ignore[misc]


def _kind(tensor: torch.Tensor) -> tuple[tuple[int, ...], str, bool]:
    """Return what must be equal on all ranks: shape, dtype, and whether it is trained."""
    return () if is_lazy(tensor) else tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad


def _told(kind: tuple[tuple[int, ...], str, bool]) -> str:
    shape, dtype, is_trained = kind
    return f"{dtype} {list(shape)}{'' if is_trained else ' (frozen)'}"
