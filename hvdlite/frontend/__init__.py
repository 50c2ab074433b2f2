"""Names that every frontend exports unchanged, beside its own collectives and optimizers."""

from hvdlite._version import __version__
from hvdlite.api import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    add_process_set,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    record_metrics,
    record_step,
    remove_process_set,
    shutdown,
    size,
    slot,
    start_timeline,
    stop_timeline,
    story,
)
from hvdlite.boundaries import stop_requested
from hvdlite.core.errors import (
    CheckpointError,
    ConfigError,
    DeadlockError,
    DuplicateNameError,
    ForkedProcessError,
    HorovodInternalError,
    HvdliteError,
    LaunchError,
    MismatchError,
    NotInitializedError,
    OperationTimeoutError,
    PeerFailedError,
    PeerLeftError,
    PeerLostError,
    ProtocolError,
    ReplicaMismatchError,
    StallError,
    StepFailedError,
    UnsupportedError,
)
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.frontend.built import (
    ccl_built,
    check_extension,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    sycl_built,
)
from hvdlite.ops import barrier
from hvdlite.training.gradients.errors import GradientOrderError
from hvdlite.training.slowness import log_slowness, slowness

__all__ = [
    "Adasum", "Average", "CheckpointError", "ConfigError", "DeadlockError", "DuplicateNameError", "ForkedProcessError",
    "GradientOrderError", "HorovodInternalError", "HvdliteError", "LaunchError", "Max", "Min", "MismatchError",
    "NotInitializedError", "OperationTimeoutError", "PeerFailedError", "PeerLeftError", "PeerLostError", "ProcessSet",
    "Product", "ProtocolError", "ReduceOp", "ReplicaMismatchError", "StallError", "StepFailedError", "Sum",
    "UnsupportedError", "__version__",
    "add_process_set", "barrier", "ccl_built", "check_extension", "cross_rank", "cross_size", "cuda_built", "ddl_built",
    "global_process_set", "gloo_built", "gloo_enabled", "init", "is_homogeneous", "is_initialized", "local_rank",
    "local_size", "log_slowness", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank",
    "record_metrics", "record_step", "remove_process_set", "rocm_built", "shutdown", "size", "slot", "slowness",
    "start_timeline", "stop_requested", "stop_timeline", "story", "sycl_built",
]
