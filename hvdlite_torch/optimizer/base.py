"""What all distributed optimizers have in common: their steps, the worlds they take part in, copies, and uneven inputs."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from hvdlite import api, boundaries
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID, global_process_set
from hvdlite.runtime.followers import Learner
from hvdlite.runtime.names import Names
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.replicas import VALUES, FirstComparison, check_replicas
from hvdlite_torch.arrays.tensors import few_values, on_host
from hvdlite_torch.collectives.broadcasts import take_over
from hvdlite_torch.gradients.unfinal import set_grad
from hvdlite_torch.mistakes import count_steps, warn_of_ddp
from hvdlite_torch.optimizer.reduction import ReductionSettings
from hvdlite_torch.step_parts import once_a_step

_EARLIER = "torch.earlier"
"""Begins the labels of optimizers that were made before the world."""
Stage = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A method that gets the arguments of `step`, the optimizer first. A stage before the step may return others."""


@dataclasses.dataclass
class Joined:
    """The value that `with optimizer.join() as joined` binds.

    Attributes:
        last_rank: the rank that ran out of batches last, when the block is over. `broadcast_parameters(tensors, last_rank)`
            brings other tensors up to date.
    """

    last_rank: int | None = None


class DistributedBase(Learner):
    """Mixed into the class of the user's optimizer; see `api.Follower`.

    Steps have *stages*: hooks around the base class's `step`, so any way to call it works (schedulers replace it on the
    instance).

    Between worlds, and in a process that has no world yet, an optimizer is detached: it has its arguments, and nothing of a
    runtime. When a world begins, optimizers attach in order of construction, so they have equal labels on all ranks. These
    are not those of optimizers that are made in that world, because only some ranks may have kept older ones.

    Copies (`copy.deepcopy`, `copy.copy`, pickles, `torch.save`) are plain optimizers of the base class, with the same
    settings and state, and do not communicate. Why: docs/decisions/0032.
    """

    param_groups: list[dict[str, Any]]
    _runtime: Runtime  # missing while the optimizer is detached
    _settings: ReductionSettings
    _process_set: int  # its id in this world
    _active = False
    """Whether other ranks take part."""
    _stages_before: tuple[Stage, ...]
    _stages_after: tuple[Stage, ...]
    _goes_first = False, False
    """Whether the stages before the step, and those after it, come ahead of the hooks that the optimizer has already."""
    _check_name: str  # of comparisons of the replicas
    _steps: int  # in this world
    _comparison: FirstComparison | None = None  # until it has an answer

    # --- steps ---------------------------------------------------------------------------------------------------------

    def _prepare(self, settings: ReductionSettings) -> None:
        """Become a distributed optimizer, whose steps have stages; it takes part in no world yet."""
        assert isinstance(self, torch.optim.Optimizer)
        self._settings = settings
        first = next(iter(settings.names.values()), "")
        self._counted = count_steps(f"{type(self).__name__} (of {len(settings.names)} parameters, first '{first}')")
        for hooks, register, hook, goes_first in (
                (self._optimizer_step_pre_hooks, self.register_step_pre_hook, _before_step, self._goes_first[0]),
                (self._optimizer_step_post_hooks, self.register_step_post_hook, _after_step, self._goes_first[1])):
            handle = register(once_a_step(hook))
            if goes_first:
                hooks.move_to_end(handle.id, last=False)  # type: ignore[union-attr]

    def _compare_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A stage: compare a few values of all ranks' parameters before the second step, unless the user wants checks."""
        if self._comparison is not None and self._comparison.report():
            self._comparison = None
        if not self._active or self._steps != 1 or self._runtime.config.replica_check_steps:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # a graph cannot read values
            return
        named = [(self._settings.names.get(parameter, "noname"), parameter) for group in self.param_groups
                 for parameter in group["params"]
                 if parameter.requires_grad and not is_lazy(parameter) and parameter.is_floating_point()]
        warn_of_ddp([parameter for _, parameter in named])
        if named and self._comparison is None:
            named_types = [(name, str(parameter.dtype).removeprefix("torch.")) for name, parameter in named]
            of_set = "" if self._process_set == GLOBAL_PROCESS_SET_ID else ", process_set=..."
            root = self._runtime.members(self._process_set)[0]
            self._comparison = FirstComparison(
                self._runtime, named_types, few_values([parameter for _, parameter in named], VALUES),
                f"{self._check_name}.first", self._process_set,
                f"hvd.broadcast_parameters(model.state_dict(), root_rank={root}{of_set})")

    def _check_replicas(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A stage: compare the parameters of all ranks, in as many steps as the user wants."""
        if not self._active:
            if self._is_attached:
                self._runtime.progress.round()
            return
        self._steps += 1
        self._counted.count += 1
        every = self._runtime.config.replica_check_steps
        if every and self._steps % every == 0:
            parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
            named = [(name := self._settings.names.get(parameter, f"noname.{index}"), on_host(parameter, name))
                     for index, parameter in enumerate(parameters)]
            check_replicas(self._runtime, named, self._check_name, self._process_set)

    # --- worlds --------------------------------------------------------------------------------------------------------

    @property
    def _is_attached(self) -> bool:
        return "_runtime" in vars(self)

    def world_ended(self) -> None:
        """Leave the world: gradients are cleared, because they may be half reduced, and in memory that goes with it."""
        if not self._is_attached:
            return
        self._detach()
        self._active, self._comparison = False, None
        del self._runtime
        for group in self.param_groups:
            for parameter in group["params"]:
                set_grad(parameter, None)

    def world_began(self, runtime: Runtime) -> None:
        """Take part in a world with the same arguments as in the last one, and counts that start anew."""
        process_set = self._settings.process_set.process_set_id
        if process_set is not None:  # else it may be registered before the next step
            self._attach(runtime, runtime.names.label(_EARLIER, process_set))

    def next_label(self, names: Names) -> str:
        """Return the label that `world_began` will choose."""
        return names.label(_EARLIER) if self._settings.process_set is global_process_set else ""

    def _take_part(self, *step: Any) -> None:
        """Attach before gradients are used, if that was not possible before; also a stage.

        Raises:
            NotInitializedError: in a process without a world.
            UnsupportedError: when the process set is not registered.
        """
        if not self._is_attached:
            self._attach(api.runtime())

    def _attach(self, runtime: Runtime, label: str | None = None) -> None:
        """Take part in a runtime's world; ranks attach their optimizers in the same order.

        Args:
            label: makes names unique, equal on all ranks; by default the next one.
        """
        raise NotImplementedError

    def _detach(self) -> None:
        """Let go of what belongs to the world."""
        raise NotImplementedError

    # --- copies --------------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the base class, so that a pickle can be loaded where hvdlite is not installed."""
        reduced: Any = super().__reduce_ex__(0)  # later protocols require the object's own class
        make, arguments, *rest = reduced
        plain = next(base for base in type(self).__mro__
                     if issubclass(base, torch.optim.Optimizer) and not issubclass(base, DistributedBase))
        return (make, tuple(plain if argument is type(self) else argument for argument in arguments), *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain optimizer of the copied parameters; its first step warns that it trains alone."""
        return self._copied(memo)

    def __copy__(self) -> Any:
        """Return a plain optimizer of the same parameters, with the same state; its first step warns as well."""
        return self._copied(None)

    def _copied(self, memo: dict[int, Any] | None) -> Any:
        """Return a copy, a deep one if there is a memo of what is copied already."""
        make, arguments, state, *_ = self.__reduce_ex__(4)
        copied = make(*arguments)
        if memo is not None:
            memo[id(self)] = copied
            state = copy.deepcopy(state, memo)
        copied.__setstate__(state)
        if self._active:
            copied.register_step_pre_hook(torch.compiler.disable(_WarnsOnce(self._runtime.world.rank)))
        return copied

    # --- uneven inputs -------------------------------------------------------------------------------------------------

    @contextmanager
    def join(self, *models: torch.nn.Module, synchronize: bool = True) -> Iterator[Joined]:
        """Let ranks run out of batches at different times inside this; all ranks use it, around their training loop.

        A rank that comes to the end waits, and its share in the others' averages is nothing (which are divided by the number
        of all ranks, unless HVDLITE_JOIN_DIVIDES_BY_ACTIVE is set). When all have come, parameters and optimizer state are
        taken from the last one, because the others have missed its steps. For several optimizers, nest their joins around
        one loop (`with one.join(), two.join():`): all of them take from the same rank.

        Args:
            models: modules whose parameters and buffers are taken from the last rank as well. An optimizer has no
                buffers: pass the model when it has running statistics (BatchNorm).
            synchronize: whether to take anything.

        Raises:
            TypeError: for models that are no modules.
            UnsupportedError: for an optimizer of some ranks only.
        """
        for model in models:
            if not isinstance(model, torch.nn.Module):
                raise TypeError(f"join() takes the modules whose parameters and buffers are brought up to date, not a "
                                f"{type(model).__name__}; whether to do so at all is synchronize=...")
        joined = Joined()
        yield joined
        joined.last_rank = self._runtime.world.rank
        if not self._active:
            return
        if self._process_set != GLOBAL_PROCESS_SET_ID:
            raise UnsupportedError("join() is for all ranks; this optimizer shares gradients with some only")
        joined.last_rank = boundaries.join(self._runtime)
        if synchronize:
            assert isinstance(self, torch.optim.Optimizer)
            take_over(self._runtime, self, joined.last_rank, models)


def is_distributed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `DistributedOptimizer` has been called with an optimizer."""
    return isinstance(optimizer, DistributedBase)


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    for stage in optimizer._stages_before:
        args, kwargs = stage(optimizer, args, kwargs) or (args, kwargs)
    return args, kwargs


def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for stage in optimizer._stages_after:
        stage(optimizer, args, kwargs)


class _WarnsOnce:
    """A step hook of copies; does nothing when the copy has been wrapped itself."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_warned = False

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._has_warned or is_distributed(optimizer):
            return
        self._has_warned = True
        warnings.warn(f"rank {self._rank}: this {type(optimizer).__name__} is a copy of a distributed optimizer and trains "
                      "on this rank alone; to train in step with the other ranks, wrap the copy on all ranks: "
                      "hvd.DistributedOptimizer(copy, copied_model.named_parameters())", UserWarning, stacklevel=4)
