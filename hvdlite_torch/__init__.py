"""hvdlite for PyTorch: `import hvdlite_torch as hvd`."""

from hvdlite import api as _api
from hvdlite import frontend, join
from hvdlite.frontend import *
from hvdlite_torch import casts as _casts
from hvdlite_torch import comm_hooks, elastic
from hvdlite_torch.buffers import broadcast_buffers
from hvdlite_torch.compression import Compression
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
    recv,
    recv_async,
    reduce,
    reducescatter,
    reducescatter_async,
    scatter,
    send,
    send_async,
    sparse_allreduce_async,
    synchronize,
)
from hvdlite_torch.optimizer import DistributedOptimizer
from hvdlite_torch.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    check_replicas,
)
from hvdlite_torch.sync_batch_norm import SyncBatchNorm

_api.offer_casts(_casts.widen, _casts.narrow, _casts.reduce_pair)

__all__ = [
    "Compression", "DistributedOptimizer", "MirroredStrategy", "SyncBatchNorm", "allgather", "allgather_async",
    "allgather_object", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_buffers", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "check_replicas", "comm_hooks", "elastic", "gather",
    "gather_all_tensors", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "join",
    "poll", "recv", "recv_async", "reduce", "reducescatter", "reducescatter_async", "scatter", "send", "send_async",
    "sparse_allreduce_async", "synchronize", "synchronize_metrics",
]
__all__ += frontend.__all__
