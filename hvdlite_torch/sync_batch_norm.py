"""Batch normalization over the batches of all ranks.

The forward pass gathers each rank's (mean, sum of squares about it, count) and combines them. The backward pass sums the
gradients of the combined mean and variance. The passes over the batch are torch's own kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.training.moments import combined_moments
from hvdlite_torch.collectives import below_autograd, derivatives
from hvdlite_torch.uncompiled import leave_module_to_python


class SyncBatchNorm(_BatchNorm):
    """Like `torch.nn.BatchNorm*d`, with mean and variance of the batches of all ranks, which may differ in size.

    A layer costs one small allgather in the forward pass, and one small allreduce in the backward pass if the input needs a
    gradient. Call layers in the same order on all ranks. In evaluation, and on one rank, it is ordinary batch normalization.
    A batch that is empty on all ranks does not change the running statistics. Differentiable any number of times.

    Args:
        num_features: C of inputs (N, C, ...), of two dimensions or more.
        eps: added to the variance.
        momentum: weight of the newest batch in the running statistics; None for a cumulative average.
        affine: whether there are weight and bias.
        track_running_stats: whether there are running statistics.
        process_set: the ranks that share statistics; on other ranks it is ordinary batch normalization.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True, process_set: ProcessSet = global_process_set) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module,
                               process_set: ProcessSet = global_process_set) -> torch.nn.Module:
        """Return `module` with every `torch.nn.BatchNorm*d` in it replaced; parameters and statistics are kept.

        A layer with several places in the model is one layer in all of them afterwards.

        Args:
            module: a model, or a layer.
            process_set: the ranks that share statistics.

        Raises:
            ValueError: for a lazy layer that has not seen a batch yet.
        """
        return cls._converted(module, process_set, {})

    @classmethod
    def _converted(cls, module: torch.nn.Module, process_set: ProcessSet,
                   done: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
        if module in done:
            return done[module]
        if isinstance(module, _LazyNormBase):
            raise ValueError(f"{type(module).__name__} does not know its number of features yet: call the model with a "
                             "batch before convert_sync_batchnorm")
        result = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            result = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats,
                         process_set)
            if module.affine:
                result.weight, result.bias = module.weight, module.bias
            result.running_mean, result.running_var = module.running_mean, module.running_var
            result.num_batches_tracked = module.num_batches_tracked
            result.training = module.training
        done[module] = result
        for name, child in list(module._modules.items()):  # `named_children` leaves out what it has had before
            if child is not None:
                result.add_module(name, cls._converted(child, process_set, done))
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm takes inputs of at least 2 dimensions, not {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize; the shape and dtype stay."""
        self._check_input_dim(input)
        if not self.training:
            return self._alone(input)  # evaluation, tracing and export do not need hvd.init()
        runtime = api.runtime()
        process_set_id = api.set_id(self.process_set)
        members = runtime.members(process_set_id)
        if len(members) == 1 or runtime.world.rank not in members:
            return self._alone(input)
        # Of the gradients of the statistics, which all ranks have in common.
        sum_ = derivatives.AllreduceCall(runtime.names.unnamed("torch", "sync_batch_norm", process_set_id), self.process_set,
                                         ReduceOp.SUM)
        output, mean, variance, count = _Synchronized.apply(input, self.weight, self.bias, sum_, self.eps)
        if self.track_running_stats:
            self._track(mean.detach(), variance.detach(), count)
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
        factor = (count > 0).to(self.running_mean.dtype) * self._factor()  # without asking a GPU for the count
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)

    def _factor(self) -> float:
        if self.momentum is not None:
            return self.momentum
        return 1.0 / max(1, int(self.num_batches_tracked)) if self.training and self.track_running_stats else 0.0


class _Synchronized(torch.autograd.Function):
    """The normalization and its gradient (Ioffe and Szegedy, "Batch Normalization", ICML 2015), over all ranks.

    The results are the normalized input, and mean, variance and count over all ranks. Mean and variance are differentiable
    for second derivatives only: the gradient of the normalized input includes already that they depend on the input.
    """

    @staticmethod
    @derivatives.with_signature
    def forward(input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,  # type: ignore[override]
                sum_: derivatives.AllreduceCall, eps: float) -> tuple[torch.Tensor, ...]:
        dense = _dense(input)
        own = torch.cat(_moments(dense))
        everywhere = below_autograd.allgather(own[None], sum_.name, sum_.process_set, blocking=True).wait().double()
        means, squares, counts = everywhere.split([input.shape[1], input.shape[1], 1], 1)
        count, mean, variance = combined_moments(counts, means, squares)
        if count.device.type == "cpu" and not torch.compiler.is_compiling() and count.item() == 1:
            raise ValueError("Expected more than 1 value per channel when training, got 1 over all ranks, of input size "
                             f"{tuple(input.shape)} on this one")
        mean, variance, count = (each.to(own.dtype) for each in (mean, variance, count))
        output = _normalized(dense, mean, variance, _like(weight, mean), _like(bias, mean), eps)
        return output, mean, variance, count

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, weight, _, ctx.sum, ctx.eps = inputs
        _, mean, variance, count = output
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.mark_non_differentiable(count)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor | None, of_mean: torch.Tensor | None, of_variance: torch.Tensor | None,
                 _: Any) -> Any:
        input, weight, mean, variance, count = ctx.saved_tensors
        upstream = torch.zeros_like(input) if upstream is None else upstream
        # In operations that autograd records, where it does: slower.
        passes = (_Differentiable(upstream.to(mean.dtype), input.to(mean.dtype), mean, variance, ctx.eps)
                  if torch.is_grad_enabled() else _Fast(upstream, input, mean, variance, ctx.eps))
        scale = passes.scale if weight is None else passes.scale * _like(weight, mean)
        gradient = None
        if ctx.needs_input_grad[0]:
            of_mean = -scale * passes.sums if of_mean is None else of_mean - scale * passes.sums
            along = -0.5 * scale * passes.scale * passes.dots
            of_variance = along if of_variance is None else of_variance + along
            (summed,) = derivatives.pull_back(ctx.sum, [torch.cat([of_mean, of_variance])])
            of_mean, of_variance = (summed / count.clamp(min=1)).chunk(2)
            gradient = passes.gradient(scale, 2 * of_variance / passes.scale, of_mean).to(input.dtype)
        own = (None, None) if weight is None else (passes.dots.to(weight.dtype), passes.sums.to(weight.dtype))
        return gradient, *own, None, None


class _Fast:
    """The passes over the batch that compute a gradient, in torch's kernels.

    Attributes:
        scale: 1 / standard deviation, by channel; likewise below.
        sums: the sum of the upstream gradient.
        dots: the sum of the upstream gradient times the normalized input.
    """

    def __init__(self, upstream: torch.Tensor, input: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor,
                 eps: float) -> None:
        self._input, self._mean, self._variance, self._eps = _dense(input), mean, variance, eps
        self._upstream = upstream.contiguous(memory_format=_memory_format(self._input))
        self.scale = (variance + eps).rsqrt()
        if input.numel():
            ones = torch.ones_like(mean)  # without a weight, a GPU's kernel for two dimensions returns no sums
            _, self.dots, self.sums = torch.ops.aten.native_batch_norm_backward(
                self._upstream, self._input, ones, None, None, mean, self.scale, True, eps, [False, True, True])
        else:
            self.dots, self.sums = torch.zeros_like(mean), torch.zeros_like(mean)

    def gradient(self, scale: torch.Tensor, factor: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """Return upstream gradient * scale + normalized input * factor + summand."""
        wide = self._input.to(scale.dtype)  # the terms may cancel, or exceed what 16 bits hold
        along = _normalized(wide, self._mean, self._variance, factor, summand, self._eps)
        return along.addcmul_(self._upstream.to(scale.dtype), _column(scale, along))


class _Differentiable:
    """Like `_Fast`, in operations that autograd can differentiate."""

    def __init__(self, upstream: torch.Tensor, input: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor,
                 eps: float) -> None:
        axes = [axis for axis in range(input.dim()) if axis != 1]
        self.scale = (variance + eps).rsqrt()
        self._upstream = upstream
        self._normal = (input - _column(mean, input)) * _column(self.scale, input)
        self.sums, self.dots = upstream.sum(axes), (upstream * self._normal).sum(axes)

    def gradient(self, scale: torch.Tensor, factor: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """Like `_Fast.gradient`."""
        return (self._upstream * _column(scale, self._upstream) + self._normal * _column(factor, self._upstream)
                + _column(summand, self._upstream))


def _moments(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each channel's mean and sum of squares about it, and the count; of 16-bit inputs in float32."""
    dtype = torch.float32 if input.element_size() < 4 else input.dtype
    count = torch.full((1,), input.numel() / max(1, input.shape[1]), dtype=dtype, device=input.device)
    if input.numel() and input.device.type == "cpu" and (input.dtype != dtype or not input.is_contiguous()):
        # As torch's own layer does it. For rows of 32 bits it takes three times as long as what follows.
        mean = count.new_zeros(input.shape[1])
        mean, variance = torch.ops.aten.batch_norm_update_stats(input, mean, torch.ones_like(mean), 0.0)
        return mean, variance * count, count
    axes = [axis for axis in range(input.dim()) if axis != 1]
    # Two passes: on the CPU they take a thirtieth of the time of `var_mean`, and lose nothing beside a large mean either.
    mean = input.sum(axes, dtype=dtype) / count.clamp(min=1)
    return mean, (input - _column(mean, input)).square_().sum(axes), count


def _normalized(input: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, weight: torch.Tensor | None,
                bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    if not input.numel():
        return torch.empty_like(input)
    return torch.nn.functional.batch_norm(input, mean, variance, weight, bias, False, 0.0, eps)


def _memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return a tensor's memory format, of the formats that the kernels support."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    is_last = channels_last is not None and tensor.is_contiguous(memory_format=channels_last) and not tensor.is_contiguous()
    return channels_last if is_last and channels_last is not None else torch.contiguous_format


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=_memory_format(tensor))


def _like(values: torch.Tensor | None, statistics: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values.to(statistics.dtype)


def _column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a vector over the channels in a shape that broadcasts against an input."""
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


leave_module_to_python(vars())
