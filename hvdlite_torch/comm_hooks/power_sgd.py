"""PowerSGD: an average of low-rank approximations of gradients, with error feedback."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hvdlite_torch.comm_hooks.exchange import Exchange, Gradients, parts

_SMALL = 16 << 10
"""Gradients of one shape with up to this many elements are compressed together: a call costs more than a copy."""


class PowerSGD:
    """Averaging of low-rank approximations (Vogels et al., "PowerSGD", NeurIPS 2019, algorithm 1), with error feedback.

    A gradient of shape (n, ...) is seen as a matrix n x m; r (n + m) elements are sent instead of n m. Vectors, and matrices
    for which that saves too little, are averaged exactly. It computes in float32 or wider; the averages are those of torch's
    `powerSGD_hook`, up to rounding, if both begin with the same factors. Beyond torch's it needs no process group, and works
    in elastic jobs, with `join()`, and with gradients that are missing, zeros or not finite in a step.

    It keeps the errors of a step's averages, and adds them to the next step's gradients (Karimireddy et al., "Error Feedback
    Fixes SignSGD", ICML 2019). Save `state_dict()` in a checkpoint on every rank, because each rank has its own errors. A
    rank that loads the state of another rank uses only the part that is equal on all ranks.

    Gradients that are not finite on some rank have averages that are not finite on all ranks, so `GradScaler` skips the step
    everywhere. The hook then keeps the state that it had before.

    Args:
        matrix_approximation_rank: r.
        start_iter: steps at the beginning that are averaged exactly.
        min_compression_rate: compress only if this many times fewer elements are sent.
        loss_scale: returns the current factor of losses, such as `scaler.get_scale` of a `GradScaler`. Errors are scaled
            when it changes. Needed with loss scaling only.
    """

    def __init__(self, matrix_approximation_rank: int = 1, start_iter: int = 10, min_compression_rate: float = 2.0,
                 loss_scale: Callable[[], float] | None = None) -> None:
        if matrix_approximation_rank < 1:
            raise ValueError(f"matrix_approximation_rank must be at least 1, not {matrix_approximation_rank}")
        if loss_scale is not None and not callable(loss_scale):
            raise ValueError(f"loss_scale must be a function that returns the factor, such as scaler.get_scale, not "
                             f"{loss_scale!r}")
        self._most, self._start, self._rate = matrix_approximation_rank, start_iter, min_compression_rate
        self._loss_scale = loss_scale
        self._errors: dict[str, torch.Tensor] = {}  # by name; multiplied by `_scale`
        self._scale = 1.0
        self._factors: dict[str, torch.Tensor] = {}  # by name: m x r, the state of the power iteration; equal on all ranks
        self._steps = 0
        self._joins = -1  # the number of completed joins when the ranks agreed about `_steps`
        self._user: Callable[[], object] = lambda: None
        self._rank: int | None = None  # of this process, once it is known
        self._writer: int | None = None  # the rank that saved the errors that were loaded

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on from here."""
        return {"errors": _copies(self._errors), "scale": self._scale, "rank": self._rank, "steps": self._steps,
                "factors": _copies(self._factors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. Call it on all ranks, before backward.

        Args:
            state_dict: what `state_dict` has returned.
        """
        self._errors, self._factors = _copies(state_dict["errors"]), _copies(state_dict["factors"])
        self._scale, self._writer = state_dict["scale"], state_dict["rank"]
        self._steps, self._joins = state_dict["steps"], -1

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Average the gradients, most of them approximately.

        Args:
            gradients, exchange: as in `CommHook`.
        """
        scale = self._begin(exchange)
        if self._joins != exchange.joins:  # ranks that joined early, or have loaded no state, have made fewer steps
            self._steps = int(exchange.largest("steps", torch.tensor([self._steps])))
            self._joins = exchange.joins
        batches, exact = self._batches(gradients, scale)
        left = [batch.matrices @ self._factors_for(batch) for batch in batches]
        left = self._averaged("left", left, exchange)
        self._steps += 1
        wait_for_exact = exchange.start_average("exact", exact)
        if not batches:
            wait_for_exact()
            return
        left = [torch.linalg.qr(factors)[0] for factors in left] if all(map(math.isfinite, _largest(left))) else [
            torch.full_like(factors, torch.nan) for factors in left]
        right = [batch.matrices.mT @ factors for batch, factors in zip(batches, left, strict=True)]
        right = self._averaged("right", right, exchange)
        for batch, one, other in zip(batches, left, right, strict=True):
            torch._foreach_copy_(batch.gradients, batch.parts_of(one @ other.mT))
        wait_for_exact()
        names = [name for batch in batches for name in batch.names]
        factors = [factor for some in right for factor in _listed(some)]
        largest = _largest(right)
        if all(map(math.isfinite, [*largest, *_norms(exact)])):
            torch._foreach_sub_([part for batch in batches for part in batch.parts_of(batch.matrices)],
                                [gradient for batch in batches for gradient in batch.gradients])
            self._factors.update(zip(names, factors, strict=True))
            for name, size in zip(names, largest, strict=False):
                if not size:  # a factor of zeros would stay one
                    self._factors.pop(name)
            self._keep(dict(zip(names, (matrix for batch in batches for matrix in _listed(batch.matrices)), strict=True)),
                       scale)

    def _begin(self, exchange: Exchange) -> float:
        """Return the factor for the stored errors, without changing them."""
        user = self._user()
        if user is None:
            self._user = weakref.ref(exchange)
        elif user is not exchange:
            raise ValueError("this PowerSGD belongs to another optimizer already, whose errors it keeps; give each "
                             "optimizer a hook of its own")
        self._rank = exchange.rank
        if self._writer not in (None, exchange.rank):
            self._errors.clear()
        self._writer = None
        return 1.0 if self._loss_scale is None else self._loss_scale() / self._scale

    def _keep(self, errors: Mapping[str, torch.Tensor], factor: float) -> None:
        """Store new errors; the errors of missing gradients are only scaled."""
        if factor != 1:
            for name in self._errors.keys() - errors.keys():
                self._errors[name].mul_(factor)
            self._scale *= factor
        self._errors.update(errors)

    def _averaged(self, name: str, factors: Sequence[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
        """Return the averages of factors, which are sent as one tensor."""
        flat = [torch.cat([each.reshape(-1) for each in factors])] if factors else []
        exchange.average(name, flat)
        return [part.to(each) for part, each in zip(parts(flat[0], factors), factors, strict=True)] if flat else []

    def _batches(self, gradients: Gradients, scale: float) -> tuple[list[_MatrixBatch], list[torch.Tensor]]:
        """Return the gradients to compress, and the others. Small ones of the same shape form one batch."""
        if self._steps < self._start:
            return [], [gradient for _, gradient in gradients]
        alike: dict[Any, list[tuple[str, torch.Tensor]]] = {}
        for each in gradients:
            alike.setdefault((each[1].shape, each[1].dtype, each[1].device), []).append(each)
        batches: list[_MatrixBatch] = []
        exact: list[torch.Tensor] = []
        for (shape, _, _), some in alike.items():
            if not self._pays(some[0][1]):
                exact += [gradient for _, gradient in some]
            elif shape.numel() > _SMALL:
                batches += [self._batch([each], scale) for each in some]
            else:
                batches.append(self._batch(some, scale))
        return batches, exact

    def _pays(self, gradient: torch.Tensor) -> bool:
        if gradient.dim() < 2 or not gradient.is_floating_point() or gradient.numel() == 0:
            return False
        rows, columns = gradient.shape[0], gradient.numel() // gradient.shape[0]
        return min(self._most, rows, columns) * (rows + columns) * self._rate < rows * columns

    def _batch(self, alike: Gradients, scale: float) -> _MatrixBatch:
        """Return new matrices: gradients of the same shape plus their errors."""
        first = alike[0][1]
        dtype = torch.promote_types(first.dtype, torch.float32)
        batch = _MatrixBatch([name for name, _ in alike], [gradient for _, gradient in alike], first)
        errors = [self._fitting(name, dtype, first) for name in batch.names]
        if len(alike) == 1:
            matrix, error = first.reshape(first.shape[0], -1), errors[0]
            batch.matrices = matrix.to(dtype, copy=True) if error is None else torch.add(matrix, error, alpha=scale)
            return batch
        batch.matrices = torch.empty(len(alike), first.shape[0], first[0].numel(), dtype=dtype, device=first.device)
        torch._foreach_copy_(batch.parts_of(batch.matrices), batch.gradients)
        kept = [(matrix, error) for matrix, error in zip(batch.matrices, errors, strict=True) if error is not None]
        if kept:
            torch._foreach_add_([matrix for matrix, _ in kept], [error for _, error in kept], alpha=scale)
        return batch

    def _fitting(self, name: str, dtype: torch.dtype, gradient: torch.Tensor) -> torch.Tensor | None:
        """Return the stored error of a gradient, scaled for addition."""
        error = self._errors.get(name)
        if error is None or error.shape[0] != gradient.shape[0] or error.numel() != gradient.numel():
            return None
        return error if error.dtype is dtype and error.device == gradient.device else error.to(gradient.device, dtype)

    def _factors_for(self, batch: _MatrixBatch) -> torch.Tensor:
        """Return the state of the power iterations; at the beginning random, equal on all ranks and for alike matrices."""
        rows, columns = batch.matrices.shape[-2:]
        shape = columns, min(self._most, rows, columns)
        like, first = batch.matrices, torch.randn(shape, generator=torch.Generator().manual_seed(self._steps))
        kept = [self._factors.get(name, first) for name in batch.names]
        factors = [(factor if factor.shape == shape else first).to(like) for factor in kept]
        return torch.stack(factors) if batch.matrices.dim() > 2 else factors[0]


@dataclasses.dataclass
class _MatrixBatch:
    """Gradients of one shape, and their matrices.

    Attributes:
        matrices: one for each, the gradient and what was kept for it, stacked; of a single gradient just its matrix.
    """

    names: list[str]
    gradients: list[torch.Tensor]
    matrices: torch.Tensor

    def parts_of(self, matrices: torch.Tensor) -> list[torch.Tensor]:
        """Return views of matrices, each in its gradient's shape."""
        shape = self.gradients[0].shape
        return [matrices.view(shape)] if matrices.dim() == 2 else list(matrices.view(len(self.names), *shape).unbind())


def _listed(matrices: torch.Tensor) -> Sequence[torch.Tensor]:
    return [matrices] if matrices.dim() == 2 else matrices.unbind()


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with their own memory, because saving a view saves its whole base."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _largest(matrices: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest absolute value in each matrix, NaN where there is one; stacks have several matrices."""
    found = [some.abs().amax((-2, -1)).reshape(-1) for some in matrices]
    return _numbers(found) if found else []


def _norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return the largest absolute value in each tensor, NaN where there is one."""
    return _numbers([each.reshape(1) for each in torch._foreach_norm(
        [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors], math.inf)]) if tensors else []


def _numbers(found: Sequence[torch.Tensor]) -> list[float]:
    """Return the values of tensors, in one transfer from a GPU."""
    numbers: list[float] = torch.cat([each.to(found[0].device) for each in found]).tolist()
    return numbers
