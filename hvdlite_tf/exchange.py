"""What every way of exchanging a step's gradients has in common. Importable without TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlite import api
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.training.array_gradients import ArrayReducer
from hvdlite.training.groups import clusters
from hvdlite_tf.compression import Compression, Compressor


class Exchange:
    """Reduces lists of gradients of the same variables, step after step.

    Args:
        frontend: first part of its label.
        compression: dtype on the wire.
        sparse_as_dense: densify IndexedSlices.
        op: Average or Sum.
        gradient_predivide_factor: for Average: divide by this before the sum, and by size/this after it.
        process_set: the ranks that share gradients; on others gradients stay what they are.
        groups: gradients that are reduced together: a number of groups, or a list of lists of variables.

    Attributes:
        size: how many ranks these are.
        process_set: their process set's id.
        label: of the declared set; equal on all of them.

    Raises:
        ValueError: for another op, for a predivision of what is not averaged, and for groups of anything else.
    """

    def __init__(self, frontend: str, *, compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                 op: ReduceOp = ReduceOp.AVERAGE, gradient_predivide_factor: float = 1.0,
                 process_set: ProcessSet = global_process_set, groups: Any = None) -> None:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"gradients are reduced with op Average or Sum, not {ReduceOp(op).name.capitalize()}")
        if gradient_predivide_factor <= 0:
            raise ValueError(f"gradient_predivide_factor must be positive, not {gradient_predivide_factor}")
        if gradient_predivide_factor != 1.0 and op is not ReduceOp.AVERAGE:
            raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} needs op=Average")
        number = api.set_id(process_set)
        self._runtime, self.process_set = api.runtime(), number
        self.label = self._runtime.label(frontend, number)
        self.size = len(self._runtime.members(number))
        self._op, self._compression, self._sparse_as_dense = op, compression, sparse_as_dense
        self._prescale, self._postscale = 1.0 / gradient_predivide_factor, gradient_predivide_factor
        self._groups = groups
        self._clusters: dict[int, int] | None = clusters(groups, ())
        if isinstance(groups, int):
            self._clusters = None
        self._reducer = ArrayReducer(self._runtime, self.label, op=op, prescale=self._prescale, postscale=self._postscale,
                                     process_set=number)

    @property
    def is_current(self) -> bool:
        """Whether it belongs to the runtime that there is now."""
        return api.is_initialized() and self._runtime is api.runtime()

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to share gradients with."""
        return self._reducer.is_shared

    def watch(self, variables: Sequence[Any]) -> None:
        """Prepare for the gradients of these variables, where that lets the reduction begin during the backward pass."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients; None stays None.

        Args:
            gradients: in the same order in every call and on all ranks.
            variables: whose gradients these are.
        """
        raise NotImplementedError

    def _clusters_of(self, variables: Sequence[Any]) -> list[int]:
        """Return each variable's group, from 1, or 0; the first call says which variables there are."""
        if self._clusters is None:
            self._clusters = clusters(self._groups, variables)
        return [self._clusters.get(id(variable), 0) for variable in variables]
