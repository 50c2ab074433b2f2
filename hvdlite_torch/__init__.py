"""hvdlite for PyTorch: `import hvdlite_torch as hvd`."""

from hvdlite import (
    HorovodInternalError,
    HvdliteError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    PeerLeftError,
    PeerLostError,
    ProcessSet,
    ReduceOp,
    __version__,
    add_process_set,
    barrier,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from hvdlite import api as _api
from hvdlite_torch.compression import Compression
from hvdlite_torch.framework import narrow as _narrow
from hvdlite_torch.framework import widen as _widen
from hvdlite_torch.ops import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
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
    synchronize,
)
from hvdlite_torch.optimizer import DistributedOptimizer
from hvdlite_torch.state import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

_api.offer_casts(_widen, _narrow)

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "HvdliteError", "Max", "Min",
    "MismatchError", "NotInitializedError", "PeerFailedError", "PeerLeftError", "PeerLostError", "ProcessSet", "Product",
    "ReduceOp", "Sum", "__version__", "add_process_set", "allgather", "allgather_async", "allgather_object", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "cross_rank", "cross_size", "gather", "global_process_set", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous",
    "is_initialized", "join", "local_rank", "local_size", "poll", "rank", "recv", "recv_async", "reduce", "reducescatter",
    "reducescatter_async", "remove_process_set", "scatter", "send", "send_async", "shutdown", "size", "synchronize",
]
