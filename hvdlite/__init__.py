"""hvdlite: data-parallel training with Horovod's programming model, in pure Python.

`import hvdlite as hvd` works on NumPy arrays; `hvdlite_torch` on PyTorch tensors and optimizers.
"""

from hvdlite._version import __version__
from hvdlite.api import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    cross_rank,
    cross_size,
    gather,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    poll,
    rank,
    reduce,
    reducescatter,
    reducescatter_async,
    remove_process_set,
    scatter,
    shutdown,
    size,
    synchronize,
)
from hvdlite.core.errors import (
    ConfigError,
    DuplicateNameError,
    HorovodInternalError,
    HvdliteError,
    LaunchError,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    PeerLeftError,
    PeerLostError,
    UnsupportedError,
)
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp

__all__ = [
    "Adasum", "Average", "ConfigError", "DuplicateNameError", "HorovodInternalError", "HvdliteError", "LaunchError",
    "Max", "Min", "MismatchError", "NotInitializedError", "PeerFailedError", "PeerLeftError", "PeerLostError",
    "ProcessSet", "Product", "ReduceOp", "Sum", "UnsupportedError", "__version__", "add_process_set", "allgather",
    "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async",
    "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "cross_rank", "cross_size", "gather",
    "global_process_set", "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "poll", "rank",
    "reduce", "reducescatter", "reducescatter_async", "remove_process_set", "scatter", "shutdown", "size", "synchronize",
]
