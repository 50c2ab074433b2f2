"""The gradients of one step, reduced together: one call into Python, whatever their number.

Dense ones go through the learned buckets of the core, IndexedSlices are gathered row by row. Everything is handed in before
anything is waited for, so the order of gradients on the ranks does not matter, and one inter-op thread is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.training.array_gradients import ArrayReducer
from hvdlite_tf.arrays import run
from hvdlite_tf.compression import Compression, Compressor


class GradientExchange:
    """Reduces lists of gradients of the same variables, step after step.

    Args:
        compression: dtype on the wire.
        sparse_as_dense: densify IndexedSlices. (Keras' optimizers treat sparse and dense gradients differently.)
        op: Average or Sum.
        gradient_predivide_factor: for Average: divide by this before the sum, and by size/this after it.
        process_set: the ranks that share gradients; on others gradients stay what they are.

    Attributes:
        size: how many ranks these are.
        process_set: their process set's id.
        label: of the declared set; equal on all of them.
    """

    def __init__(self, compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                 op: ReduceOp = ReduceOp.AVERAGE, gradient_predivide_factor: float = 1.0,
                 process_set: ProcessSet = global_process_set, clusters: Sequence[int] = ()) -> None:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"gradients are reduced with op Average or Sum, not {ReduceOp(op).name.capitalize()}")
        if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average")
        number = api.set_id(process_set)
        self._runtime, self.process_set = api.runtime(), number
        self.label = self._runtime.label("tf", number)
        self._op, self._compression, self._sparse_as_dense = op, compression, sparse_as_dense
        self._reducer = ArrayReducer(self._runtime, self.label, op=op, prescale=1.0 / gradient_predivide_factor,
                                     postscale=gradient_predivide_factor, process_set=number, clusters=clusters)
        self.size = len(self._runtime.members(number))
        self._divisor = self.size if op is ReduceOp.AVERAGE else 1

    @property
    def is_current(self) -> bool:
        """Whether it belongs to the runtime that there is now."""
        return api.is_initialized() and self._runtime is api.runtime()

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to share gradients with."""
        return self._reducer.is_shared

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients; None stays None, IndexedSlices stay IndexedSlices unless they are densified.

        Args:
            gradients: of the same variables, in the same order, in every call and on all ranks.
        """
        if not self.is_shared:
            return list(gradients)
        results = [self._densified(gradient) for gradient in gradients]
        dense = [index for index, each in enumerate(results) if each is not None and not _is_sparse(each)]
        sparse = [index for index, each in enumerate(results) if _is_sparse(each)]
        pairs = [self._compression.compress(results[index]) for index in dense]
        inputs = [tensor for tensor, _ in pairs]
        for index in sparse:
            inputs += [results[index].values, results[index].indices]
        outputs = run(lambda *arrays: self._reduced(arrays, len(dense)), inputs, [tensor.dtype for tensor in inputs],
                      [tensor.shape if place < len(dense) else tf.TensorShape([None, *tensor.shape[1:]])
                       for place, tensor in enumerate(inputs)])
        for index, (_, context), output in zip(dense, pairs, outputs[:len(dense)], strict=True):
            results[index] = self._compression.decompress(output, context)
        for place, index in enumerate(sparse):
            values, indices = outputs[len(dense) + 2 * place:len(dense) + 2 * place + 2]
            results[index] = tf.IndexedSlices(values / tf.cast(self._divisor, values.dtype), indices,
                                              results[index].dense_shape)
        return results

    def _densified(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient) if self._sparse_as_dense and _is_sparse(gradient) else gradient

    def _reduced(self, arrays: Sequence[Array], dense: int) -> list[Array]:
        """Reduce dense gradients, then gather the values and indices of sparse ones."""
        handles = [self._runtime.allgather(f"{self.label}.sparse.{index}", array, process_set=self.process_set)
                   for index, array in enumerate(arrays[dense:])]
        reduced = self._reducer.reduce(arrays[:dense]) if dense else []
        return [*reduced, *(handle.wait() for handle in handles)]


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)
