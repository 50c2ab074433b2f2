"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import Collective, ReduceOp
from hvdlite_torch import cuda
from hvdlite_torch.framework import lent


class SyncBatchNorm(_BatchNorm):
    """Like `torch.nn.BatchNorm*d`, with mean and variance of the batches of all ranks, which may differ in size.

    Three small allreduces a layer, two forward and one backward. Layers must be called in the same order on all ranks. In
    evaluation, and alone, it is ordinary batch normalization.

    Args:
        num_features: C of inputs (N, C, ...), of two dimensions or more.
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None for a cumulative average.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics.
        process_set: the ranks that share statistics; on other ranks it is ordinary batch normalization.

    Attributes:
        gradient_weight: what this rank's loss counts in the mean of all ranks' losses, where that is seen to afterwards.
    """

    gradient_weight = 1.0

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_set: ProcessSet = global_process_set) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module,
                               process_set: ProcessSet = global_process_set) -> torch.nn.Module:
        """Return `module` with every `torch.nn.BatchNorm*d` in it replaced; parameters and statistics are kept."""
        result = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            result = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                         process_set)
            if module.affine:
                result.weight, result.bias = module.weight, module.bias
            result.running_mean, result.running_var = module.running_mean, module.running_var
            result.num_batches_tracked = module.num_batches_tracked
            result.training = module.training
        for name, child in module.named_children():
            result.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes inputs of at least 2 dimensions, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; the shape and dtype stay."""
        self._check_input_dim(input)
        runtime = api.runtime()
        members = runtime.members(api.set_id(self.process_set))
        if not self.training or len(members) == 1 or runtime.world.rank not in members:
            return self._alone(input)
        output, mean, variance, count = _Synchronized.apply(input, self.weight, self.bias, self.eps,
                                                            api.set_id(self.process_set), self.gradient_weight)
        if self.track_running_stats:
            self._track(mean, variance, count)
        return output

    def _alone(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        uses_batch = self.training or self.running_mean is None
        tracks = not self.training or self.track_running_stats
        return torch.nn.functional.batch_norm(
            input, self.running_mean if tracks else None, self.running_var if tracks else None, self.weight, self.bias,
            uses_batch, self._factor(), self.eps)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        self.num_batches_tracked.add_(1)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self._factor())
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self._factor())

    def _factor(self) -> float:
        if self.momentum is not None:
            return self.momentum
        return 1.0 / max(1, int(self.num_batches_tracked)) if self.training and self.track_running_stats else 0.0


class _Synchronized(torch.autograd.Function):
    """The normalization and its gradient (Ioffe and Szegedy, "Batch Normalization", ICML 2015), over all ranks."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
                process_set: int, gradient_weight: float) -> tuple[torch.Tensor, ...]:
        wide = _wide(input)
        rows = wide.transpose(0, 1).reshape(wide.shape[1], -1)
        count = wide.new_full((1,), float(rows.shape[1]))
        own_mean = rows.mean(1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
        # Sums of squares about this rank's own mean, not about zero: nothing is lost when the mean is large.
        squares = (rows - own_mean[:, None]).square().sum(1)
        sums = _summed(torch.cat([own_mean * count, count]), process_set)
        total = sums[-1:]
        mean = sums[:-1] / total
        squares = _summed(squares + count * (own_mean - mean).square(), process_set)
        variance = squares / total
        scale = (variance + eps).rsqrt()
        normal = (wide - _column(mean, wide)) * _column(scale, wide)
        output = normal if weight is None else normal * _column(weight, wide) + _column(bias, wide)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.process_set, ctx.dtype, ctx.gradient_weight = process_set, input.dtype, gradient_weight
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> Any:  # type: ignore[override]
        normal, scale, weight, total = ctx.saved_tensors
        wide = _wide(upstream)
        axes = [axis for axis in range(wide.dim()) if axis != 1]
        own_sum, own_dot = wide.sum(axes), (wide * normal).sum(axes)
        channels = own_sum.numel()
        sums = _summed(torch.cat([own_sum, own_dot]) * ctx.gradient_weight, ctx.process_set) / ctx.gradient_weight
        factor = scale if weight is None else scale * weight
        gradient = _column(factor, wide) * (wide - _column(sums[:channels] / total, wide)
                                            - normal * _column(sums[channels:] / total, wide))
        own = (None, None) if weight is None else (own_dot.to(weight.dtype), own_sum.to(weight.dtype))
        return gradient.to(ctx.dtype), *own, None, None, None


def _summed(values: torch.Tensor, process_set: int) -> torch.Tensor:
    """Return the sum of a small vector over the ranks of a process set."""
    runtime = api.runtime()
    devices = runtime.devices
    result = cuda.carried(values.detach().contiguous(), devices, Collective.ALLREDUCE, ReduceOp.SUM)
    array = lent(result, "sync_batch_norm", devices)
    cuda.wait(runtime.allreduce(runtime.unnamed("torch", "sync_batch_norm", process_set), array, array, ReduceOp.SUM,
                                process_set=process_set))
    return result.to(values.device)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float() if tensor.element_size() < 4 else tensor.detach()


def _column(values: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a vector over the channels in a shape that broadcasts against an input."""
    assert values is not None
    return values.detach().to(like.dtype).reshape(1, -1, *[1] * (like.dim() - 2))
