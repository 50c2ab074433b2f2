"""The reduction of one step's gradients, with a few calls into Python, whatever their number.

Dense gradients go through the learned buckets of the core; the rows of IndexedSlices are gathered. All gradients are
enqueued before the first wait, so their order may differ between ranks, and one inter-op thread is enough.

Inside `tf.function`, gradients of many bytes are enqueued in batches, the last layers' first, by calls that do not wait:
their reduction overlaps with the computation of the others. TensorFlow makes these calls one after the other, in the order
in which they were traced (automatic control dependencies).

Where TensorFlow has a GPU and all gradients of a graph are dense, they stay there: one call reduces them together, and no
bucket is learned (decision 40).

A variable that is not part of this rank's loss has no gradient here, but may have one on another rank. Eagerly, each step
determines whether the result is a gradient or None; a graph needs to know it when it is traced. So ranks that lack some
gradients exchange what they have, once for each list of variables and each subset with gradients, and enqueue zeros for
gradients that only other ranks have. A rank whose graph does not expect an arriving gradient raises an error.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, UnsupportedError
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.gradients.arrays import Gradient, Rows
from hvdlite.training.gradients.framework import SMALL
from hvdlite.training.objects import allgather_object
from hvdlite.training.replicas import VALUES
from hvdlite.training.step_reducer import ArrayStepReducer, current_weight
from hvdlite_tf import gpu
from hvdlite_tf.arrays import as_array, as_tensor, run
from hvdlite_tf.errors import as_tensorflow, remembering
from hvdlite_tf.ops import reduce_together


class GradientKind(enum.IntEnum):
    """The kind of a variable's gradient."""

    NONE = 0
    DENSE = 1
    SPARSE = 2


@dataclasses.dataclass(frozen=True)
class _Sent:
    """A gradient of this rank that is being reduced.

    Attributes:
        gradient: the rank's own.
        parts: the tensors that are sent: one, or the values and the indices of rows.
        context: the compressor's, for decompression.
    """

    gradient: Any
    parts: list[tf.Tensor]
    context: Any

    @property
    def kind(self) -> GradientKind:
        return GradientKind.DENSE if len(self.parts) == 1 else GradientKind.SPARSE


class TensorFlowStepReducer(ArrayStepReducer):
    """Reduces lists of TensorFlow gradients. IndexedSlices remain IndexedSlices, unless they are densified.

    Keras' optimizers treat sparse and dense gradients differently.
    """

    def __init__(self, **arguments: Any) -> None:
        self._agreements: dict[tuple[tuple[int, ...], tuple[GradientKind, ...]], list[GradientKind]] = {}  # of this world
        super().__init__("tf", **arguments)

    def _attach(self, runtime: Runtime) -> None:
        super()._attach(runtime)
        self._agreements = {}

    @property
    def is_used(self) -> bool:
        # A graph lives longer than a world of an elastic job, of which more ranks may take part in the next one.
        return self.is_shared or (api.is_elastic() and not tf.executing_eagerly())

    def divisor(self) -> Any:
        if tf.executing_eagerly() or not api.is_elastic():
            return self.size
        return run(lambda: [np.array(self.size, np.float64)], [], [tf.float64], [tf.TensorShape([])])[0]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @as_tensorflow
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.is_used or not variables:
            self._step_begins()
            return list(gradients)
        slots = self._slots_of(variables)
        sent = {slot: self._sent(gradient) for slot, gradient in zip(slots, gradients, strict=True) if gradient is not None}
        reduce = self._reduce_eagerly if tf.executing_eagerly() else self._reduce_in_graph
        by_slot = dict(zip(slots, variables, strict=True))
        reduced = reduce(sent, by_slot)
        return [self._restored(reduced[slot], sent.get(slot), by_slot[slot]) if slot in reduced else None for slot in slots]

    def _described(self, variable: Any) -> tuple[tuple[int, ...] | None, str]:
        shape = tf.TensorShape(variable.shape)
        return tuple(shape) if shape.is_fully_defined() else None, self._wire_dtype(tf.as_dtype(variable.dtype).name)

    def _sent(self, gradient: Any) -> _Sent:
        if self._sparse_as_dense and _is_sparse(gradient):
            gradient = tf.convert_to_tensor(gradient)
        values, context = self._compression.compress(gradient.values if _is_sparse(gradient) else gradient)
        return _Sent(gradient, [values, tf.cast(gradient.indices, tf.int64)] if _is_sparse(gradient) else [values], context)

    def _restored(self, parts: list[tf.Tensor], sent: _Sent | None, variable: Any) -> Any:
        """Return a reduced gradient with the kind and dtype of this rank's own; without one, with the variable's dtype."""
        if sent is None:
            values = tf.cast(parts[0], variable.dtype)
            shape = tf.constant(tuple(variable.shape), tf.int64)
            return values if len(parts) == 1 else tf.IndexedSlices(values, parts[1], shape)
        values = tf.cast(self._compression.decompress(parts[0], sent.context), sent.gradient.dtype)
        if sent.kind is GradientKind.DENSE:
            return values
        return tf.IndexedSlices(values, tf.cast(parts[1], sent.gradient.indices.dtype), sent.gradient.dense_shape)

    def _reduce_eagerly(self, sent: dict[int, _Sent], variables: dict[int, Any]) -> dict[int, list[tf.Tensor]]:
        """Return the reduced gradients by slot, as their parts; slots for which no rank has a gradient are missing."""
        given = {slot: _gradient([as_array(part) for part in each.parts]) for slot, each in sent.items()}
        counted = None if current_weight() is None else float(current_weight())
        self._enqueue(given, variables, counted)
        reduced = self._finish(variables, counted)
        self._compare_first()
        return {slot: [as_tensor(part) for part in _parts(gradient)] for slot, gradient in reduced.items()}

    def _reduce_in_graph(self, sent: dict[int, _Sent], variables: dict[int, Any]) -> dict[int, list[tf.Tensor]]:
        """Like `_reduce_eagerly`; slots for which no rank has a gradient at the time of tracing are missing."""
        own_kinds = {slot: sent[slot].kind if slot in sent else GradientKind.NONE for slot in variables}
        kinds = self._agreed(own_kinds)
        if not kinds:
            return {}
        is_partial, last_world = GradientKind.NONE in own_kinds.values(), [self.world]

        def begin() -> None:
            self.take_part()
            if is_partial and last_world[0] != self.world:
                # A graph of an earlier world, before its first round in this one: take part in the exchange of new ranks.
                if self._agreed(own_kinds) != kinds:
                    raise MismatchError(
                        f"rank {api.rank()}: the ranks have gradients for other variables than when the tf.function was "
                        f"traced, in an earlier world of this elastic job ('{self.label}'); make it inside of the function "
                        "that hvd.elastic.run calls, so that each world traces it")
                last_world[0] = self.world
        specs = {slot: sent[slot].parts[0] if slot in sent else self._spec(slot, variables[slot]) for slot in kinds}
        lacking = {slot: (tuple(specs[slot].shape), specs[slot].dtype.as_numpy_dtype) for slot in kinds if slot not in sent}
        counted = [] if current_weight() is None else [tf.cast(current_weight(), tf.float64)]
        if GradientKind.SPARSE not in kinds.values() and gpu.may_be_there(list(specs.values()), self._op):
            def reduce_there(*tensors: tf.Tensor) -> list[tf.Tensor]:
                begin()
                return self._reduce_together(tensors[:len(specs)], float(tensors[-1]) if counted_here else None)
            counted_here = bool(counted)
            given = [sent[slot].parts[0] if slot in sent else tf.zeros(*lacking[slot]) for slot in specs]
            results = tf.py_function(remembering(reduce_there), [*given, *counted], [spec.dtype for spec in specs.values()])
            for result, spec in zip(results, specs.values(), strict=True):
                result.set_shape(spec.shape)
            return {slot: [result] for slot, result in zip(specs, results, strict=True)}
        slots, rest = list(variables), {slot: each.parts for slot, each in sent.items()}
        batches = _batches({slot: parts[0] for slot, parts in rest.items() if len(parts) == 1},
                           self.take_part().config.bucket_edge)
        tokens = [self._submitted({slot: rest.pop(slot)[0] for slot in batch}, slots, counted) for batch in batches]
        part_counts = {slot: len(parts) for slot, parts in rest.items()}

        def reduce_rest(*arrays: Array) -> list[Array]:
            own_weight = float(arrays[sum(part_counts.values())]) if counted_here else None
            begin()
            each = iter(arrays)
            given = {slot: _gradient([next(each) for _ in range(count)]) for slot, count in part_counts.items()}
            given |= {slot: _zeros(kinds[slot], *spec) for slot, spec in lacking.items()}
            self._enqueue(given, slots, own_weight)
            reduced = self._finish(kinds, own_weight)
            self._compare_first()
            return [part for slot in kinds for part in _parts(reduced[slot])]
        counted_here = bool(counted)
        dtypes, shapes = [], []
        for slot, kind in kinds.items():
            rows = tf.TensorShape([None])
            dtypes += [specs[slot].dtype] if kind is GradientKind.DENSE else [specs[slot].dtype, tf.int64]
            shapes += [specs[slot].shape] if kind is GradientKind.DENSE else [rows.concatenate(specs[slot].shape[1:]), rows]
        inputs = [part for parts in rest.values() for part in parts]
        outputs = iter(run(reduce_rest, [*inputs, *counted, *tokens], dtypes, shapes))
        return {slot: [next(outputs)] if kind is GradientKind.DENSE else [next(outputs), next(outputs)]
                for slot, kind in kinds.items()}

    def _reduce_together(self, gradients: Sequence[tf.Tensor], weight: float | None) -> list[tf.Tensor]:
        """Return the reductions of dense gradients, where they are; all ranks have one for each of these variables.

        Args:
            weight: this rank's, if averages are weighted.
        """
        given = _times(gradients, self._factor(weight))
        if not self.is_shared:
            self._step_begins()
            return given
        assert self._reducer is not None
        rounds = self._reducer.reducer.set
        rounds.weights.add(weight)
        reduced = reduce_together(given, f"{self.label}.gradients", rounds.op, rounds.prescale, rounds.postscale,
                                  self._process_set)
        if rounds.weights.are_used:
            rows = self.take_part().allgather(f"{self.label}.weights", rounds.weights.take_rows(),
                                              process_set=self._process_set_id).wait()
            reduced = _times(reduced, rounds.weights.factor(rows))
        self._compare_first()
        self._step_begins()
        return reduced

    def _compare_first(self) -> None:
        def few_values() -> tuple[Sequence[tuple[str, str]], Array]:
            named = [(self._name_of(slot), variable()) for variable, slot in self._slots.values()]
            named = [(name, each) for name, each in named if hasattr(each, "assign") and tf.as_dtype(each.dtype).is_floating]
            flat = [tf.reshape(getattr(each, "_value", each), [-1]) for _, each in named]
            values = [tf.cast(each[::max(1, len(each) // VALUES)][:VALUES], tf.float32) for each in flat]
            rows = [np.pad(each.numpy(), (0, VALUES - len(each))) for each in values]
            types = [(name, tf.as_dtype(each.dtype).name) for name, each in named]
            return types, np.array(rows, np.float32).reshape(-1, VALUES)
        self._compare_once(few_values)

    def _spec(self, slot: int, variable: Any) -> tf.TensorSpec:
        """Return shape and dtype of a gradient that this rank lacks.

        Raises:
            UnsupportedError: when the shape is unknown.
        """
        shape, dtype = self._described(variable)
        if shape is None:
            raise UnsupportedError(f"gradient {slot} of '{self.label}' is missing on rank {api.rank()}, and "
                                   "the shape of what it is the gradient of is not known; give that a static shape")
        return tf.TensorSpec(shape, tf.as_dtype(dtype))

    def _agreed(self, own: dict[int, GradientKind]) -> dict[int, GradientKind]:
        """Return the kinds of the gradients of some slots on the ranks that have them, without slots that have none.

        The ranks exchange kinds when some gradients are missing and the subset is a new one. So a rank may trace more often
        than others (for another batch size), but all ranks must have a new subset in the same step.

        Raises:
            MismatchError: when ranks trace different variables, or a gradient is sparse on only some ranks.
        """
        if GradientKind.NONE not in own.values() or not self.is_shared:
            return {slot: kind for slot, kind in own.items() if kind is not GradientKind.NONE}
        key = tuple(own), tuple(own.values())
        if key not in self._agreements:
            name = f"{self.label}.gradients_of_a_new_trace.{len(self._agreements)}"
            # Ranks that have joined do not contribute.
            answers = allgather_object(self.take_part(), (api.rank(), *key), name, self.process_set)
            first = answers[0]
            for rank, slots, _ in answers:
                if slots != first[1]:
                    counts = f"{len(first[1])} and {len(slots)}" if len(slots) != len(first[1]) else "different"
                    raise MismatchError(f"'{name}': rank {first[0]} and rank {rank} trace the gradients of {counts} "
                                        "variables; all ranks must train the same ones")
            columns = list(zip(*(kinds for _, _, kinds in answers), strict=True))
            for index, column in enumerate(columns):
                if {GradientKind.DENSE, GradientKind.SPARSE} <= set(column):
                    raise MismatchError(f"'{name}': gradient {index} of {len(own)} is sparse (tf.IndexedSlices) on rank "
                                        f"{answers[column.index(GradientKind.SPARSE)][0]}, and dense on rank "
                                        f"{answers[column.index(GradientKind.DENSE)][0]}; pass sparse_as_dense=True")
            self._agreements[key] = [max(column) for column in columns]
        return {slot: kind for slot, kind in zip(own, self._agreements[key], strict=True) if kind is not GradientKind.NONE}

    def _submitted(self, batch: dict[int, tf.Tensor], slots: list[int], counted: Sequence[tf.Tensor]) -> tf.Tensor:
        """Enqueue some of the dense gradients when they are computed; return a tensor that depends on it."""
        given, is_counted = list(batch), bool(counted)

        def enqueue(*arrays: Array) -> list[Array]:
            # Small ones are not copied immediately, and this memory is TensorFlow's.
            gradients: dict[int, Gradient] = {slot: array.copy() if array.nbytes <= SMALL else array
                                              for slot, array in zip(given, arrays, strict=False)}
            self._enqueue(gradients, slots, float(arrays[-1]) if is_counted else None)
            return [np.zeros((), np.int32)]
        return run(enqueue, [*batch.values(), *counted], [tf.int32], [tf.TensorShape([])])[0]


def _times(tensors: Sequence[tf.Tensor], factor: float) -> list[tf.Tensor]:
    """Return dense tensors multiplied by a factor, 16-bit floats in 32 bits."""
    if factor == 1.0:
        return list(tensors)
    if not factor:
        return [tf.zeros_like(each) for each in tensors]
    return [tf.cast(tf.cast(each, tf.float32) * factor, each.dtype) if each.dtype.size == 2 else
            each * tf.cast(factor, each.dtype) for each in tensors]


def _zeros(kind: GradientKind, shape: tuple[int, ...], dtype: Any) -> Gradient:
    """Return the contribution of a rank without a gradient that other ranks have: zeros, or no rows."""
    if kind is GradientKind.DENSE:
        return np.zeros(shape, dtype)
    return Rows(np.zeros(0, np.int64), np.zeros((0, *shape[1:]), dtype))


def _gradient(parts: Sequence[Array]) -> Gradient:
    return parts[0] if len(parts) == 1 else Rows(parts[1], parts[0])


def _parts(gradient: Gradient) -> list[Array]:
    return [gradient.values, gradient.indices] if isinstance(gradient, Rows) else [gradient]


def _batches(tensors: dict[int, tf.Tensor], enough: int) -> list[list[int]]:
    """Return the batches of tensors to enqueue together, in the order of the backward pass, without the last batch.

    Args:
        enough: bytes of a batch; 0 for a single batch.
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


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)
