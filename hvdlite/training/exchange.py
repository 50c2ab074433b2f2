"""Gradients that are values: what every way of exchanging a step's has in common, and how ranks count by their samples.

A rank's gradients are means over its samples. They are multiplied by samples / the usual number before the reduction; the
same weight is reduced along with them as one gradient more, and the result is divided by its mean. So no rank needs to know
the global batch, and both factors are 1, and skipped, when all ranks have the usual number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.process_set import ProcessSet, global_process_set
from hvdlite.core.types import ReduceOp
from hvdlite.training.arguments import check_compression, factors
from hvdlite.training.array_gradients import ArrayReducer
from hvdlite.training.groups import clusters

_samples: ContextVar[Any] = ContextVar("hvdlite_samples", default=None)


@contextmanager
def counting(samples: Any) -> Iterator[None]:
    """Let every rank's gradients count by its samples in the averages that are made inside.

    Args:
        samples: of which this rank's gradients are means: a number or a scalar tensor; None to count all ranks alike.
    """
    token = _samples.set(samples)
    try:
        yield
    finally:
        _samples.reset(token)


def samples() -> Any:
    """Return what `counting` was told."""
    return _samples.get()


class Round:
    """One reduction of dense gradients, in which this rank's may have a weight.

    Args:
        weight: None when all ranks count alike; else it is reduced along with the gradients.
    """

    def __init__(self, reducer: ArrayReducer, clusters: Sequence[int], weight: float | None) -> None:
        self._reducer, self._weight, self._last = reducer, weight, len(clusters)
        reducer.open(clusters if weight is None else [*clusters, 0])

    def give(self, place: int, gradient: Array) -> None:
        """Hand over one gradient."""
        self._reducer.give(place, self.weighted(gradient))

    def weighted(self, array: Array) -> Array:
        """Return an array times this rank's weight."""
        return array if self._weight is None else scaled(array, self._weight)

    def finish(self) -> tuple[list[Array], float | None]:
        """Return the reduced gradients, and the reduction of the weights."""
        if self._weight is None:
            return self._reducer.finish() if self._last else [], None
        self._reducer.give(self._last, np.array([self._weight], np.float32))
        *reduced, weight = self._reducer.finish()
        return reduced, float(weight[0])


class Exchange:
    """Reduces lists of gradients of the same variables, step after step.

    Args:
        frontend: first part of its label.
        compression: the framework's compressor: dtype on the wire.
        sparse_as_dense: densify sparse gradients.
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

    def __init__(self, frontend: str, *, compression: Any, sparse_as_dense: bool = False, op: ReduceOp = ReduceOp.AVERAGE,
                 gradient_predivide_factor: float = 1.0, process_set: ProcessSet = global_process_set,
                 groups: Any = None) -> None:
        op = ReduceOp(op)
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"gradients are reduced with op Average or Sum, not {op.name.capitalize()}")
        check_compression(compression)
        self._prescale, self._postscale = factors(op, gradient_predivide_factor)
        number = api.set_id(process_set)
        self._runtime, self.process_set = api.runtime(), number
        self.label = self._runtime.label(frontend, number)
        self.size = len(self._runtime.members(number))
        self._op, self._compression, self._sparse_as_dense = op, compression, sparse_as_dense
        self._usual_samples: int | None = None
        self._groups = groups
        checked = clusters(groups, ())
        self._clusters = None if isinstance(groups, int) else checked  # None: until the variables are known
        self._reducers: dict[bool, ArrayReducer] = {}

    @property
    def is_current(self) -> bool:
        """Whether it belongs to the runtime that there is now."""
        return api.is_initialized() and self._runtime is api.runtime()

    @property
    def is_shared(self) -> bool:
        """Whether there is anybody to share gradients with."""
        return self.size > 1 and self._runtime.world.rank in self._runtime.members(self.process_set)

    def watch(self, variables: Sequence[Any]) -> None:
        """Prepare for the gradients of these variables, where that lets the reduction begin during the backward pass."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients; None stays None.

        Args:
            gradients: in the same order in every call and on all ranks.
            variables: whose gradients these are.
        """
        raise NotImplementedError

    def _reducer(self, counts: bool) -> ArrayReducer:
        """Return the reducer of rounds in which ranks count by their samples, or alike."""
        reducer = self._reducers.get(counts)
        if reducer is None:
            label = f"{self.label}.counted" if counts else self.label
            reducer = self._reducers[counts] = ArrayReducer(
                self._runtime, label, op=self._op, prescale=self._prescale, postscale=self._postscale,
                process_set=self.process_set)
        return reducer

    def _round(self, clusters: Sequence[int], samples: int | None) -> Round:
        """Return the round that is under way, or begin one; see `ArrayReducer.open`."""
        return Round(self._reducer(samples is not None), clusters, None if samples is None else self._weight(samples))

    def _weight(self, samples: int) -> float:
        """Return by what to multiply this rank's gradients; 1 when it has as many samples as in the first step."""
        if self._usual_samples is None:
            most = np.zeros(1, np.int64)
            self._runtime.allreduce(f"{self.label}.samples", np.array([samples]), most, ReduceOp.MAX,
                                    process_set=self.process_set).wait()
            self._usual_samples = max(1, int(most[0]))
        return samples / self._usual_samples

    def _unweight(self, reduced_weight: float | None) -> float:
        """Return by what to multiply reduced gradients, given the reduction of all ranks' weights."""
        if reduced_weight is None:
            return 1.0
        mean = reduced_weight if self._op is ReduceOp.AVERAGE else reduced_weight / self.size
        return 1.0 / mean if mean else 1.0

    def _clusters_of(self, variables: Sequence[Any]) -> list[int]:
        """Return each variable's group, from 1, or 0; the first call says which variables there are."""
        if self._clusters is None:
            self._clusters = clusters(self._groups, variables)
        return [self._clusters.get(id(variable), 0) for variable in variables]


def scaled(array: Array, factor: float) -> Array:
    """Return an array times a factor; itself when that is 1."""
    return array if abs(factor - 1.0) < 1e-6 else (array * factor).astype(array.dtype, copy=False)
