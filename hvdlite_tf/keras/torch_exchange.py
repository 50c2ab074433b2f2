"""Keras on torch: gradients are reduced by autograd's hooks, while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.training.exchange import samples
from hvdlite.training.gradient_reducer import GradientReducer
from hvdlite_tf.keras.exchange import ArrayExchange
from hvdlite_torch import Compression
from hvdlite_torch.backward import BackwardHooks
from hvdlite_torch.framework import TorchGradients


class TorchExchange(ArrayExchange):
    """Reduces what `backward()` accumulates before it returns, and any other gradients as arrays.

    Keras hands in what it found in the variables' gradients, or something it made of that (unscaled losses): after a
    backward pass that ended a round there is nothing left to do. Gradients from elsewhere (`torch.autograd.grad`) are
    reduced as they come in.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        compression = {None: Compression.none, "float16": Compression.fp16, "bfloat16": Compression.bf16}
        framework = TorchGradients(compression[self._compression.target], self._sparse_as_dense,
                                   self._runtime.config.gradient_as_bucket_view)
        self._hooked: GradientReducer[torch.Tensor] = GradientReducer(
            self._runtime, framework, f"{self.label}.hooked", op=self._op, prescale=self._prescale,
            postscale=self._postscale, passes=1, process_set=self.process_set)
        self._hooks = BackwardHooks(self._hooked)
        self._hooks.on_begin = self._begin_round
        self._watched: dict[int, torch.Tensor] = {}  # by identity
        self._count = torch.zeros(1, requires_grad=True)  # its "gradient" is this rank's weight

    def watch(self, variables: Sequence[Any]) -> None:
        if not self.is_shared or self._watched:
            return
        for index, (variable, cluster) in enumerate(zip(variables, self._clusters_of(variables), strict=True)):
            tensor = variable.value
            if tensor.is_leaf and tensor.requires_grad and tensor.device.type == "cpu":
                self._hooked.add(tensor, str(index), cluster)
                self._hooks.watch(tensor)
                self._watched[id(tensor)] = tensor
        if self._watched:
            self._hooked.add(self._count, "count")

    def _begin_round(self) -> None:
        """Find this rank's weight, and reduce it along with the gradients."""
        count = samples()
        self._hooks.weight = 1.0 if count is None else self._weight(count)
        if count is not None:
            self._count.grad = torch.tensor([self._hooks.weight])
            self._hooked.hand_over(self._count)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.is_shared:
            return list(gradients)
        watched = [index for index, variable in enumerate(variables) if id(variable.value) in self._watched]
        if not watched or not self._finish([gradients[index] for index in watched],
                                           [variables[index].value for index in watched]):
            return super().reduce(gradients, variables)
        results = list(gradients)
        others = [index for index, variable in enumerate(variables) if id(variable.value) not in self._watched]
        if others:
            reduced = super().reduce([gradients[index] for index in others], [variables[index] for index in others])
            for index, gradient in zip(others, reduced, strict=True):
                results[index] = gradient
        for index in watched:
            if results[index] is None:
                results[index] = variables[index].value.grad
        self._hooks.stepped()
        factor = self._unweight(None if samples() is None or self._count.grad is None else float(self._count.grad))
        return results if abs(factor - 1.0) < 1e-6 else [
            None if gradient is None else gradient * factor for gradient in results]

    def _finish(self, gradients: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
        """Make the gradients of these tensors final; return False when the ones given are not what they accumulated."""
        if self._hooked.has_reduced:
            return True
        if not self._hooked.is_under_way:
            if any(gradient is not tensor.grad for gradient, tensor in zip(gradients, tensors, strict=True)):
                return False
            self._begin_round()
            for gradient, tensor in zip(gradients, tensors, strict=True):
                if gradient is not None:
                    self._hooks.hand_over(tensor)
        self._hooks.finish_if_due()
        return True
