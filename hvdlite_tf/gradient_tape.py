"""`tf.GradientTape` whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.training.arguments import chosen_groups
from hvdlite.training.step_reducer import weighted_by
from hvdlite_tf.compression import Compression, Compressor
from hvdlite_tf.errors import as_tensorflow
from hvdlite_tf.gradients import TensorFlowStepReducer
from hvdlite_tf.variables import local_variables


class DistributedTape:
    """Wraps the user's tape; all methods but `gradient` are the tape's own."""

    def __init__(self, tape: tf.GradientTape, scale_local_gradients: bool, **arguments: Any) -> None:
        self._tape = tape
        self._arguments = arguments
        self._scales_local = scale_local_gradients
        self._local: set[int] = set()

    def __enter__(self) -> DistributedTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def register_local_source(self, source: tf.Variable) -> None:
        """Exclude the gradients of a variable from the reduction."""
        self._local.add(id(source))

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @as_tensorflow
    def gradient(self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False,
                 weight: Any = None, **options: Any) -> Any:
        """Return the gradients, reduced over all ranks; otherwise like `tf.GradientTape.gradient`.

        Args:
            sources: the same in every call, in any structure that `tf.nest` supports.
            use_generic_names: accepted for Horovod's sake: names are always generic.
            weight: what the target is a mean over on this rank, samples or tokens: a number or a scalar tensor, at least 0.
                The average is weighted by it, sum(n g) / sum(n). Give one on all ranks or on none, in every call. Gradients
                with weight 0 count as zeros; where the weights of all ranks are 0, all are zeros.

        Raises:
            ValueError: for a weight that is negative or not finite.
            UnsupportedError: for a weight with op=Sum, and in a strategy's scope, which weighs ranks itself.
            MismatchError: on all ranks, when some have no weight.
        """
        gradients = self._tape.gradient(target, sources, output_gradients, **options)
        flat, flat_sources = tf.nest.flatten(gradients, expand_composites=False), tf.nest.flatten(sources)
        first: dict[int, int] = {}  # the first position of each source
        for index, source in enumerate(flat_sources):
            first.setdefault(id(source), index)
        shared = [index for index in first.values() if id(flat_sources[index]) not in self._local]
        shared_sources = [flat_sources[index] for index in shared]
        reducer = _step_reducer_for(shared_sources, self._arguments)
        with weighted_by(weight, self._arguments["op"]):
            reduced = reducer.reduce([flat[index] for index in shared], shared_sources)
        if weight is not None and not reducer.is_used:  # this rank trains alone
            reduced = [_unless_weightless(gradient, weight) for gradient in reduced]
        for index, gradient in zip(shared, reduced, strict=True):
            flat[index] = gradient
        flat = [flat[first[id(source)]] for source in flat_sources]
        if self._scales_local and self._local and reducer.is_used:
            divisor = reducer.divisor()
            for index, source in enumerate(flat_sources):
                if id(source) in self._local and flat[index] is not None:
                    flat[index] = flat[index] / tf.cast(divisor, flat[index].dtype)
        return tf.nest.pack_sequence_as(sources, flat)

    def get_local_and_global_gradients(
            self, target: Any, sources: Sequence[Any], output_gradients: Any = None,
            use_generic_names: bool = False) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of a source and its gradient: those of local sources, and all others.

        Args:
            sources: a list; the other arguments are those of `gradient`.
        """
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients, use_generic_names), strict=True))
        return ([pair for pair in pairs if id(pair[0]) in self._local],
                [pair for pair in pairs if id(pair[0]) not in self._local])


def _unless_weightless(gradient: Any, weight: Any) -> Any:
    """Return a gradient; zeros, whatever it is, where its weight is 0."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_unless_weightless(gradient.values, weight), gradient.indices, gradient.dense_shape)
    return None if gradient is None else tf.where(tf.convert_to_tensor(weight) > 0, gradient, tf.zeros_like(gradient))


_REMEMBERED = 64
_step_reducers: dict[tuple[Any, ...], TensorFlowStepReducer] = {}  # in order of last use


def _step_reducer_for(sources: Sequence[Any], arguments: dict[str, Any]) -> TensorFlowStepReducer:
    """Return the step reducer of these variables, which is reused over steps: a tape exists for one step only."""
    key = (*map(id, sources), *(_identity(value) for value in arguments.values()))
    reducer = _step_reducers.pop(key, None)
    if reducer is None or (reducer.is_shared and not reducer.has_slots(sources)):
        reducer = TensorFlowStepReducer(**arguments)
    reducer.watch(sources)
    _step_reducers[key] = reducer
    while len(_step_reducers) > _REMEMBERED:
        del _step_reducers[next(iter(_step_reducers))]
    return reducer


def _identity(argument: Any) -> Any:
    """Return a hashable value that is equal for equal arguments; lists contain variables."""
    return tuple(tuple(map(id, group)) for group in argument) if isinstance(argument, (list, tuple)) else argument


def DistributedGradientTape(gradtape: tf.GradientTape, device_dense: str = "", device_sparse: str = "",
                            compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                            op: ReduceOp = ReduceOp.AVERAGE, gradient_predivide_factor: float = 1.0, num_groups: int = 0,
                            groups: Any = None, process_set: ProcessSet = global_process_set,
                            scale_local_gradients: bool = True) -> DistributedTape:
    """Wrap a tape so that `gradient` returns gradients that are reduced over all ranks; eagerly and inside `tf.function`.

    Args:
        gradtape: a tape, which may have recorded already.
        device_dense, device_sparse: accepted for Horovod's sake.
        compression: `Compression.none`, `.fp16` or `.bf16`.
        sparse_as_dense: densify `tf.IndexedSlices`, instead of gathering their rows.
        op: Average or Sum.
        gradient_predivide_factor: for Average: divide by this before the sum, and by size/this after it.
        num_groups: deprecated; use `groups`.
        groups: gradients that are reduced together: a number of groups, or a list of lists of sources.
        process_set: the ranks that share gradients.
        scale_local_gradients: divide gradients of local sources (`register_local_source`) by the number of ranks.

    Raises:
        ValueError: for a tape that is already distributed, and for any other object. Other invalid arguments raise it when
            gradients are computed.
    """
    if isinstance(gradtape, DistributedTape):
        raise ValueError("this tape is distributed already: its gradients are reduced once")
    if not hasattr(gradtape, "gradient"):
        raise ValueError(f"DistributedGradientTape takes a tf.GradientTape, not {type(gradtape).__name__}")
    return DistributedTape(gradtape, scale_local_gradients, compression=compression, sparse_as_dense=sparse_as_dense, op=op,
                 gradient_predivide_factor=gradient_predivide_factor, process_set=process_set,
                 groups=chosen_groups(groups, num_groups))


def PartialDistributedGradientTape(gradtape: tf.GradientTape, *arguments: Any, local_layers: Any = None,
                                   **named: Any) -> DistributedTape:
    """Like `DistributedGradientTape`; the gradients of some layers' variables are not reduced.

    Args:
        arguments, named: those of `DistributedGradientTape`.
        local_layers: a layer or a list of layers, already built.

    Raises:
        ValueError: for an object that is not a layer, and for a layer that has not been built.
    """
    tape = DistributedGradientTape(gradtape, *arguments, **named)
    for variable in local_variables(local_layers):
        tape.register_local_source(variable)
    return tape
