"""The gradients of one step, reduced together, with few calls into Python whatever their number.

Dense ones go through the learned buckets of the core, IndexedSlices are gathered row by row. Everything is handed in before
anything is waited for, so the order of gradients on the ranks does not matter, and one inter-op thread is enough.

Inside `tf.function`, gradients of many bytes are handed in part by part, the last layers' first, by calls that do not wait:
their reduction goes on while TensorFlow computes the others.

A variable that is not part of this rank's loss has no gradient here, but maybe on another rank. Eagerly, each step shows
whether the result is a gradient or None. A graph must know that when it is traced, so ranks tell each other then which
gradients they have: once for each list of variables and each choice of gradients among them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError
from hvdlite.training.array_gradients import Gradient, Rows
from hvdlite.training.bucket_round import SMALL
from hvdlite.training.exchange import ArrayExchange, samples
from hvdlite.training.objects import allgather_object
from hvdlite_tf.arrays import as_array, as_tensor, run


class Kind(enum.IntEnum):
    """What a variable's gradient is: the number of tensors that it travels as."""

    NONE = 0
    DENSE = 1
    SPARSE = 2


class GradientExchange(ArrayExchange):
    """Reduces lists of TensorFlow gradients. IndexedSlices stay what they are unless they are densified.

    (Keras' optimizers treat sparse and dense gradients differently.)
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__("tf", **arguments)
        self._agreements: dict[tuple[tuple[int, ...], tuple[Kind, ...]], list[Kind]] = {}

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.is_shared:
            return list(gradients)
        slots = self._slots_of(variables)
        given = {slot: self._densified(gradient) for slot, gradient in zip(slots, gradients, strict=True)
                 if gradient is not None}
        reduce = self._reduced_eagerly if tf.executing_eagerly() else self._reduced_in_graph
        reduced = reduce(given, slots, dict(zip(slots, variables, strict=True)))
        return [reduced.get(slot) for slot in slots]

    def _described(self, variable: Any) -> tuple[tuple[int, ...] | None, str]:
        shape = tf.TensorShape(variable.shape)
        dtype = tf.as_dtype(variable.dtype).name
        return tuple(shape) if shape.is_fully_defined() else None, self._compression.target_for(dtype) or dtype

    def _densified(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient) if self._sparse_as_dense and _is_sparse(gradient) else gradient

    def _reduced_eagerly(self, given: dict[int, Any], slots: list[int], variables: dict[int, Any]) -> dict[int, Any]:
        arrays = {slot: _gradient([as_array(part) for part in self._sent(gradient)]) for slot, gradient in given.items()}
        own = None if samples() is None else float(samples())
        weight = self._give(arrays, slots, own)
        reduced = self._finish(slots, None if own is None else weight)
        return {slot: self._restored([as_tensor(part) for part in _parts(gradient)], given.get(slot), variables[slot])
                for slot, gradient in reduced.items()}

    def _reduced_in_graph(self, given: dict[int, Any], slots: list[int], variables: dict[int, Any]) -> dict[int, Any]:
        agreed = self._agreed(slots, [_kind(given.get(slot)) for slot in slots])
        kinds = {slot: kind for slot, kind in zip(slots, agreed, strict=True) if kind is not Kind.NONE}
        sent = {slot: self._sent(gradient) for slot, gradient in given.items()}
        specs = {slot: sent[slot][0] if slot in sent else self._spec(variables[slot]) for slot in kinds}
        counted = [] if samples() is None else [tf.cast(samples(), tf.float64)]
        batches = _batches({slot: parts[0] for slot, parts in sent.items() if len(parts) == 1},
                           self._runtime.config.bucket_edge)
        tokens = [self._submitted({slot: sent.pop(slot)[0] for slot in batch}, slots, counted) for batch in batches]
        rest = {slot: len(parts) for slot, parts in sent.items()}
        zeros = {slot: (tuple(spec.shape), spec.dtype.as_numpy_dtype) for slot, spec in specs.items()}

        def reduce(*arrays: Array) -> list[Array]:
            own = float(arrays[sum(rest.values())]) if counted else None
            weight = self._give(_by_slot(arrays, rest), slots, own)
            reduced = self._finish(kinds, None if own is None else weight)
            return [part for slot, kind in kinds.items()
                    for part in (_parts(reduced[slot]) if slot in reduced else _zeros(kind, *zeros[slot]))]
        dtypes, shapes = [], []
        for slot, kind in kinds.items():
            dtypes += [specs[slot].dtype, tf.int64][:kind]
            rows = tf.TensorShape([None])
            shapes += [specs[slot].shape] if kind is Kind.DENSE else [rows.concatenate(specs[slot].shape[1:]), rows]
        inputs = [part for parts in sent.values() for part in parts]
        outputs = iter(run(reduce, [*inputs, *counted, *tokens], dtypes, shapes))
        return {slot: self._restored([next(outputs) for _ in range(kind)], given.get(slot), variables[slot])
                for slot, kind in kinds.items()}

    def _spec(self, variable: Any) -> tf.TensorSpec:
        return tf.TensorSpec(variable.shape, tf.as_dtype(self._described(variable)[1]))

    def _agreed(self, slots: list[int], kinds: list[Kind]) -> list[Kind]:
        """Return what the gradients of these slots are on the ranks that have any.

        Ranks ask each other when this rank's gradients are of a choice that it has not had before. So a rank may trace more
        often than others (for another batch size), but all ranks must come to a new choice in the same step.

        Raises:
            MismatchError: when ranks trace other variables, or a gradient is sparse on one rank only.
        """
        key = tuple(slots), tuple(kinds)
        if key not in self._agreements:
            name = f"{self.label}.gradients_of_a_new_trace.{len(self._agreements)}"
            everywhere = allgather_object(self._runtime, key, name, self.process_set)
            ranks = self._runtime.members(self.process_set)
            for rank, (theirs, _) in zip(ranks, everywhere, strict=True):
                if theirs != everywhere[0][0]:
                    raise MismatchError(f"'{name}': rank {ranks[0]} traces the gradients of {len(everywhere[0][0])} "
                                        f"variables, rank {rank} of {len(theirs)}, or of others; all ranks must train the "
                                        "same variables")
            columns = list(zip(*(theirs for _, theirs in everywhere), strict=True))
            for index, column in enumerate(columns):
                if {Kind.DENSE, Kind.SPARSE} <= set(column):
                    raise MismatchError(f"'{name}': gradient {index} of {len(slots)} is sparse (tf.IndexedSlices) on rank "
                                        f"{ranks[column.index(Kind.SPARSE)]}, and dense on rank "
                                        f"{ranks[column.index(Kind.DENSE)]}; pass sparse_as_dense=True")
            self._agreements[key] = [max(column) for column in columns]
        return self._agreements[key]

    def _sent(self, gradient: Any) -> list[tf.Tensor]:
        """Return the tensors of a gradient as they travel: one, or the values and indices of rows."""
        if not _is_sparse(gradient):
            return [self._compression.compress(gradient)[0]]
        return [self._compression.compress(gradient.values)[0], tf.cast(gradient.indices, tf.int64)]

    def _restored(self, parts: list[tf.Tensor], given: Any, variable: Any) -> Any:
        """Return a reduced gradient of the kind and dtype of this rank's own, or else of the variable's dtype."""
        values = tf.cast(parts[0], variable.dtype if given is None else given.dtype)
        if len(parts) == 1:
            return values
        if given is None:
            return tf.IndexedSlices(values, parts[1], tf.constant(tuple(variable.shape), tf.int64))
        return tf.IndexedSlices(values, tf.cast(parts[1], given.indices.dtype), given.dense_shape)

    def _submitted(self, batch: dict[int, tf.Tensor], slots: list[int], counted: Sequence[tf.Tensor]) -> tf.Tensor:
        """Hand in some of the dense gradients when they are there; return something to wait for that."""
        given = list(batch)

        def submit(*arrays: Array) -> list[Array]:
            # Small ones are not copied at once, and this memory is TensorFlow's.
            own: dict[int, Gradient] = {slot: array.copy() if array.nbytes <= SMALL else array
                                        for slot, array in zip(given, arrays, strict=False)}
            self._give(own, slots, float(arrays[-1]) if counted else None)
            return [np.zeros((), np.int32)]
        return run(submit, [*batch.values(), *counted], [tf.int32], [tf.TensorShape([])])[0]


def _zeros(kind: Kind, shape: tuple[int, ...], dtype: Any) -> list[Array]:
    """Return what a graph takes as a variable's gradient in a step in which no rank has one."""
    if kind is Kind.DENSE:
        return [np.zeros(shape, dtype)]
    return [np.zeros((0, *shape[1:]), dtype), np.zeros(0, np.int64)]


def _gradient(parts: Sequence[Array]) -> Gradient:
    return parts[0] if len(parts) == 1 else Rows(parts[1], parts[0])


def _parts(gradient: Gradient) -> list[Array]:
    return [gradient.values, gradient.indices] if isinstance(gradient, Rows) else [gradient]


def _by_slot(arrays: Sequence[Array], counts: dict[int, int]) -> dict[int, Gradient]:
    """Return gradients by slot, of all their parts in order and how many each has."""
    each = iter(arrays)
    return {slot: _gradient([next(each) for _ in range(count)]) for slot, count in counts.items()}


def _batches(tensors: dict[int, tf.Tensor], enough: int) -> list[list[int]]:
    """Return which tensors to hand in together, in the order in which a backward pass makes them, but for the last batch.

    Args:
        enough: bytes of a batch; 0 for one batch only.
    """
    batches: list[list[int]] = []
    batch: list[int] = []
    nbytes = 0
    first = next(iter(tensors), None)
    for slot, tensor in reversed(tensors.items()):
        batch.append(slot)
        nbytes += (tensor.shape.num_elements() or 0) * tensor.dtype.size
        if 0 < enough <= nbytes and slot != first:
            batches.append(batch[::-1])
            batch, nbytes = [], 0
    return batches


def _kind(gradient: Any) -> Kind:
    return Kind.NONE if gradient is None else Kind.SPARSE if _is_sparse(gradient) else Kind.DENSE


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)
