"""Other ways to average gradients than an allreduce of them: casts, PowerSGD, top-k; for `DistributedOptimizer(comm_hook=)`.

A hook gets all gradients of a step when backward has ended and averages them in place, with what `Exchange` offers. What it
loses it keeps, and adds to the next step's gradients (error feedback: Karimireddy et al., "Error Feedback Fixes SignSGD",
ICML 2019). Hooks trade accuracy and overlap for bytes: they pay off on slow networks only.

Gradients that are not finite on some rank have averages that are not finite on all ranks, so `GradScaler` skips the step
everywhere. The hook then keeps the state that it had before.
"""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite_torch.ddp_hook import DDPHook
from hvdlite_torch.hook_exchange import CommHook, Exchange, Gradients

__all__ = ["AllReduce", "Cast", "CommHook", "DDPHook", "ErrorFeedback", "Exchange", "Gradients", "PowerSGD", "TopK"]


class AllReduce:
    """Plain averaging: what happens without a hook, but at the end of backward."""

    is_idempotent = True

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients."""
        exchange.average("gradients", [gradient for _, gradient in gradients])


class Cast:
    """Averaging in another dtype.

    Args:
        dtype: torch.float16 or torch.bfloat16; sums are accumulated in float32. Gradients whose numbers have 16 bits already
            travel as they are; complex numbers are cast part by part.
    """

    is_idempotent = True

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, not {dtype}")
        self._dtype = dtype

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average casts of the gradients."""
        numbers = [_real(gradient) for _, gradient in gradients]
        wide = [gradient for gradient in numbers if gradient.element_size() > self._dtype.itemsize]
        if wide:
            casts = wide[0].new_empty(sum(gradient.numel() for gradient in wide), dtype=self._dtype)
            parts = _parts(casts, wide)
            torch._foreach_copy_(parts, wide)
            exchange.average("casts", [casts])
            torch._foreach_copy_(wide, parts)
        exchange.confirm()
        exchange.average("exact", [gradient for gradient in numbers if gradient.element_size() <= self._dtype.itemsize])


class ErrorFeedback:
    """A hook that keeps what a step's averages lack, and adds it to the next step's gradients.

    Save `state_dict()` in a checkpoint, on every rank: each rank has errors of its own. A rank that loads the state of
    another rank takes over only what is equal on all ranks.

    Args:
        loss_scale: returns the factor by which losses are multiplied now, such as `scaler.get_scale` of a `GradScaler`. What
            is kept is scaled when it changes. Needed with loss scaling only.
    """

    is_repeatable = True

    def __init__(self, loss_scale: Callable[[], float] | None = None) -> None:
        if loss_scale is not None and not callable(loss_scale):
            raise ValueError(f"loss_scale must be a function that returns the factor, such as scaler.get_scale, not "
                             f"{loss_scale!r}")
        self._loss_scale = loss_scale
        self._errors: dict[str, torch.Tensor] = {}  # by name; multiplied by `_scale`
        self._scale = 1.0
        self._user: Callable[[], object] = _nobody
        self._rank: int | None = None  # of this process, once it is known
        self._writer: int | None = None  # the rank that saved the errors that were loaded

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on from here."""
        return {"errors": dict(self._errors), "scale": self._scale, "rank": self._rank}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. Call it on all ranks, before backward."""
        self._errors = {name: error.clone() for name, error in state_dict["errors"].items()}
        self._scale = state_dict["scale"]
        self._writer = state_dict["rank"]

    def _begin(self, exchange: Exchange) -> float:
        """Return the factor for the errors that are kept; changes nothing that counts."""
        user = self._user()
        if user is None:
            self._user = weakref.ref(exchange)
        elif user is not exchange:
            raise ValueError(f"this {type(self).__name__} belongs to another optimizer already, whose errors it keeps; give "
                             "each optimizer a hook of its own")
        self._rank = exchange.rank
        if self._writer not in (None, exchange.rank):
            self._errors.clear()
        self._writer = None
        return 1.0 if self._loss_scale is None else self._loss_scale() / self._scale

    def _keep(self, errors: Mapping[str, torch.Tensor], factor: float) -> None:
        """Keep new errors; those of gradients that were not there are scaled as they were."""
        if factor != 1:
            for name in self._errors.keys() - errors.keys():
                self._errors[name].mul_(factor)
            self._scale *= factor
        self._errors.update(errors)


class PowerSGD(ErrorFeedback):
    """Averaging of low-rank approximations (Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1), with error feedback.

    A gradient of shape (n, ...) is seen as a matrix n x m; r (n + m) numbers travel instead of n m. Vectors, and matrices
    for which that saves too little, are averaged exactly. It computes in float32 at least; the averages are those of torch's
    `powerSGD_hook`, up to rounding, where both begin with the same factors.

    Args:
        matrix_approximation_rank: r.
        start_iter: steps at the beginning that are averaged exactly.
        min_compression_rate: compress only where so many times fewer numbers travel.
        loss_scale: like `ErrorFeedback`'s.
    """

    def __init__(self, matrix_approximation_rank: int = 1, start_iter: int = 10, min_compression_rate: float = 2.0,
                 loss_scale: Callable[[], float] | None = None) -> None:
        if matrix_approximation_rank < 1:
            raise ValueError(f"matrix_approximation_rank must be at least 1, not {matrix_approximation_rank}")
        super().__init__(loss_scale)
        self._most, self._start, self._rate = matrix_approximation_rank, start_iter, min_compression_rate
        self._steps = 0
        self._joins = -1  # how often all ranks had joined when they agreed about `_steps`
        self._factors: dict[str, torch.Tensor] = {}  # by name: m x r, where the power iteration goes on; equal on all ranks

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on from here."""
        return {**super().state_dict(), "steps": self._steps, "factors": dict(self._factors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. Call it on all ranks, before backward."""
        super().load_state_dict(state_dict)
        self._steps, self._joins = state_dict["steps"], -1
        self._factors = {name: factor.clone() for name, factor in state_dict["factors"].items()}

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients, most of them approximately."""
        scale = self._begin(exchange)
        if self._joins != exchange.joins:  # ranks that joined early, or have loaded no state, have made fewer steps
            self._steps = int(exchange.largest("steps", torch.tensor([self._steps])))
            self._joins = exchange.joins
        is_compressing = self._steps >= self._start
        chosen = [(name, gradient) for name, gradient in gradients if is_compressing and self._pays(gradient)]
        names = {name for name, _ in chosen}
        exact = [gradient for name, gradient in gradients if name not in names]
        matrices = [self._matrix(name, gradient, scale) for name, gradient in chosen]
        left = [matrix @ self._factor(name, matrix) for (name, _), matrix in zip(chosen, matrices, strict=True)]
        left = self._averaged("left", left, exchange)
        self._steps += 1
        wait_for_exact = exchange.start_average("exact", exact)
        left = [torch.linalg.qr(factor)[0] for factor in left] if _are_finite(left) else [
            torch.full_like(factor, torch.nan) for factor in left]
        right = [matrix.t() @ factor for matrix, factor in zip(matrices, left, strict=True)]
        right = self._averaged("right", right, exchange)
        for (_, gradient), one, other in zip(chosen, left, right, strict=True):
            gradient.copy_((one @ other.t()).view(gradient.shape))
        wait_for_exact()
        largest = _largest([*right, *exact]) if chosen else [math.nan]
        if all(map(math.isfinite, largest)):
            torch._foreach_sub_(matrices, [gradient.reshape(matrix.shape) for (_, gradient), matrix
                                           in zip(chosen, matrices, strict=True)])
            for (name, _), other, size in zip(chosen, right, largest[:len(right)], strict=True):
                if size:
                    self._factors[name] = other
                else:  # a factor of zeros would stay one
                    self._factors.pop(name, None)
            self._keep({name: matrix for (name, _), matrix in zip(chosen, matrices, strict=True)}, scale)

    def _averaged(self, name: str, factors: Sequence[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
        """Return the averages of factors, which travel as one tensor."""
        flat = [torch.cat([factor.reshape(-1) for factor in factors])] if factors else []
        exchange.average(name, flat)
        return _parts(flat[0], factors) if factors else []

    def _pays(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or not gradient.is_floating_point() or gradient.numel() == 0:
            return False
        rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
        return min(self._most, rows, columns) * (rows + columns) * self._rate < rows * columns

    def _matrix(self, name: str, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        """Return a new matrix: the gradient and what was kept for it."""
        matrix = gradient.reshape(gradient.shape[0], -1)
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        error = self._errors.get(name)
        if error is None or error.shape != matrix.shape:
            return matrix.to(dtype, copy=True)
        return torch.add(matrix, error.to(matrix.device, dtype), alpha=scale)

    def _factor(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return where the power iteration goes on; random and the same on all ranks where it begins."""
        rank = min(self._most, *matrix.shape)
        factor = self._factors.get(name)
        if factor is None or factor.shape != (matrix.shape[1], rank):
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._steps)
            factor = torch.randn(matrix.shape[1], rank, generator=generator)
        return factor.to(matrix)


class TopK(ErrorFeedback):
    """Only the largest elements travel (Stich et al., "Sparsified SGD with Memory", NeurIPS 2018), with error feedback.

    Args:
        ratio: the share of all elements that each rank sends, above 0 and at most 1.
        loss_scale: like `ErrorFeedback`'s.
    """

    def __init__(self, ratio: float = 0.01, loss_scale: Callable[[], float] | None = None) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, not {ratio}")
        super().__init__(loss_scale)
        self._ratio = ratio

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average what the ranks send; the rest is kept for the next step."""
        scale = self._begin(exchange)
        names = [name for name, _ in gradients]
        numbers = [_real(gradient) for _, gradient in gradients]
        dtype = functools.reduce(torch.promote_types, {gradient.dtype for gradient in numbers}, torch.float32)
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in numbers]) if numbers else torch.zeros(0)
        parts = _parts(flat, numbers)
        kept = [(part, error) for part, error in zip(parts, map(self._errors.get, names), strict=True)
                if error is not None and error.shape == part.shape]
        if kept:
            torch._foreach_add_([part for part, _ in kept], [error.to(flat) for _, error in kept], alpha=scale)
        count = max(1, round(self._ratio * flat.numel())) if flat.numel() else 0
        chosen = flat.abs().topk(count, sorted=False).indices
        indices = exchange.gather("indices", chosen)
        values = exchange.gather("values", flat[chosen])
        total = torch.zeros_like(flat).index_add_(0, indices, values).div_(exchange.size)
        averages = _parts(total, numbers)
        if numbers:
            torch._foreach_copy_(numbers, averages)
        if _are_finite([values]):
            flat.index_fill_(0, chosen, 0.0)
            for gradient, average, part in zip(numbers, averages, parts, strict=True):
                if gradient.dtype is not dtype:  # the average was rounded, on all ranks alike
                    part.add_(average).sub_(gradient)
            self._keep(dict(zip(names, parts, strict=True)), scale)


def _nobody() -> None:
    pass


def _real(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient, of a complex one its real and imaginary parts, in the same memory."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _parts(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of a flat tensor with the shapes of other ones, one after the other."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _largest(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest absolute value in each tensor, NaN where there is one; in one transfer from a GPU."""
    if not tensors:
        return []
    found = torch._foreach_norm([tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors], math.inf)
    largest: list[float] = torch.stack([each.to(found[0].device, torch.float64) for each in found]).tolist()
    return largest


def _are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all elements are finite; the same on all ranks for tensors that are equal there."""
    return all(map(math.isfinite, _largest(tensors)))
