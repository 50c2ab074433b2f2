"""hvdlite for TensorFlow 2: `import hvdlite_tf as hvd`. For Keras 3 on any backend: `import hvdlite_tf.keras as hvd`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from hvdlite import frontend
from hvdlite.frontend import *
from hvdlite_tf.compression import Compression
from hvdlite_tf.versions import check_installed as _check_installed

if TYPE_CHECKING:  # at run time: __getattr__
    from hvdlite_tf import elastic, keras
    from hvdlite_tf.functions import (
        allgather_object,
        broadcast_global_variables,
        broadcast_object,
        broadcast_object_fn,
        broadcast_variables,
        gpu_available,
        local_rank_op,
        local_size_op,
        process_set_included_op,
        rank_op,
        size_op,
    )
    from hvdlite_tf.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
    from hvdlite_tf.keras.checkpoints import load, save
    from hvdlite_tf.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
    from hvdlite_tf.keras.tf_strategy import MirroredStrategy
    from hvdlite_tf.ops import (
        allgather,
        allreduce,
        alltoall,
        broadcast,
        broadcast_,
        grouped_allgather,
        grouped_allreduce,
        grouped_reducescatter,
        join,
        reducescatter,
    )
    from hvdlite_tf.sync_batch_norm import SyncBatchNormalization

_check_installed()

_HOMES = {
    "ops": ["allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "grouped_allgather", "grouped_allreduce",
            "grouped_reducescatter", "join", "reducescatter"],
    "functions": ["allgather_object", "broadcast_global_variables", "broadcast_object", "broadcast_object_fn",
                  "broadcast_variables", "gpu_available", "local_rank_op", "local_size_op", "process_set_included_op",
                  "rank_op", "size_op"],
    "gradient_tape": ["DistributedGradientTape", "PartialDistributedGradientTape"],
    "keras.tf_strategy": ["MirroredStrategy"],
    "keras.outer": ["DiLoCo", "LocalSGD"],
    "keras.optimizer": ["DistributedOptimizer", "PartialDistributedOptimizer"],
    "sync_batch_norm": ["SyncBatchNormalization"],
    "elastic": ["elastic"],
    "keras.checkpoints": ["load", "save"],
    "keras": ["keras"],
}
"""Modules of the names that need TensorFlow or Keras, imported at the first use of a name."""
_WHERE = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Compression", "DiLoCo", "DistributedGradientTape", "DistributedOptimizer", "LocalSGD", "MirroredStrategy",
    "PartialDistributedGradientTape", "PartialDistributedOptimizer", "SyncBatchNormalization", "allgather",
    "allgather_object", "allreduce", "alltoall", "broadcast", "broadcast_", "broadcast_global_variables",
    "broadcast_object", "broadcast_object_fn", "broadcast_variables", "elastic", "gpu_available", "grouped_allgather",
    "grouped_allreduce", "grouped_reducescatter", "join", "keras", "load", "local_rank_op", "local_size_op",
    "process_set_included_op", "rank_op", "reducescatter", "save", "size_op",
]
__all__ += frontend.__all__


def init(comm: object = None, process_sets: Any = None) -> None:  # type: ignore[no-redef]
    """Like `hvdlite.init`; from then on, Keras' own `BatchNormalization(synchronized=True)` uses all ranks' batches."""
    frontend.init(comm, process_sets)
    _patch_frameworks()


def _patch_frameworks() -> None:
    """Patch Keras' layer and TensorFlow's functions, as far as this process has imported them."""
    if "tensorflow" in sys.modules:
        importlib.import_module("hvdlite_tf.errors")
    if "keras" in sys.modules:
        importlib.import_module("hvdlite_tf.sync_batch_norm").install()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'hvdlite_tf' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"hvdlite_tf.{_WHERE[name]}")
        if _WHERE[name].startswith("keras"):
            importlib.import_module("hvdlite_tf.keras")
    except ModuleNotFoundError as error:
        if error.name in ("tensorflow", "keras"):
            raise ImportError(f"hvdlite_tf.{name} needs {error.name}: pip install 'hvdlite[{error.name}]'") from None
        raise
    _patch_frameworks()
    return module if name in ("elastic", "keras") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
