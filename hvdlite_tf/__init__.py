"""hvdlite for TensorFlow 2: `import hvdlite_tf as hvd`. For Keras 3 on any backend: `import hvdlite_tf.keras as hvd`."""

from __future__ import annotations

import importlib
from typing import Any

from hvdlite import (
    Adasum,
    Average,
    ConfigError,
    DuplicateNameError,
    HorovodInternalError,
    HvdliteError,
    LaunchError,
    Max,
    Min,
    MismatchError,
    NotInitializedError,
    PeerFailedError,
    PeerLeftError,
    PeerLostError,
    ProcessSet,
    Product,
    ReduceOp,
    ReplicaMismatchError,
    StallError,
    Sum,
    UnsupportedError,
    __version__,
    add_process_set,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    record_step,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    story,
)
from hvdlite_tf.compression import Compression

_HOMES = {
    "ops": ["allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "grouped_allgather", "grouped_allreduce",
            "grouped_reducescatter", "join", "local_rank_op", "local_size_op", "process_set_included_op", "rank_op",
            "reducescatter", "size_op"],
    "functions": ["allgather_object", "broadcast_global_variables", "broadcast_object", "broadcast_object_fn",
                  "broadcast_variables"],
    "gradient_tape": ["DistributedGradientTape", "PartialDistributedGradientTape"],
    "keras.tf_mirrored": ["MirroredStrategy"],
    "keras.optimizer": ["DistributedOptimizer", "PartialDistributedOptimizer"],
    "sync_batch_norm": ["SyncBatchNormalization"],
    "keras": ["keras"],
}
"""Where names come from that need TensorFlow or Keras: imported when they are first asked for."""
_WHERE = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Adasum", "Average", "Compression", "ConfigError", "DistributedGradientTape", "DistributedOptimizer",
    "DuplicateNameError", "HorovodInternalError", "HvdliteError", "LaunchError", "Max", "Min", "MirroredStrategy",
    "MismatchError", "NotInitializedError", "PartialDistributedGradientTape", "PartialDistributedOptimizer",
    "PeerFailedError", "PeerLeftError", "PeerLostError", "ProcessSet", "Product", "ReduceOp", "ReplicaMismatchError",
    "StallError", "Sum", "SyncBatchNormalization", "UnsupportedError", "__version__", "add_process_set", "allgather",
    "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_", "broadcast_global_variables",
    "broadcast_object", "broadcast_object_fn", "broadcast_variables", "ccl_built", "cross_rank", "cross_size",
    "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather",
    "grouped_allreduce", "grouped_reducescatter", "init", "is_homogeneous", "is_initialized", "join", "keras",
    "local_rank", "local_rank_op", "local_size", "local_size_op", "mpi_built", "mpi_enabled", "mpi_threads_supported",
    "nccl_built", "process_set_included_op", "rank", "rank_op", "record_step", "reducescatter", "remove_process_set",
    "rocm_built", "shutdown", "size", "size_op", "start_timeline", "stop_timeline", "story",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hvdlite_tf' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"hvdlite_tf.{_WHERE[name]}")
        if _WHERE[name].startswith("keras"):
            importlib.import_module("hvdlite_tf.keras")
    except ModuleNotFoundError as error:
        if error.name in ("tensorflow", "keras"):
            raise ImportError(f"hvdlite_tf.{name} needs {error.name}: pip install 'hvdlite[tensorflow]'") from None
        raise
    return module if name == "keras" else getattr(module, name)
