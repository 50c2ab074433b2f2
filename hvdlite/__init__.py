"""hvdlite: data-parallel training with Horovod's programming model, in pure Python.

`import hvdlite as hvd` works on NumPy and CuPy arrays; `hvdlite_torch` on PyTorch tensors and optimizers; `hvdlite_tf` and
`hvdlite_tf.keras` on those of TensorFlow and Keras.
"""

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

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "gather", "grouped_allgather",
    "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "grouped_reducescatter", "join", "poll", "recv", "recv_async", "reduce", "reducescatter", "reducescatter_async",
    "run", "scatter", "send", "send_async", "synchronize",
]
__all__ += frontend.__all__
