"""The gradients of one step, reduced together, with few calls into Python whatever their number.

Dense ones go through the learned buckets of the core, IndexedSlices are gathered row by row. Everything is handed in before
anything is waited for, so the order of gradients on the ranks does not matter, and one inter-op thread is enough.

Inside `tf.function`, gradients of many bytes are handed in part by part, the last layers' first, by calls that do not wait:
their reduction goes on while TensorFlow computes the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.core.array import Array
from hvdlite.core.types import ReduceOp
from hvdlite.training.bucket_round import SMALL
from hvdlite.training.exchange import Exchange, samples, scaled
from hvdlite_tf.arrays import run


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
        shapes = [tensor.shape if place < len(dense) else tf.TensorShape([None, *tensor.shape[1:]])
                  for place, tensor in enumerate(inputs)]
        parts = [] if tf.executing_eagerly() else _parts(inputs[:len(dense)], self._runtime.config.bucket_edge)
        counted = [] if samples() is None else [tf.cast(samples(), tf.int64)]
        tokens = [self._submitted(inputs, part, clusters, counted) for part in parts]
        given = {place for part in parts for place in part}
        rest = [place for place in range(len(inputs)) if place not in given]

        def reduce(*arrays: Array) -> list[Array]:
            return self._reduced(dict(zip(rest, arrays, strict=False)), clusters,
                                 int(arrays[len(rest)]) if counted else None)
        outputs = run(reduce, [*(inputs[place] for place in rest), *counted, *tokens], [tensor.dtype for tensor in inputs],
                      shapes)
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

    def _submitted(self, inputs: Sequence[tf.Tensor], part: Sequence[int], clusters: Sequence[int],
                   counted: Sequence[tf.Tensor]) -> tf.Tensor:
        """Hand in some of the dense gradients when they are there; return something to wait for that."""
        def submit(*arrays: Array) -> list[Array]:
            a_round = self._round(clusters, int(arrays[-1]) if counted else None)
            for place, array in zip(part, arrays, strict=False):
                # Small ones are not copied at once, and this memory is TensorFlow's.
                a_round.give(place, array.copy() if array.nbytes <= SMALL else array)
            return [np.zeros((), np.int32)]
        return run(submit, [*(inputs[place] for place in part), *counted], [tf.int32], [tf.TensorShape([])])[0]

    def _reduced(self, arrays: dict[int, Array], clusters: Sequence[int], samples: int | None) -> list[Array]:
        """Reduce dense gradients, of which there are as many as clusters, and gather values and indices of sparse ones.

        Args:
            arrays: by place; what is missing here was handed in before.
            samples: of this rank, when ranks count by theirs.
        """
        dense = len(clusters)
        a_round = self._round(clusters, samples)
        handles = [self._runtime.allgather(
            f"{self.label}.sparse.{place - dense}", array if (place - dense) % 2 else a_round.weighted(array),
            process_set=self.process_set) for place, array in arrays.items() if place >= dense]
        for place, array in reversed(arrays.items()):  # the last layers' gradients came first
            if place < dense:
                a_round.give(place, array)
        reduced, weight = a_round.finish()
        factor = self._unweight(weight)
        gathered = [handle.wait() for handle in handles]
        return [*(scaled(array, factor) for array in reduced),
                *(array if index % 2 else scaled(array, factor) for index, array in enumerate(gathered))]


def _parts(tensors: Sequence[tf.Tensor], enough: int) -> list[list[int]]:
    """Return which tensors to hand in together, in the order in which a backward pass makes them, but for the last part.

    Args:
        enough: bytes of a part; 0 for one part only.
    """
    parts: list[list[int]] = []
    part: list[int] = []
    nbytes = 0
    for place in reversed(range(len(tensors))):
        part.append(place)
        nbytes += (tensors[place].shape.num_elements() or 0) * tensors[place].dtype.size
        if 0 < enough <= nbytes and place > 0:
            parts.append(part)
            part, nbytes = [], 0
    return parts


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)
