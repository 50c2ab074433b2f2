"""`DistributedOptimizer(..., op=Adasum)`: every rank makes its own step, then the steps are combined.

The adaptive sum combines the optimizer's changes of the parameters, not the gradients, so it includes momentum and learning
rates. Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, section 4.

Rules
- The stages of a step do the work. They are the first after the step: other hooks see the combined parameters.
- Every rank takes part in every step. A rank without gradients contributes no change.
- Gradients stay local, and so does loss scaling: a rank whose gradients overflowed skips the update and contributes no
  change, and its GradScaler lowers its own scale. For that, GradScaler has to call `step()` on all ranks; it does so for
  optimizers that declare that they unscale gradients themselves.
- Changes travel as float16 only after they have been multiplied by a power of two, the same on all ranks, so that small
  ones do not become zero and the sum does not overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID, ProcessSet
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.arguments import check_passes
from hvdlite_torch.arrays import cuda
from hvdlite_torch.arrays.tensors import as_array, as_runtime_array, contiguous
from hvdlite_torch.compression import Compressor
from hvdlite_torch.optimizer.base import DistributedBase
from hvdlite_torch.optimizer.reduction import ReductionSettings


class DistributedAdasum(DistributedBase):
    """Mixed into the user's optimizer class."""

    _process_set = GLOBAL_PROCESS_SET_ID
    _goes_first = True, True

    def _prepare(self, settings: ReductionSettings) -> None:
        super()._prepare(settings)
        self._counted.have_gradients = True  # they stay local
        self._changes: _Changes | None = None
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients that the step is not to see
        self._base_unscales = getattr(self, "_step_supports_amp_scaling", False)  # fused optimizers

    def _attach(self, runtime: Runtime, label: str | None = None) -> None:
        if runtime.world.size > 1:
            check_whole_job(self._settings.process_set)
        self._name = f"adasum.{runtime.names.label('torch') if label is None else label}"
        self._runtime, self._active = runtime, runtime.world.size > 1
        self._step_supports_amp_scaling = self._active or self._base_unscales
        self._steps, self._check_name = 0, f"{self._name}.check"

    def _detach(self) -> None:
        self._changes, self._hidden = None, []

    def synchronize(self) -> None:
        """Nothing to do: gradients are not reduced."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not possible with Adasum, as in Horovod."""
        if self._active:
            raise AssertionError("skip_synchronize() is not supported with op=Adasum: what step() did is reduced in step()")
        yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to do: gradients are not reduced."""
        return nullcontext()

    def set_weight(self, weight: float) -> None:
        """Not possible with Adasum."""
        raise UnsupportedError("set_weight weights averages: it needs op=Average, not Adasum")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing to do: gradients accumulate until `step()` is called."""
        check_passes(passes)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save the parameters before the step."""
        api.worlds().step_begins()
        if not self._active:
            return
        self._show_gradients()  # if the last step failed
        if not self._base_unscales:
            self._unscale()
        trained = [parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad]
        if self._changes is None or not self._changes.fits(trained):
            self._changes = _Changes(trained, self._settings.compression)
        with torch.no_grad():
            torch._foreach_copy_(self._changes.starts, trained)

    def _combine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the adaptive sum of all ranks' changes the parameters' change.

        Raises:
            HorovodInternalError: when the reduction failed; parameters are as they were before the step.
        """
        if not self._active:
            return
        self._show_gradients()
        changes = self._changes
        with torch.no_grad():
            if changes.parameters:
                torch._foreach_copy_(changes.deltas, changes.parameters)
                torch._foreach_sub_(changes.deltas, changes.starts)
                try:
                    self._reduce(changes)
                    torch._foreach_add_(changes.starts, changes.deltas)
                finally:
                    torch._foreach_copy_(changes.parameters, changes.starts)
        self._runtime.progress.round()

    _stages_before = (DistributedBase._take_part, DistributedBase._compare_once, _begin)
    _stages_after = (_combine, DistributedBase._check_replicas)

    def _reduce(self, changes: _Changes) -> None:
        """Make deltas their adaptive sum over all ranks."""
        scales = self._scales(changes)
        if scales:
            torch._foreach_mul_(changes.narrowed, scales)
        devices = self._runtime.devices
        sent, tensors, contexts = [], [], []
        for delta in changes.real:
            tensor, context = self._settings.compression.compress(delta)
            tensor = cuda.to_transportable(contiguous(tensor, self._name), devices, Collective.ALLREDUCE, ReduceOp.ADASUM)
            sent.append(as_runtime_array(tensor, self._name, devices))
            tensors.append(tensor)
            contexts.append(context)
        cuda.wait(self._runtime.grouped_allreduce(self._name, sent, sent, ReduceOp.ADASUM))
        for delta, tensor, context in zip(changes.real, tensors, contexts, strict=True):
            if tensor.data_ptr() != delta.data_ptr():
                delta.copy_(self._settings.compression.decompress(tensor, context))
        if scales:
            torch._foreach_mul_(changes.narrowed, [1 / scale for scale in scales])

    def _scales(self, changes: _Changes) -> list[float]:
        """Return the factor of deltas that are sent as float16; equal on all ranks.

        The squared length of the adaptive sum of two vectors is at most the sum of theirs. So no element of the sum is
        larger than the longest vector times the root of the number of ranks.
        """
        if not changes.narrowed:
            return []
        device = changes.narrowed[0].device
        lengths = torch.stack([length.to(device, torch.float32) for length in torch._foreach_norm(changes.narrowed)]).cpu()
        name = f"{self._name}.lengths"
        array = as_array(lengths, name)
        self._runtime.allreduce(name, array, array, ReduceOp.MAX).wait()
        largest = 15 - math.ceil(math.log2(self._runtime.world.size) / 2)  # float16 ends at 2**16
        return [2.0 ** min(largest - math.frexp(length)[1], 126) if 0 < length < math.inf else 1.0
                for length in lengths.tolist()]

    def _unscale(self) -> None:
        """Unscale gradients, or hide them if they overflowed; GradScaler leaves this to an optimizer that does it itself."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is None and found_inf is None:
            return
        self.grad_scale = self.found_inf = None  # the base class takes no others; GradScaler deletes them
        owners = [parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None]
        if found_inf is not None and float(found_inf):
            self._hidden = [(parameter, parameter.grad) for parameter in owners]
            for parameter in owners:
                parameter.grad = None
        elif scale is not None:
            inverse = scale.double().reciprocal().float()
            for parameter in owners:
                gradient = parameter.grad
                if gradient.dtype is torch.float16:
                    raise ValueError("Attempting to unscale FP16 gradients.")  # as GradScaler does
                (gradient._values() if gradient.is_sparse else gradient).mul_(inverse.to(gradient.device))

    def _show_gradients(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []


class _Changes:
    """Memory for the changes of a step, reused by later steps.

    Attributes:
        starts: the parameters before the step.
        deltas: the step's changes.
        real: the same memory, complex deltas as pairs of floats.
        narrowed: the wider ones of `real` that are sent as float16.
    """

    def __init__(self, parameters: list[torch.Tensor], compression: type[Compressor]) -> None:
        self.parameters = parameters
        self.starts = [torch.empty_like(parameter, requires_grad=False) for parameter in parameters]
        self.deltas = [torch.empty_like(start, memory_format=torch.contiguous_format) for start in self.starts]
        self.real = [torch.view_as_real(delta) if delta.is_complex() else delta for delta in self.deltas]
        self.narrowed = [delta for delta in self.real if delta.dtype is not torch.float16
                         and compression.compress(delta.new_empty(0))[0].dtype is torch.float16]

    def fits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether the memory fits these parameters."""
        return len(parameters) == len(self.parameters) and all(
            known is parameter and start.shape == parameter.shape and start.dtype is parameter.dtype
            and start.device == parameter.device
            for known, start, parameter in zip(self.parameters, self.starts, parameters, strict=True))


def check_whole_job(process_set: ProcessSet) -> None:
    """Raise Horovod's error for Adasum on some of the ranks."""
    if api.set_id(process_set) != GLOBAL_PROCESS_SET_ID:
        raise NotImplementedError("DistributedOptimizer with op=Adasum works on all ranks only, as in Horovod; leave "
                                  "process_set out, or use hvd.allreduce(..., op=Adasum, process_set=...)")
