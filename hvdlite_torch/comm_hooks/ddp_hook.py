"""Communication hooks that were written for torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdlite import api
from hvdlite.core.errors import UnsupportedError
from hvdlite_torch.comm_hooks.exchange import Exchange, Gradients

_FIRST_BYTES = 1 << 20
"""The size of the first bucket, like DDP's."""


class GradBucket:
    """Gradients in one flat tensor; has the methods of `torch.distributed.GradBucket`, which cannot be made from Python."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._is_last = False
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._own = self._buffer = torch.empty(0)

    def index(self) -> int:
        """Return the bucket's index; the same in every step."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of a step."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return the flat tensor of all gradients."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the flat tensor, by one of another dtype for example, for this step."""
        self._buffer = tensor

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the parameters, as views of `buffer()`."""
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]

    def _load(self, gradients: dict[str, torch.Tensor], is_last: bool) -> None:
        """Copy gradients in, and zeros for those that no rank has in this step."""
        self._buffer, self._is_last = self._own, is_last
        for name, part in zip(self._names, self.gradients(), strict=True):
            if name in gradients:
                part.copy_(gradients[name])
            else:
                part.zero_()

    def _store(self, gradients: dict[str, torch.Tensor], result: torch.Tensor) -> None:
        """Copy what the hook's future returned to the gradients."""
        self._buffer = result.reshape(-1)
        for name, part in zip(self._names, self.gradients(), strict=True):
            if name in gradients:
                gradients[name].copy_(part)
        self._buffer = self._own


class DDPHook:
    """Runs a hook for torch's `DistributedDataParallel.register_comm_hook(state, hook)`.

    The hook is called for one bucket after the other, after backward. Collectives of `torch.distributed` need
    `torch.distributed.init_process_group` with the ranks that share gradients, so that elastic jobs have none. The state is
    the script's to save.

    Args:
        state: is passed to the hook.
        hook: takes `state` and a bucket; returns a `torch.futures.Future` of the averages, a tensor like `bucket.buffer()`.
        bucket_cap_mb: the size of the buckets in MiB, after a first one of 1 MiB; like DDP's.
    """

    def __init__(self, state: Any, hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]],
                 bucket_cap_mb: float = 25.0) -> None:
        if not callable(hook):
            raise ValueError(f"hook must be a function of (state, bucket), not {hook!r}")
        self._state, self._hook = state, hook
        self._bytes = int(bucket_cap_mb * (1 << 20))
        self._buckets: list[GradBucket] = []
        self._names: set[str] = set()  # of all gradients in buckets

    def reduce(self, gradients: Gradients, exchange: Exchange) -> None:
        """Call the hook, which averages the gradients.

        Args:
            gradients, exchange: as in `CommHook`.

        Raises:
            UnsupportedError: in an elastic job with a process group of torch.distributed, and when ranks have joined.
        """
        if api.is_elastic() and dist.is_available() and dist.is_initialized():
            raise UnsupportedError("comm_hooks.DDPHook does not work in an elastic job: the process group of "
                                   "torch.distributed, which its hook uses, keeps the ranks with which it was made. Use "
                                   "comm_hooks.PowerSGD or compression=, or start the job without --min-np and "
                                   "--host-discovery-script")
        if exchange.active < exchange.size:
            raise UnsupportedError(f"comm_hooks.DDPHook does not work with join(): {exchange.size - exchange.active} of "
                                   f"{exchange.size} ranks have joined, and take no part in the collectives of its hook. "
                                   "Use comm_hooks.PowerSGD or compression=")
        new = [(name, parameter, gradient) for (name, gradient), parameter in
               zip(gradients, exchange.parameters, strict=True) if name not in self._names]
        if new:
            self._add(new)
        present = dict(gradients)
        for bucket in self._buckets:
            bucket._load(present, bucket is self._buckets[-1])
            bucket._store(present, self._called(bucket))

    def _called(self, bucket: GradBucket) -> torch.Tensor:
        try:
            future = self._hook(self._state, bucket)
        except Exception as error:
            if dist.is_available() and not dist.is_initialized():
                raise RuntimeError("the hook of comm_hooks.DDPHook failed, and torch.distributed is not initialized: call "
                                   "torch.distributed.init_process_group, with the ranks that share gradients, before "
                                   f"backward. {type(error).__name__}: {error}") from error
            raise
        result: Any = future.wait() if isinstance(future, torch._C.Future) else future  # the base of torch.futures.Future
        result = result[0] if isinstance(result, (list, tuple)) else result
        if not isinstance(result, torch.Tensor) or result.numel() != bucket.buffer().numel():
            raise TypeError(f"the hook of comm_hooks.DDPHook must return a torch.futures.Future of a tensor like "
                            f"bucket.buffer(), with {bucket.buffer().numel()} elements; it returned {result!r:.200}")
        return result

    def _add(self, new: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        """Create buckets for new gradients: the last ones first, with one dtype per bucket."""
        open_buckets: dict[tuple[torch.dtype, torch.device], tuple[GradBucket, int, int]] = {}
        made: list[tuple[GradBucket, torch.Tensor]] = []
        for name, parameter, gradient in reversed(new):
            kind = (gradient.dtype, gradient.device)
            bucket, size, limit = open_buckets.get(kind, (None, 0, 0))
            if bucket is None or size >= limit:
                bucket, size = GradBucket(len(self._buckets)), 0
                limit = self._bytes if self._buckets else min(_FIRST_BYTES, self._bytes)
                self._buckets.append(bucket)
                made.append((bucket, gradient))
            bucket._names.append(name)
            bucket._parameters.append(parameter)
            self._names.add(name)
            open_buckets[kind] = bucket, size + gradient.nbytes, limit
        for bucket, gradient in made:
            bucket._own = gradient.new_empty(sum(parameter.numel() for parameter in bucket._parameters))
