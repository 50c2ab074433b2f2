"""`DistributedOptimizer(..., op=Adasum)`: every rank steps by itself, then the ranks' steps are combined.

What is summed adaptively is what the optimizer did to the parameters, not the gradient, so that momentum and learning rates
are part of it. Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, section 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.arguments import check_passes
from hvdlite_torch import cuda
from hvdlite_torch.compression import Compressor
from hvdlite_torch.framework import contiguous, lent


class DistributedAdasum:
    """Mixed into the user's optimizer class."""

    param_groups: list[dict[str, Any]]

    def _attach(self, runtime: Runtime, names: dict[torch.Tensor, str], label: str, compression: type[Compressor],
                passes: int) -> None:
        self._runtime, self._label, self._compression = runtime, label, compression
        self._parameter_names = dict(names)
        self._passes, self._passes_done = passes, 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank, and make the adaptive sum of all ranks' steps the parameters' change.

        With `backward_passes_per_step`, all but every so-manieth call return at once: gradients go on accumulating.
        """
        self._passes_done += 1
        if self._passes_done < self._passes:
            return None
        self._passes_done = 0
        parameters = [parameter for parameter in self._parameters() if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        loss = super().step(closure) if closure is not None else super().step()  # type: ignore[misc]
        handles = []
        with torch.no_grad():
            for parameter, start in zip(parameters, before, strict=True):
                name = f"adasum.{self._label}.{self._parameter_names[parameter]}"
                delta, context = self._compression.compress(contiguous(parameter - start, name))
                delta = cuda.carried(delta, self._runtime.devices, Collective.ALLREDUCE, ReduceOp.ADASUM)
                array = lent(delta, name, self._runtime.devices)
                handles.append((self._runtime.allreduce(name, array, array, ReduceOp.ADASUM), delta, context))
            for parameter, start, (handle, delta, context) in zip(parameters, before, handles, strict=True):
                cuda.wait(handle)
                parameter.copy_(start + self._compression.decompress(delta, context).to(start.device))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like the base class's; does nothing between the accumulated backward passes of one step."""
        if self._passes_done == 0:
            super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def synchronize(self) -> None:
        """Nothing to do: gradients are not reduced."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Not possible with Adasum, as in Horovod."""
        raise AssertionError("skip_synchronize() is not supported with op=Adasum: what step() did is reduced in step()")
        yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing to do: gradients are not reduced."""
        return _nothing()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are accumulated before each step."""
        check_passes(passes)
        self._passes, self._passes_done = passes, 0

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group, settings in enumerate(self.param_groups):
            for index, parameter in enumerate(settings["params"]):
                self._parameter_names.setdefault(parameter, f"noname.{group}.{index}")  # of a group added later
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def check_whole_job(process_set: int) -> None:
    """Raise Horovod's error for Adasum on some of the ranks."""
    if process_set != GLOBAL_PROCESS_SET_ID:
        raise NotImplementedError("DistributedOptimizer with op=Adasum works on all ranks only, as in Horovod; leave "
                                  "process_set out, or use hvd.allreduce(..., op=Adasum, process_set=...)")
