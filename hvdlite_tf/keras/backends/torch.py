"""Keras on torch: autograd's hooks reduce gradients during the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.before_step import BeforeStep
from hvdlite.training.gradients.reducer import Reducer
from hvdlite.training.replicas import VALUES
from hvdlite.training.step_reducer import StepReducer, current_weight
from hvdlite_torch.arrays.tensors import as_tensor, few_values, on_host
from hvdlite_torch.gradients.hooks import Hooks
from hvdlite_torch.gradients.unfinal import get_grad, set_grad
from hvdlite_torch.optimizer.reduction import gradients_of


def copies(values: Sequence[Any]) -> list[Any]:
    """See the package."""
    return [value.detach().clone() for value in values]


class TorchStepReducer(StepReducer):
    """Reduces the gradients of `backward()` before it returns, and all other gradients when they are applied.

    Keras passes the variables' `.grad` of a backward pass, which are reduced already. Other gradients (from
    `torch.autograd.grad`, accumulated ones, and those of the first step) are recognized because they are not the reduced
    tensors, and are reduced in a separate round. With Average, it is harmless to reduce gradients that a script has derived
    from reduced ones.
    """

    def __init__(self, **arguments: Any) -> None:
        self._tensors: dict[int, torch.Tensor] = {}  # by identity: the values of variables that take part
        self._hooks: Hooks | None = None  # of this world, made for the first variables
        super().__init__("keras", **arguments)

    def world_ended(self) -> None:
        if self._hooks is not None:
            self._hooks.abandon()
            self._hooks = None
        for tensor in self._tensors.values():
            set_grad(tensor, None)  # it may be half reduced, and in memory of that world
        self._tensors.clear()
        super().world_ended()

    def _attach(self, runtime: Runtime) -> None:
        super()._attach(runtime)
        self._is_watching = False

    def watch(self, variables: Sequence[Any]) -> None:
        if api.attached_runtime() is None or not self.is_shared:
            return
        hooks = self._member(variables)
        if hooks.wake() or not self._is_watching:
            if not self._is_watching:
                for tensor in self._tensors.values():
                    self._watch(hooks, tensor)
            self._is_watching = True
            hooks.take_back()
            hooks.claim()
            hooks.retire_others(TorchStepReducer)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.is_shared:
            self._step_begins()
            return list(gradients)
        hooks, tensors = self._member(variables), [variable.value for variable in variables]
        if hooks.reducer.round is not None:
            hooks.finish_if_due()
        is_accumulated = all(gradient is get_grad(tensor) for gradient, tensor in zip(gradients, tensors, strict=True))
        before = [get_grad(tensor) for tensor in tensors]
        is_reduced = not hooks.reducer.is_due and hooks.reducer.round is None and any(
            map(hooks.reducer.members.has_reduced, tensors))
        if not is_accumulated:
            self._check_not_summed(hooks, gradients, tensors)
        try:
            if not is_accumulated or not is_reduced:
                self._begin_round()
                for gradient, tensor in zip(gradients, tensors, strict=True):
                    self._hand_over(hooks, tensor, gradient)
            hooks.finish_if_due(in_step=True)
            results = [get_grad(tensor) for tensor in tensors]
            self._compare_once(lambda: ([(variable.path, variable.dtype) for variable in variables],
                                        few_values(tensors, VALUES)))
            hooks.stepped()
            self._step_begins()
        finally:
            if not is_accumulated:
                for tensor, gradient in zip(tensors, before, strict=True):
                    set_grad(tensor, gradient)
        return results

    def _member(self, variables: Sequence[Any]) -> Hooks:
        """Add variables to the reduction; return the hooks."""
        new = [(variable, group_id) for variable, group_id in zip(variables, self._group_ids_of(variables), strict=True)
               if id(variable.value) not in self._tensors]
        if self._hooks is None:
            runtime = self.take_part()
            framework = gradients_of(runtime, self._compression, self._sparse_as_dense,
                                     [variable.value for variable in variables])
            reducer: Reducer[torch.Tensor] = Reducer(
                runtime, framework, self.label, op=self._op, prescale=self._prescale, postscale=self._postscale,
                passes=1, process_set=self.process_set)
            reducer.set.weights.is_optional = True
            self._hooks = Hooks(reducer, BeforeStep(reducer, looks_for_replaced=False))
            self._hooks.scope, self._hooks.on_begin = TorchStepReducer, self._begin_backward
        for variable, group_id in new:
            tensor = variable.value
            self._hooks.reducer.add(tensor, str(len(self._tensors)), group_id)
            self._tensors[id(tensor)] = tensor
            if self._is_watching:
                self._watch(self._hooks, tensor)
        return self._hooks

    def _watch(self, hooks: Hooks, tensor: torch.Tensor) -> None:
        if tensor.is_leaf:
            hooks.watch(tensor, claims=False)

    def _begin_backward(self) -> bool:
        """Begin a round with a backward pass's first gradient; return whether to reduce it."""
        if not self.is_current:  # of a job that has ended; the optimizer's next step takes part in another one
            assert self._hooks is not None
            self._hooks.unwatch()
            return False
        self._begin_round()
        return True

    def _begin_round(self) -> None:
        """Let this rank's gradients have its weight."""
        assert self._hooks is not None
        count = None if current_weight() is None else float(current_weight())
        weights = self._hooks.reducer.set.weights if count is None else self._hooks.reducer.weigh()
        weights.renew()
        self._hooks.scale = 1.0 if count is None else count / weights.unit
        weights.add(count)

    def _hand_over(self, hooks: Hooks, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Enqueue a gradient that was not computed by a backward pass with hooks."""
        if gradient is get_grad(tensor) and hooks.reducer.members.has_reduced(tensor):
            return
        if gradient is not None and gradient is not get_grad(tensor):
            gradient = gradient.to(tensor.dtype, copy=True)  # it belongs to the caller, and may be reduced in place
        set_grad(tensor, gradient)
        if gradient is not None:
            hooks.hand_over(tensor)

    def _check_not_summed(self, hooks: Hooks, gradients: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        """Raise an error for gradients that may have been computed from summed ones.

        Raises:
            UnsupportedError: with op=Sum, when a variable has a reduced gradient and another one is enqueued for it.
        """
        if self._op is ReduceOp.SUM and any(
                gradient is not None and gradient is not get_grad(tensor) and hooks.reducer.members.has_reduced(tensor)
                for gradient, tensor in zip(gradients, tensors, strict=True)):
            raise UnsupportedError(
                f"rank {api.rank()}: with op=Sum, apply() was given other gradients than those in .grad, "
                "which backward() has computed and summed over all ranks. It cannot be told whether they are summed "
                "already: use op=Average, change .grad in place, or clear .grad before you compute others")


create_step_reducer = TorchStepReducer


def call(function: Callable[[Sequence[Array]], Sequence[Array]], tensors: Sequence[Any],
         like: Sequence[Any]) -> list[Any]:
    """See the package."""
    results = function([on_host(tensor, "tensor") for tensor in tensors])
    return [as_tensor(array).to(tensor.device) for array, tensor in zip(results, like, strict=True)]
