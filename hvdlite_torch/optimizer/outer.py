"""`DistributedOptimizer(..., outer=DiLoCo(...))`: gradients are averaged in a worker, and workers exchange their changes.

Inside a worker everything is as without `outer`: the optimizer's process set is the worker's ranks. After each step
`training.outer` is told, which reads and writes parameters through `_Weights`. State of the inner optimizer stays local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.names import Names
from hvdlite.runtime.runtime import Runtime
from hvdlite.training import objects
from hvdlite.training.outer.outer import Outer, Parameter, agree_on_workers, register_worker, saved_weights
from hvdlite.training.outer.recovery import recover
from hvdlite.training.replicas import digest
from hvdlite_torch.arrays.tensors import on_host
from hvdlite_torch.collectives.broadcasts import broadcast_tensors
from hvdlite_torch.gradients.unfinal import get_grad
from hvdlite_torch.ops import allreduce_async_
from hvdlite_torch.optimizer.base import DistributedBase, Stage
from hvdlite_torch.optimizer.distributed import Distributed
from hvdlite_torch.rows import mapped
from hvdlite_torch.uncompiled import leave_to_python


class WithOuter(Distributed):
    """Mixed into the user's optimizer class. With one worker it does what its base class does."""

    _goes_first = False, True  # other hooks after the step see the merged parameters
    _outer: Outer | None = None  # of this world, from the first step on
    _state: dict[str, Any] | None = None  # with which it is to begin
    _is_recovered = False  # in this world
    workers: tuple[tuple[int, ...], ...] = ()
    """The ranks of each; empty where there is one. With several, parameters and state differ between ranks."""

    def _attach(self, runtime: Runtime, label: str | None = None) -> None:
        assert self._settings.outer is not None
        if runtime.world.epoch and not isinstance(self._settings.outer.workers, str):
            raise UnsupportedError('outer=: in an elastic job workers= is "host" or "rank": ranks that join later are in no '
                                   "process set that the script has made")
        self._outer_label, self._is_recovered = runtime.names.label("torch.outer"), False
        self.workers = agree_on_workers(runtime, self._settings.outer, self._outer_label)
        self._settings.process_set = register_worker(runtime, self.workers) or global_process_set
        super()._attach(runtime, label)

    def world_began(self, runtime: Runtime) -> None:
        """Wait for the next step, or `recover`: the ranks compare their arguments then."""

    def next_label(self, names: Names) -> str:
        """Return "": process sets of workers are of one world."""
        return ""

    def _detach(self) -> None:
        self._restart(self._saved())
        if self.workers:
            self._settings.process_set.register(None, None)
        super()._detach()

    def _restart(self, state: dict[str, Any] | None) -> None:
        """Begin with another state in the next step."""
        if self._outer is not None:
            self._outer.close()
        self._outer, self._state = None, state

    def _saved(self) -> dict[str, Any] | None:
        return self._state if self._outer is None else self._outer.state()

    def recover(self) -> bool:
        """At the beginning of a world of an elastic job, merge everything: parameters become equal on all ranks.

        `TorchState.sync` calls this on all ranks. Return whether this worker keeps its optimizer state.
        """
        self._take_part()
        assert self._settings.outer is not None
        state = self._saved() or {}
        self._restart(None)
        try:
            keeps_state = recover(self._runtime, self._outer_label, self._settings.outer, self.workers, self._described(),
                                  _Weights(self._all_parameters()), state)
        finally:
            self._state = state or None
        self._is_recovered = True
        if not self.workers:
            self._state = None
        return keeps_state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the base class's, before the first step.

        Raises:
            UnsupportedError: afterwards, with several workers.
        """
        if self._outer is not None:
            raise UnsupportedError("outer=: parameters cannot be added after the first step, because what workers exchange "
                                   "is fixed then; make a new optimizer of all of them")
        super().add_param_group(param_group)

    def join(self, *models: torch.nn.Module, synchronize: bool = True) -> Any:
        """Not possible with several workers: all ranks count the same steps.

        Raises:
            UnsupportedError: where there are any.
        """
        if self.workers:
            raise UnsupportedError("join() lets ranks make different numbers of steps, and outer= needs the same one on all "
                                   "ranks: give them equally many batches")
        return super().join(*models, synchronize=synchronize)

    # --- what scripts call ---------------------------------------------------------------------------------------------

    @leave_to_python
    def synchronize_outer(self, *modules: torch.nn.Module) -> None:
        """Merge everything now: parameters become the global weights on all ranks. All ranks call this.

        Call it before a model is evaluated or saved. With one worker it does nothing.

        Args:
            modules: whose buffers become equal too: those of floating-point numbers that differ their mean over all ranks,
                others rank 0's. An optimizer has no buffers: pass the model when it has running statistics (BatchNorm).

        Raises:
            MismatchError: when ranks have made different numbers of steps.
            HorovodInternalError: like every collective.
        """
        self._take_part()
        if self._state is not None:  # of a checkpoint, or of the last world
            self._begin_outer((), {})
        if self._outer is not None:
            self._outer.synchronize()
        buffers = {id(each): each for module in modules for each in module.buffers()} if self.workers else {}
        kept = self._different([each for each in buffers.values() if each.is_floating_point() or each.is_complex()])
        handles = [allreduce_async_(each, name=f"{self._outer_label}.synchronize_outer.{index}", op=ReduceOp.AVERAGE)
                   for index, each in enumerate(kept)]
        for handle in handles:
            handle.wait()
        broadcast_tensors(self._runtime, [each for each in buffers.values() if not each.is_floating_point()
                                          and not each.is_complex()], 0, f"{self._outer_label}.synchronize_outer.counts")

    def _different(self, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return those that are not bitwise equal on all ranks: a sum of the others may overflow, as that of a mask."""
        if not buffers:
            return []
        digests = objects.allgather_object(self._runtime, [digest(on_host(each, "a buffer")) for each in buffers],
                                           f"{self._outer_label}.synchronize_outer.buffers")
        return [each for each, found in zip(buffers, zip(*digests, strict=True), strict=True) if len(set(found)) > 1]

    def global_weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the global weights by the parameters' names, on the CPU; float32, float64 or complex.

        They are the same on all ranks (`hvd.check_replicas(optimizer.global_weights())`), and change when something is
        merged. Before the first step, and with one worker, they are the parameters.
        """
        parameters = {self._settings.names[each]: each for each in self._all_parameters()}
        if self._outer is not None:
            named = self._outer.global_weights()
        elif self._state is not None:  # of a checkpoint, or of the last world
            assert self._settings.outer is not None
            named = saved_weights(self._state, self._settings.outer, self._described())
        else:
            return {name: each.detach().cpu().clone() for name, each in parameters.items()}
        found = {}
        for name, values in named:
            shaped = torch.from_numpy(values.copy()).view(_real(parameters[name]).shape)
            found[name] = torch.view_as_complex(shaped) if parameters[name].is_complex() else shaped
        return found

    def state_dict(self) -> dict[str, Any]:
        """Like the base class's, with the state of the exchanges under "outer", which a plain optimizer ignores.

        It belongs to this rank: with several workers each rank saves its own.
        """
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        outer = self._saved()
        if outer is not None:  # with tensors, so that `torch.load` can load it with weights_only
            state["outer"] = mapped(outer, lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf)
        return state

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Like the base class's. All ranks call this, with states of the same step; exchanges go on with the next step."""
        result = super().load_state_dict(state_dict, *args, **kwargs)
        outer = state_dict.get("outer")
        self._restart(None if outer is None else mapped(
            outer, lambda leaf: leaf.cpu().numpy().copy() if isinstance(leaf, torch.Tensor) else leaf))
        return result

    # --- stages of a step ----------------------------------------------------------------------------------------------

    def _all_parameters(self) -> list[torch.Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _described(self) -> list[Parameter]:
        return [Parameter(self._settings.names[each], _real(each).numel(), str(each.dtype).removeprefix("torch."))
                for each in self._all_parameters()]

    def _begin_outer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In the first step: the parameters, before they change, are the global weights."""
        if self._outer is not None:
            return
        if self._runtime.world.epoch and not self._is_recovered:
            raise UnsupportedError(f"rank {self._runtime.world.rank}: outer=: in an elastic job this optimizer has to be "
                                   "part of the state, hvd.elastic.TorchState(model, optimizer), and to step inside "
                                   "hvd.elastic.run: other ranks would go on with other weights after a change")
        if not self.workers:
            self._state = None
            return
        assert self._settings.outer is not None
        self._outer = Outer(self._runtime, self._outer_label, self._settings.outer, self.workers, self._described(),
                            _Weights(self._all_parameters()), self._state)
        self._state = None

    def _count_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._outer is None:
            return
        for parameter in self._all_parameters() if self._outer.step == 0 else ():
            gradient = get_grad(parameter)
            if gradient is not None and gradient.layout is not torch.strided:
                raise UnsupportedError(f"outer=: the gradient of '{self._settings.names[parameter]}' is sparse, and workers "
                                       "exchange whole parameters: use sparse=False in the embedding")
        self._outer.stepped()

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the parameters of this worker's ranks, and the global weights of all."""
        self._check_replicas(args, kwargs)
        every = self._runtime.config.replica_check_steps
        if self._outer is not None and every and self._outer.step % every == 0:
            self._outer.check_replicas()

    _stages_before: tuple[Stage, ...] = (DistributedBase._take_part, _begin_outer, Distributed._finish_gradients)
    _stages_after: tuple[Stage, ...] = (Distributed._end_step, _count_step, _compare)


class _Weights:
    """Implements `LocalWeights`: parameters on any device, complex ones as pairs."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def read(self, parameters: range, dtype: np.dtype[np.floating]) -> Array:
        values: Array = np.empty(sum(each.numel() for each in self._some(parameters)), dtype)
        for each, place in self._places(parameters, values):
            place.copy_(each)
        return values

    def write(self, parameters: range, values: Array) -> None:
        for each, place in self._places(parameters, values):
            each.copy_(place)

    def rounded(self, parameters: range, values: Array) -> Array:
        if all(each.dtype.itemsize >= values.itemsize for each in self._some(parameters)):
            return values
        found: Array = values.copy()
        for each, place in self._places(parameters, found):
            place.copy_(place.to(each.dtype))
        return found

    def _some(self, parameters: range) -> list[torch.Tensor]:
        return [_real(self._parameters[index]) for index in parameters]

    def _places(self, parameters: range, values: Array) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the memory of each parameter with its values, in its shape."""
        own = self._some(parameters)
        whole = torch.from_numpy(values).split([each.numel() for each in own])
        return [(each, place.view(each.shape)) for each, place in zip(own, whole, strict=True)]


def has_workers(value: Any) -> bool:
    """Return whether an object is an optimizer of several workers, whose states differ."""
    return isinstance(value, WithOuter) and bool(value.workers)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as real numbers."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
