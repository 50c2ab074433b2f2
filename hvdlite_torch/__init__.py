"""hvdlite for PyTorch: `import hvdlite_torch as hvd`.

Names are loaded when they are first used, with what they need of hvdlite: a script does not wait for what it does not use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlite import frontend, join
    from hvdlite.frontend import *
    from hvdlite_torch import comm_hooks, elastic
    from hvdlite_torch.checkpoints import load, save
    from hvdlite_torch.checkpoints.resumable_loader import resumable
    from hvdlite_torch.collectives.broadcasts import (
        allgather_object,
        broadcast_buffers,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        check_replicas,
    )
    from hvdlite_torch.compression import Compression
    from hvdlite_torch.memory_usage import memory_report
    from hvdlite_torch.metrics import gather_all_tensors, synchronize_metrics
    from hvdlite_torch.mirrored import MirroredStrategy
    from hvdlite_torch.ops import (
        allgather,
        allgather_async,
        allreduce,
        allreduce_,
        allreduce_async,
        allreduce_async_,
        alltoall,
        alltoall_async,
        broadcast,
        broadcast_,
        broadcast_async,
        broadcast_async_,
        gather,
        grouped_allgather,
        grouped_allgather_async,
        grouped_allreduce,
        grouped_allreduce_,
        grouped_allreduce_async,
        grouped_allreduce_async_,
        grouped_reducescatter,
        grouped_reducescatter_async,
        poll,
        reduce,
        reducescatter,
        reducescatter_async,
        scatter,
        sparse_allreduce_async,
        synchronize,
    )
    from hvdlite_torch.optimizer import DiLoCo, DistributedOptimizer, LocalSGD
    from hvdlite_torch.sync_batch_norm import SyncBatchNorm
    from hvdlite_torch.transfers import recv, recv_async, send, send_async

    __all__ = [
        "Compression", "DiLoCo", "DistributedOptimizer", "LocalSGD", "MirroredStrategy", "SyncBatchNorm", "allgather",
        "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
        "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_buffers",
        "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "check_replicas", "comm_hooks", "elastic",
        "gather", "gather_all_tensors", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
        "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
        "grouped_reducescatter_async", "join", "load", "memory_report", "poll", "recv", "recv_async", "reduce",
        "reducescatter", "reducescatter_async", "resumable", "save", "scatter", "send", "send_async",
        "sparse_allreduce_async", "synchronize", "synchronize_metrics",
    ]
    __all__ += frontend.__all__
else:
    _HOMES = {
        "checkpoints": ["load", "save"],
        "collectives.broadcasts": ["allgather_object", "broadcast_buffers", "broadcast_object", "broadcast_optimizer_state",
                                   "broadcast_parameters", "check_replicas"],
        "compression": ["Compression"],
        "memory_usage": ["memory_report"],
        "metrics": ["gather_all_tensors", "synchronize_metrics"],
        "mirrored": ["MirroredStrategy"],
        "ops": ["allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
                "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "gather",
                "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
                "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
                "grouped_reducescatter_async", "poll", "reduce", "reducescatter", "reducescatter_async", "scatter",
                "sparse_allreduce_async", "synchronize"],
        "optimizer": ["DiLoCo", "DistributedOptimizer", "LocalSGD"],
        "checkpoints.resumable_loader": ["resumable"],
        "sync_batch_norm": ["SyncBatchNorm"],
        "transfers": ["recv", "recv_async", "send", "send_async"],
    }
    _WHERE = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> Any:
        value = globals()[name] = _load(name)
        return value

    def _load(name: str) -> Any:
        """Return what this module has under a name that is used for the first time."""
        import importlib
        import importlib.util

        if name in _WHERE:
            try:
                return getattr(importlib.import_module(f"hvdlite_torch.{_WHERE[name]}"), name)
            except ModuleNotFoundError as error:
                if error.name != "torch":
                    raise
                raise ImportError(f"hvdlite_torch.{name} needs torch: pip install 'hvdlite[torch]'") from None
        if not name.startswith("_") and importlib.util.find_spec(f"hvdlite_torch.{name}"):
            return importlib.import_module(f"hvdlite_torch.{name}")
        from hvdlite import frontend, join

        if name == "__all__":
            return [*_WHERE, "comm_hooks", "elastic", "join", *frontend.__all__]
        if name == "join":
            return join
        if name in frontend.__all__:
            return getattr(frontend, name)
        raise AttributeError(f"module 'hvdlite_torch' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(__getattr__("__all__"))
