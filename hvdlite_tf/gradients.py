"""The gradients of one step, reduced together: one call into Python, whatever their number.

Dense ones go through the learned buckets of the core, IndexedSlices are gathered row by row. Everything is handed in before
anything is waited for, so the order of gradients on the ranks does not matter, and one inter-op thread is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.core.array import Array
from hvdlite.core.types import ReduceOp
from hvdlite_tf.arrays import run
from hvdlite_tf.exchange import Exchange


class GradientExchange(Exchange):
    """Reduces lists of TensorFlow gradients. IndexedSlices stay what they are unless they are densified.

    (Keras' optimizers treat sparse and dense gradients differently.)
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__("tf", **arguments)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.is_shared:
            return list(gradients)
        results = [self._densified(gradient) for gradient in gradients]
        dense = [index for index, each in enumerate(results) if each is not None and not _is_sparse(each)]
        sparse = [index for index, each in enumerate(results) if _is_sparse(each)]
        pairs = [self._compression.compress(results[index]) for index in dense]
        inputs = [tensor for tensor, _ in pairs]
        for index in sparse:
            inputs += [results[index].values, results[index].indices]
        all_clusters = self._clusters_of(variables)
        clusters = [all_clusters[index] for index in dense]
        outputs = run(lambda *arrays: self._reduced(arrays, clusters), inputs, [tensor.dtype for tensor in inputs],
                      [tensor.shape if place < len(dense) else tf.TensorShape([None, *tensor.shape[1:]])
                       for place, tensor in enumerate(inputs)])
        for index, (_, context), output in zip(dense, pairs, outputs[:len(dense)], strict=True):
            results[index] = self._compression.decompress(output, context)
        for place, index in enumerate(sparse):
            values, indices = outputs[len(dense) + 2 * place:len(dense) + 2 * place + 2]
            divisor = self.size if self._op is ReduceOp.AVERAGE else 1
            results[index] = tf.IndexedSlices(values / tf.cast(divisor, values.dtype), indices,
                                              results[index].dense_shape)
        return results

    def _densified(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient) if self._sparse_as_dense and _is_sparse(gradient) else gradient

    def _reduced(self, arrays: Sequence[Array], clusters: Sequence[int]) -> list[Array]:
        """Reduce dense gradients, of which there are as many as clusters, and gather values and indices of sparse ones."""
        dense = len(clusters)
        handles = [self._runtime.allgather(f"{self.label}.sparse.{index}", array, process_set=self.process_set)
                   for index, array in enumerate(arrays[dense:])]
        reduced = self._reducer.reduce(arrays[:dense], clusters) if dense else []
        return [*reduced, *(handle.wait() for handle in handles)]


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)
