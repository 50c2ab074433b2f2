"""`load_model`: a loaded model continues training on all ranks."""

from __future__ import annotations

from typing import Any

import keras

from hvdlite_tf.compression import Compression, Compressor
from hvdlite_tf.keras.optimizer import DistributedOptimizer, distributed_in


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: dict[str, Any] | None = None,
               compression: type[Compressor] = Compression.none, legacy_opts: bool = False,
               backward_passes_per_step: int | None = None, average_aggregated_gradients: bool = False) -> Any:
    """Load a Keras model and wrap its optimizer, whose state is kept.

    Args:
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: as in `keras.models.load_model`.
        compression: as in `DistributedOptimizer`.
        legacy_opts: accepted for Horovod's sake.
        backward_passes_per_step, average_aggregated_gradients: as they were given to `DistributedOptimizer`; needed when the
            saved optimizer accumulates gradients, because a saved model does not say whether they were summed or averaged.

    Raises:
        ValueError: without `backward_passes_per_step`, when the saved optimizer accumulates gradients.
    """
    del legacy_opts
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects or None)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or distributed_in(optimizer) is not None:  # in a scope it is distributed already
        return model
    steps = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps
    if steps and backward_passes_per_step is None:
        raise ValueError(
            f"the optimizer of '{filepath}' accumulates {steps} backward passes, and a saved model does not say whether "
            "their gradients were summed (hvdlite's default) or averaged. Give load_model what DistributedOptimizer was "
            f"given: backward_passes_per_step={steps} for sums, with average_aggregated_gradients=True for averages; or "
            "backward_passes_per_step=1 when it was the optimizer's own gradient_accumulation_steps, which averages")
    DistributedOptimizer(optimizer, compression=compression, backward_passes_per_step=backward_passes_per_step or 1,
                         average_aggregated_gradients=average_aggregated_gradients)
    return model
