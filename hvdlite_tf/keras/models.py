"""Models that go on training on all ranks after they were loaded."""

from __future__ import annotations

from typing import Any

import keras

from hvdlite_tf.compression import Compression, Compressor
from hvdlite_tf.keras.optimizer import DistributedOptimizer, is_distributed


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: dict[str, Any] | None = None,
               compression: type[Compressor] = Compression.none, legacy_opts: bool = False) -> Any:
    """Load a Keras model and wrap its optimizer, whose state is kept.

    Args:
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: as in `keras.models.load_model`.
        compression: as in `DistributedOptimizer`.
        legacy_opts: accepted for Horovod's sake.
    """
    del legacy_opts
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if not is_distributed(getattr(optimizer, "inner_optimizer", optimizer)):  # in a scope it is already
            DistributedOptimizer(optimizer, compression=compression)
        if keras.backend.backend() == "tensorflow":
            model.jit_compile = False
        model.train_function = None
    return model
