"""What `import hvdlite as hvd` offers, for NumPy and CuPy arrays."""

from hvdlite import frontend
from hvdlite.frontend import *
from hvdlite.launch.run_function import run
from hvdlite.ops import (
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
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    join,
    poll,
    reduce,
    reducescatter,
    reducescatter_async,
    scatter,
    synchronize,
)
from hvdlite.training.checkpoints import load, save
from hvdlite.transfers import recv, recv_async, send, send_async

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "gather", "grouped_allgather",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "join", "load", "poll", "recv", "recv_async", "reduce", "reducescatter",
    "reducescatter_async", "run", "save", "scatter", "send", "send_async", "synchronize",
]
__all__ += frontend.__all__
