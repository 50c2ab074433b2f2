"""PyTorch Lightning on hvdlite: `Trainer(strategy=HvdliteStrategy())`, started by hvdrun.

Lightning had a Horovod strategy until 2.0; this one has its behaviour, with gradients that are final when `backward` ends.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import torch

try:
    from lightning.fabric.plugins.environments import ClusterEnvironment
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError:
    try:
        from lightning_fabric.plugins.environments import ClusterEnvironment
        from pytorch_lightning.strategies import ParallelStrategy
        from pytorch_lightning.trainer.states import TrainerFn
        from pytorch_lightning.utilities.rank_zero import rank_zero_only
    except ImportError:
        raise ImportError("hvdlite_torch.lightning needs Lightning 2: pip install 'hvdlite[lightning]'") from None

import hvdlite_torch as hvd
from hvdlite import api, boundaries
from hvdlite.core.errors import UnsupportedError
from hvdlite.core.types import ReduceOp
from hvdlite.training.outer.settings import DiLoCo
from hvdlite_torch.collectives.broadcasts import BufferBroadcast

_OPS = {"mean": ReduceOp.AVERAGE, "avg": ReduceOp.AVERAGE, "sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX,
        "product": ReduceOp.PRODUCT}


class HvdliteEnvironment(ClusterEnvironment):
    """Lightning's view of ranks and sizes, taken from hvdlite."""

    @property
    def creates_processes_externally(self) -> bool:
        """True, because hvdrun starts the ranks."""
        return True

    @property
    def main_address(self) -> str:
        """Not used: hvdlite has its own rendezvous."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Not used, like `main_address`."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: this environment is part of the strategy."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return hvd.size()

    def set_world_size(self, size: int) -> None:
        """Nothing to do."""

    def global_rank(self) -> int:
        """Return this rank."""
        return hvd.rank()

    def set_global_rank(self, rank: int) -> None:
        """Nothing to do."""

    def local_rank(self) -> int:
        """Return this process's local rank."""
        return hvd.local_rank()

    def node_rank(self) -> int:
        """Return this host's index."""
        return hvd.cross_rank()


class HvdliteStrategy(ParallelStrategy):
    """One replica per rank; optimizers are wrapped, parameters broadcast from rank 0, logged values reduced.

    Use `Trainer(strategy=HvdliteStrategy(), devices=1)` and start the script with `hvdrun -np N`. Metrics of torchmetrics
    that are attributes of the LightningModule when `fit`, `validate` or `test` begins are computed over all ranks.

    Args:
        optimizer_arguments: for every `hvdlite_torch.DistributedOptimizer`, such as `compression=Compression.bf16`.
        broadcast_buffers: like DDP's: give all ranks rank 0's buffers before each training step.
        outer: for every optimizer, see `DistributedOptimizer`. Everything is merged before Lightning saves, and at the end
            of `fit`.
        stop_on_request: end `fit` after the same batch on all ranks when one of them is asked to; see `hvd.stop_requested`.
            `Trainer(min_epochs=...)` comes first.
        arguments: of Lightning's `ParallelStrategy`.

    Raises:
        UnsupportedError: in an elastic job.
    """

    strategy_name = "hvdlite"
    is_distributed = True
    model: Any

    def __init__(self, optimizer_arguments: dict[str, Any] | None = None, broadcast_buffers: bool = False,
                 stop_on_request: bool = False, outer: DiLoCo | None = None, **arguments: Any) -> None:
        hvd.init()
        if api.is_elastic():
            raise UnsupportedError("HvdliteStrategy does not work in an elastic job: Lightning's Trainer keeps the ranks "
                                   "with which it begins. Write the loop with hvd.elastic.run and TorchState, or start the "
                                   "job without --min-np and --host-discovery-script")
        super().__init__(cluster_environment=HvdliteEnvironment(), **arguments)
        self._optimizer_arguments = {**(optimizer_arguments or {}), **({} if outer is None else {"outer": outer})}
        self._broadcasts_buffers, self._stops_on_request = broadcast_buffers, stop_on_request
        self._buffers: BufferBroadcast | None = None
        rank_zero_only.rank = hvd.rank()

    @property
    def root_device(self) -> torch.device:
        """The device of this rank's replica."""
        return torch.device("cpu") if not self.parallel_devices else self.parallel_devices[0]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of Lightning's samplers."""
        return {"num_replicas": hvd.size(), "rank": hvd.rank()}

    def setup(self, trainer: Any) -> None:
        """Broadcast rank 0's model, and wrap the optimizers."""
        self.accelerator.setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync:
            self.model = hvd.SyncBatchNorm.convert_sync_batchnorm(self.model)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.synchronize_metrics(self.model)
        self._buffers = BufferBroadcast(self.model) if self._broadcasts_buffers else None
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                hvd.DistributedOptimizer(optimizer, self._names(optimizer), **self._optimizer_arguments)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Put the model on this rank's device."""
        self.model.to(self.root_device)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Like the base class's, after broadcasting buffers if requested."""
        if self._buffers is not None:
            self._buffers()
        return super().training_step(*args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let this batch be the last one, if it is time to stop."""
        if self._stops_on_request:
            _leave_out_lightnings_own()
            if boundaries.stop_requested():
                self.lightning_module.trainer.should_stop = True

    def on_train_end(self) -> None:
        """Merge what workers have learned."""
        self._merge()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Like the base class's, of parameters that are the same on all ranks; all ranks call this when Lightning saves."""
        self._merge()
        return super().lightning_module_state_dict()

    def _merge(self) -> None:
        if self._optimizer_arguments.get("outer") is not None:
            for optimizer in self.optimizers:
                optimizer.synchronize_outer(self.model)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return all ranks' tensors, stacked along a new first dimension.

        Args:
            sync_grads: make it differentiable: as under DDP, gradients are the sum of all ranks' upstream gradients.
        """
        return hvd.allgather(tensor[None] if sync_grads else tensor.detach()[None], horovod_gradient=False)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the reduction of a tensor over all ranks; anything else is returned as it is.

        Raises:
            ValueError: for an unknown `reduce_op`.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = "mean" if reduce_op is None else str(reduce_op).lower().rpartition(".")[2]
        if name not in _OPS:
            raise ValueError(f"reduce_op {reduce_op!r} is not one of {', '.join(_OPS)}")
        if name in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.float()
        return hvd.allreduce(tensor.detach(), op=_OPS[name])

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object."""
        return hvd.broadcast_object(obj, src)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if api.is_initialized():  # Lightning also calls this after shutdown
            hvd.barrier()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which gradients accumulate locally."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def _names(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return [(name, parameter) for name, parameter in self.model.named_parameters() if id(parameter) in own]


def _leave_out_lightnings_own() -> None:
    """Take Lightning's handler of SIGTERM out, which raises an exception after the batch on the rank that has got it."""
    composed = signal.getsignal(signal.SIGTERM)
    if type(composed).__name__ != "_HandlersCompose":
        return
    others = [each for each in getattr(composed, "signal_handlers", ())
              if type(getattr(each, "__self__", None)).__name__ != "_SignalConnector"]
    signal.signal(signal.SIGTERM, others[-1] if others else signal.SIG_DFL)
