"""Other ways to average gradients than an allreduce of them: casts, PowerSGD, top-k; for `DistributedOptimizer(comm_hook=)`.

A hook gets all gradients of a step when backward has ended and averages them in place, with what `Exchange` offers. What it
loses it keeps, and adds to the next step's gradients (error feedback: Karimireddy et al., "Error Feedback Fixes SignSGD",
ICML 2019). Hooks trade accuracy and overlap for bytes: they pay off on slow networks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hvdlite.core.types import Collective, ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite_torch import cuda
from hvdlite_torch.framework import as_tensor, contiguous, lent
from hvdlite_torch.seats import Mark
from hvdlite_torch.unfinal import get_grad, set_grad

Gradients = Sequence[tuple[str, torch.Tensor]]
"""Names, equal on all ranks, and dense gradients to be overwritten with their averages over all ranks."""


class CommHook(Protocol):
    """What `comm_hook` takes. It has state of its own, so every optimizer needs a new one."""

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients over all ranks, in place; called on all ranks with the same names in the same order."""


class Exchange:
    """Collectives over the ranks that share gradients.

    Attributes:
        size: how many ranks these are.
    """

    def __init__(self, runtime: Runtime, label: str, process_set: int) -> None:
        self.size = len(runtime.members(process_set))
        self._runtime, self._label, self._process_set = runtime, label, process_set

    def average(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Average tensors in place, as one group."""
        if tensors:
            self._all_reduced(name, tensors, ReduceOp.AVERAGE)

    def anywhere(self, name: str, flags: torch.Tensor) -> torch.Tensor:
        """Return which of some flags (uint8) are set on any rank."""
        result = flags.clone()
        self._all_reduced(name, [result], ReduceOp.MAX)
        return result

    def gather(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return all ranks' tensors, concatenated along the first dimension."""
        devices = self._runtime.devices
        source = cuda.carried(contiguous(tensor, name), devices, Collective.ALLGATHER)
        handle = self._runtime.allgather(f"{self._label}.{name}", lent(source, name, devices), process_set=self._process_set)
        return as_tensor(cuda.wait(handle)).to(tensor.device)

    def _all_reduced(self, name: str, tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
        devices = self._runtime.devices
        dense = [cuda.carried(contiguous(tensor, name), devices, Collective.ALLREDUCE, op) for tensor in tensors]
        arrays = [lent(tensor, name, devices) for tensor in dense]
        cuda.wait(self._runtime.grouped_allreduce(f"{self._label}.{name}", arrays, arrays, op,
                                                  process_set=self._process_set))
        for tensor, result in zip(tensors, dense, strict=True):
            if tensor.data_ptr() != result.data_ptr():
                tensor.copy_(result)


class AllReduce:
    """Plain averaging: what happens without a hook, but at the end of backward."""

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients."""
        exchange.average("gradients", [gradient for _, gradient in gradients])


class Cast:
    """Averaging in another dtype.

    Args:
        dtype: torch.float16 or torch.bfloat16; sums are accumulated in float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average casts of the gradients."""
        casts = [gradient.to(self._dtype) for _, gradient in gradients]
        exchange.average("casts", casts)
        for (_, gradient), cast in zip(gradients, casts, strict=True):
            gradient.copy_(cast)


class PowerSGD:
    """Averaging of low-rank approximations (Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1), with error feedback.

    A gradient of shape (n, ...) is seen as a matrix n x m; r (n + m) numbers travel instead of n m. Vectors, and matrices
    for which that saves too little, are averaged exactly.

    Args:
        matrix_approximation_rank: r.
        start_iter: steps at the beginning that are averaged exactly.
        min_compression_rate: compress only where so many times fewer numbers travel.
    """

    def __init__(self, matrix_approximation_rank: int = 1, start_iter: int = 10, min_compression_rate: float = 2.0) -> None:
        if matrix_approximation_rank < 1:
            raise ValueError(f"matrix_approximation_rank must be at least 1, not {matrix_approximation_rank}")
        self._rank, self._start, self._rate = matrix_approximation_rank, start_iter, min_compression_rate
        self._steps = 0
        self._errors: dict[str, torch.Tensor] = {}
        self._factors: dict[str, torch.Tensor] = {}

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients, most of them approximately."""
        self._steps += 1
        chosen = {name for name, gradient in gradients if self._steps > self._start and self._pays(gradient)}
        exchange.average("exact", [gradient for name, gradient in gradients if name not in chosen])
        matrices = [(name, gradient, gradient.reshape(gradient.shape[0], -1) + self._errors.get(name, 0))
                    for name, gradient in gradients if name in chosen]
        left = [matrix @ self._factor(name, matrix) for name, _, matrix in matrices]
        exchange.average("left", left)
        left = [torch.linalg.qr(factor)[0] for factor in left]
        right = [matrix.t() @ factor for (_, _, matrix), factor in zip(matrices, left, strict=True)]
        exchange.average("right", right)
        for (name, gradient, matrix), one, other in zip(matrices, left, right, strict=True):
            approximation = one @ other.t()
            self._errors[name] = matrix - approximation
            self._factors[name] = other
            gradient.copy_(approximation.reshape(gradient.shape))

    def _pays(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or not gradient.is_floating_point() or gradient.numel() == 0:
            return False
        rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
        return self._rank * (rows + columns) * self._rate < rows * columns

    def _factor(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return where the power iteration goes on; the same on all ranks at first."""
        if name not in self._factors:
            generator = torch.Generator().manual_seed(len(self._factors))
            self._factors[name] = torch.randn(matrix.shape[1], self._rank, generator=generator).to(matrix)
        return self._factors[name]


class TopK:
    """Only the largest elements travel (Stich et al., "Sparsified SGD with Memory", NeurIPS 2018), with error feedback.

    Args:
        ratio: the share of all elements that each rank sends, above 0 and at most 1.
    """

    def __init__(self, ratio: float = 0.01) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, not {ratio}")
        self._ratio = ratio
        self._error: torch.Tensor | None = None

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average what the ranks send; the rest is kept for the next step."""
        flat = torch.cat([gradient.reshape(-1).float() for _, gradient in gradients]) if gradients else torch.zeros(0)
        if self._error is not None and self._error.numel() == flat.numel():
            flat = flat + self._error
        count = max(1, round(self._ratio * flat.numel())) if flat.numel() else 0
        chosen = flat.abs().topk(count).indices
        indices = exchange.gather("indices", chosen)
        values = exchange.gather("values", flat[chosen])
        self._error = flat.index_fill(0, chosen, 0.0)
        total = torch.zeros_like(flat).index_add_(0, indices, values) / exchange.size
        parts = total.split([gradient.numel() for _, gradient in gradients])
        for (_, gradient), part in zip(gradients, parts, strict=True):
            gradient.copy_(part.reshape(gradient.shape))


def reduce_round(hook: CommHook, exchange: Exchange,
                 members: Sequence[tuple[str, torch.Tensor, bool]]) -> list[tuple[torch.Tensor, Any]]:
    """Let a hook average the gradients that some rank has; see `training.hooked_reducer`."""
    reduced = []
    with torch.no_grad():
        for name, parameter, present in members:
            if not present:
                set_grad(parameter, torch.zeros_like(parameter))
            gradient = get_grad(parameter)
            assert gradient is not None
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
                set_grad(parameter, gradient)
            reduced.append((name, parameter, gradient))
        hook.reduce([(name, gradient) for name, _, gradient in reduced], exchange)
    return [(parameter, Mark(gradient)) for _, parameter, gradient in reduced]
