"""Batch normalization over the batches of all ranks, for Keras 3 on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite_tf.ops import Sum, allreduce


@keras.saving.register_keras_serializable("hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Like Keras' `BatchNormalization`, with mean and variance of the batches of all ranks, which may differ in size.

    Two small allreduces a layer and direction. Layers must be called in the same order on all ranks.

    Args:
        process_set: the ranks that share statistics; on others it is ordinary batch normalization.
        named: as for Keras' layer; not `synchronized`.
    """

    def __init__(self, process_set: ProcessSet = global_process_set, **named: Any) -> None:
        super().__init__(**named)
        self._process_set = process_set

    def _moments(self, inputs: Any, mask: Any) -> Any:
        mean, variance = super()._moments(inputs, mask)
        members = api.runtime().members(api.set_id(self._process_set))
        if len(members) == 1 or api.rank() not in members:
            return mean, variance
        if mask is None:
            count = tf.cast(tf.size(inputs) / tf.size(mean), mean.dtype)
        else:
            count = tf.reduce_sum(tf.cast(tf.broadcast_to(mask[..., tf.newaxis], tf.shape(inputs)), mean.dtype)) \
                / tf.cast(tf.size(mean), mean.dtype)
        name, rows = f"sync_batch_norm.{self.path}", mean.shape[0]
        sums = allreduce(tf.concat([mean * count, [count]], 0), op=Sum, name=name, process_set=self._process_set)
        total = sums[rows:]
        overall = sums[:rows] / total
        # Squares about the mean of all ranks, not about zero: nothing is lost when the mean is large.
        squares = (variance + tf.square(mean - overall)) * count
        return overall, allreduce(squares, op=Sum, name=f"{name}.squares", process_set=self._process_set) / total
