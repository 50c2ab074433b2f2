"""`MirroredStrategy` for PyTorch: one replica of the model per rank."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.mirrored.scopes import LaunchableStrategy, Scopes, parse_reduce_op
from hvdlite.training.mirrored.shards import CurrentBatch
from hvdlite.training.mirrored.shares import Shares
from hvdlite_torch.compression import Compression, Compressor
from hvdlite_torch.mirrored.distributed_loader import DistributedLoader
from hvdlite_torch.mirrored.scope_registry import ScopeRegistry, TorchReplicaGroup
from hvdlite_torch.rows import mapped
from hvdlite_torch.uncompiled import leave_to_python

_scopes: Scopes[ScopeRegistry] = Scopes(
    {torch.nn.Module: ScopeRegistry.add_module, torch.optim.Optimizer: ScopeRegistry.add_optimizer}, "MirroredStrategy")


class MirroredStrategy(LaunchableStrategy):
    """Trains one replica of the model per rank; make modules and optimizers inside `with strategy.scope():`.

    Optimizers that are made in the scope average their gradients over the ranks (see `DistributedOptimizer`). Parameters,
    buffers and optimizer state become rank 0's: parameters when the optimizer is made, and everything before the first batch
    of a distributed loader, `run` or step after that, and again after a `load_state_dict` of something made in the scope.
    Batches are global: `distribute` gives each rank its shard, and averages are weighted by samples, so losses must be means
    over the batch. Without a launcher there is one replica, and everything runs as without a strategy.

    A `load_state_dict` may be called on some ranks only: rank 0's values count. Running statistics of BatchNorm are each
    rank's own, after the first step (see `broadcast_buffers`).

    Args:
        devices: how many ranks `launch` starts when no launcher has; a number, or as many as the list is long.
        scale_learning_rate: multiply learning rates (also of parameter groups that are added) by the number of replicas.
        sync_batch_norm: make BatchNorm layers of the scope `hvd.SyncBatchNorm`: they normalise the global batch.
        backward_passes_per_step: like `DistributedOptimizer`'s.
        compression: like `DistributedOptimizer`'s.
        shares: of each replica in global batches: None for equal ones, a number for each replica (a list) or for each
            replica of a host (a dict by host name), or "auto": they follow the speeds of replicas.
        max_rows: the most rows of a replica in a batch, or a list with a number for each.
        process_set: the ranks that have replicas; on others, there is one replica.

    Raises:
        LaunchError: when there is a launch environment, and ranks cannot meet; `hvd.init()` is called here if need be.
        UnsupportedError: for an unregistered process set.
        ValueError: for devices that are neither counted nor listed, and for other shares.
        MismatchError: on all ranks, when they ask for different shares.
    """

    _runtime: Runtime | None = None
    """None: this process's own."""

    def __init__(self, devices: int | Sequence[Any] | None = None, *, scale_learning_rate: bool = False,
                 sync_batch_norm: bool = False, backward_passes_per_step: int = 1,
                 compression: type[Compressor] = Compression.none,
                 shares: str | Sequence[float] | Mapping[str, float] | None = None,
                 max_rows: int | Sequence[int] | None = None, process_set: ProcessSet = global_process_set) -> None:
        if self._runtime is None and not api.is_initialized():
            api.init()
        super().__init__(devices)
        self._settings: dict[str, Any] = {
            "scale_learning_rate": scale_learning_rate, "sync_batch_norm": sync_batch_norm,
            "backward_passes_per_step": backward_passes_per_step, "compression": compression, "shares": shares,
            "max_rows": max_rows}
        self._replicas = TorchReplicaGroup(self._runtime or api.runtime(), api.set_id(process_set))
        self._shares = Shares(self._replicas, shares, max_rows)
        self._registry = ScopeRegistry(
            self._replicas, process_set, learning_rate_factor=self._replicas.size if scale_learning_rate else 1,
            sync_batch_norm=sync_batch_norm, backward_passes_per_step=backward_passes_per_step, compression=compression)
        self._current = CurrentBatch(self._replicas, self._registry.set_weight)

    def __reduce__(self) -> Any:
        """A copy in another process, where `launch` brings it, is a strategy of that process's job."""
        return functools.partial(MirroredStrategy, self.devices, **self._settings), ()

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas: of ranks in the process set."""
        return self._replicas.size

    @property
    def weight(self) -> float:
        """The weight of this rank's mean over the current batch in the average of all ranks' means; 1 in even batches.

        Gradients that a backward pass accumulates, or that a script sets itself, are multiplied by it before they are
        averaged. Gradients that `torch.autograd.grad` returns are not.
        """
        return self._current.weight

    @contextmanager
    def scope(self) -> Iterator[MirroredStrategy]:
        """Distribute optimizers that this thread makes inside, and remember modules.

        An optimizer of any class is distributed when `torch.optim.Optimizer.__init__` has run. `Optimizer.__init__` and
        `Module.__init__` are replaced while any thread is in a scope, and restored afterwards.

        Raises:
            RuntimeError: inside another strategy's scope, or when another thread is inside this one's.
        """
        if (self.devices or 1) > 1 and self._replicas.size == 1:
            warnings.warn(f"MirroredStrategy(devices={self.devices}), but this is the only rank: start the ranks with "
                          f"strategy.launch(main), or with hvdrun -np {self.devices}", stacklevel=3)
        with _scopes.entered(self._registry):
            yield self

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return `fn(*args, **kwargs)`, after mirroring if that is due; all ranks call this together.

        Args:
            fn: a function of one step.
            args: its arguments.
            kwargs: likewise.
        """
        self._registry.schedule.agree()
        self._registry.mirror_if_due()
        return fn(*args, **(kwargs or {}))

    @leave_to_python
    def mirror(self) -> None:
        """Give all parameters, buffers and optimizer state of the scope rank 0's values now; all ranks call this together.

        Loops mirror parameters by themselves. Call this after changes that a strategy cannot notice, such as those of
        BatchNorm's running statistics before an evaluation.

        Raises:
            MismatchError: on all ranks, when they have made different modules or optimizers.
        """
        self._registry.mirror()

    def distribute(self, loader: Iterable[Any]) -> DistributedLoader:
        """Return a loader of this rank's shard of the global batches that `loader` yields; all ranks call this.

        See `distributed_loader` for what is split how. A batch with fewer rows than there are replicas goes to all of them.
        The last batch that a loop has taken is the current batch, until the loop ends.

        Args:
            loader: a DataLoader over all samples with the global batch size, or an iterable of batches (structures of
                tensors and arrays).

        Raises:
            ValueError: when the loader's sampler already splits the samples.
        """
        if isinstance(loader, DistributedLoader):
            return loader
        return DistributedLoader(loader, self._replicas, self._registry, self._current, self._shares)

    @leave_to_python
    def reduce(self, op: str | ReduceOp, value: Any, axis: int | None = None) -> Any:
        """Return the reduction of every replica's value, on all of them; all ranks call this together. Not differentiable.

        Values belong to the current batch: a MEAN is weighted by each replica's samples, so that the mean of the losses is
        that of the global batch. A SUM counts a batch that all replicas have whole once. Outside of loops over distributed
        batches all replicas have the same weight.

        Args:
            op: "SUM" or "MEAN", or a `ReduceOp`.
            value: a tensor, a number, or a structure (dict, list, tuple) of them.
            axis: reduce over this axis too, whose length may differ between replicas: a MEAN is that of all elements then.

        Returns:
            A structure like `value`; a float or int for a number. Means of integers are floats.

        Raises:
            ValueError: for another op, and for an axis with an op other than SUM and MEAN.
        """
        operation = parse_reduce_op(op)
        if axis is not None and operation not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ValueError(f"reduce over an axis is for SUM and MEAN, not {operation.name}")
        return mapped(value, lambda leaf: self._reduced(operation, leaf, axis))

    @leave_to_python
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Return every replica's value, concatenated along an axis in the order of the global batch, on all replicas.

        Of a batch that all replicas have whole, one copy. All ranks call this together. Not differentiable.

        Args:
            value: a tensor, or a structure (dict, list, tuple) of them; lengths may differ between replicas along the axis.
            axis: the dimension.

        Raises:
            ValueError: for a scalar.
            MismatchError: on all ranks, when shapes differ in another axis, or dtypes do.
        """
        def gathered(leaf: Any) -> torch.Tensor:
            tensor = torch.as_tensor(leaf)
            if tensor.dim() == 0:
                raise ValueError("gather concatenates tensors of one dimension or more; this one is a scalar")
            if self._current.is_repeated:
                return tensor.detach().clone()
            return torch.cat([part.movedim(0, axis) for part in self._replicas.allgather(tensor.movedim(axis, 0))], axis)
        return mapped(value, gathered)

    def _reduced(self, op: ReduceOp, value: Any, axis: int | None) -> Any:
        wide = {float: torch.float64, complex: torch.complex128}.get(type(value))  # Python's numbers are not rounded
        tensor = torch.as_tensor(value, dtype=wide).detach()
        averages = op is ReduceOp.AVERAGE
        if averages and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.get_default_dtype() if isinstance(value, torch.Tensor) else torch.float64)
        result = tensor
        if axis is not None:
            result = self._over_axis(tensor, axis, averages)
        elif averages and self._current.weight != 1:
            result = self._replicas.allreduce(tensor * self._current.weight, op)
        elif op is not ReduceOp.SUM or not self._current.is_repeated:
            result = self._replicas.allreduce(tensor, op)
        return result if isinstance(value, torch.Tensor) else result.item() if result.dim() == 0 else result

    def _over_axis(self, tensor: torch.Tensor, axis: int, averages: bool) -> torch.Tensor:
        """Return sum or mean over an axis and the replicas; sums are kept in float64, so that no count is rounded."""
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64) if averages else tensor
        sums = wide.sum(axis)
        if self._current.is_repeated:
            total, count = sums, torch.tensor(tensor.shape[axis])
        elif averages:
            both = torch.cat([sums.reshape(-1), sums.new_tensor([tensor.shape[axis]])])
            both = self._replicas.allreduce(both, ReduceOp.SUM)
            total, count = both[:-1].reshape(sums.shape), both[-1]
        else:
            return self._replicas.allreduce(sums, ReduceOp.SUM)
        return (total / count).to(tensor.dtype) if averages else total
