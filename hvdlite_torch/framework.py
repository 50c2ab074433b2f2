"""PyTorch tensors as the runtime's arrays, without copying."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from hvdlite.core.array import BFLOAT16, Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.framework import Loan
from hvdlite_torch.compression import Compressor


def contiguous(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a contiguous tensor with `tensor`'s values, sharing its memory when it is contiguous itself.

    Raises:
        UnsupportedError: for a tensor on an accelerator or a sparse one.
    """
    if tensor.device.type != "cpu":
        raise UnsupportedError(f"'{name}' is on {tensor.device}: this version has no GPU data plane yet; move it to the CPU")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"'{name}' is sparse ({tensor.layout}); densify it with .to_dense(), or pass "
                               "sparse_as_dense=True to DistributedOptimizer")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def as_array(tensor: torch.Tensor, name: str) -> Array:
    """Return a NumPy view of the memory of a tensor from `contiguous`.

    Raises:
        UnsupportedError: for a dtype that NumPy does not have.
    """
    detached = tensor.detach()
    if detached.dtype is torch.bfloat16:
        return detached.view(torch.int16).numpy().view(BFLOAT16)
    try:
        return detached.numpy()
    except TypeError:
        raise UnsupportedError(f"'{name}': dtype {tensor.dtype} is not supported") from None


class TorchGradients:
    """Gradients of torch parameters, for `training.GradientReducer`."""

    def __init__(self, compression: type[Compressor], sparse_as_dense: bool) -> None:
        self._compression = compression
        self._sparse_as_dense = sparse_as_dense

    def has_gradient(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is not None

    def lend(self, parameter: torch.Tensor) -> Loan[torch.Tensor]:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided and self._sparse_as_dense:
            gradient = parameter.grad = gradient.to_dense()
        return self._loan(parameter, gradient.detach())

    def lend_empty(self, parameter: torch.Tensor) -> Loan[torch.Tensor]:
        return self._loan(parameter, torch.empty_like(parameter.detach()))

    def give_back(self, loan: Loan[torch.Tensor]) -> None:
        result = self._compression.decompress(loan.tensor, loan.context)
        gradient = loan.parameter.grad
        if gradient is None:
            loan.parameter.grad = torch.empty_like(loan.parameter).copy_(result)
        elif gradient.data_ptr() != result.data_ptr():
            gradient.detach().copy_(result)

    def mark(self, parameter: torch.Tensor) -> Any:
        return None if parameter.grad is None else weakref.ref(parameter.grad)

    def is_marked(self, parameter: torch.Tensor, mark: Any) -> bool:
        return mark() is parameter.grad

    def _loan(self, parameter: torch.Tensor, values: torch.Tensor) -> Loan[torch.Tensor]:
        compressed, context = self._compression.compress(values)
        lent = contiguous(compressed, "gradient")
        return Loan(parameter, as_array(lent, "gradient"), lent, context)
