"""The plans of an ordered group's operations: what a plane carries out, and the text by which ranks see that they agree."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Final

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.errors import MismatchError
from hvdlite.core.texts import shortened
from hvdlite.core.types import ROOTED, Collective
from hvdlite.groups.board import digest_of
from hvdlite.groups.operations import Operation
from hvdlite.memory.group_area import TEXT
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import AlltoallSplits

LONGEST_SHOWN: Final = 200
"""Characters of a text in reports."""
_KEPT: Final = 4096
"""Different operations whose preparation is kept; of more, it begins anew."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """What all calls of an operation have in common.

    Attributes:
        text: what has to be equal on all ranks.
        lane: the name of such calls in reports.
        digest: stands for the text, and for what the plane needs to be equal.
        response: for the plane.
    """

    text: bytes
    lane: str
    digest: int
    response: Response


class Plans:
    """Makes the plans of one rank's operations.

    Args:
        group: its name, for messages.
        index: this rank's.
        size: number of ranks.

    Attributes:
        ranks: all ranks of the group.
    """

    def __init__(self, group: str, index: int, size: int) -> None:
        self._group, self._index, self.ranks = group, index, tuple(range(size))
        self._prepared: dict[tuple[object, ...], Prepared] = {}

    def prepared(self, operation: Operation) -> Prepared:
        """Return what all calls of this operation have in common."""
        key = (operation.agreed, operation.collective, operation.dtype, operation.op, operation.root, operation.rows,
               operation.postscale, operation.prescale)
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= _KEPT:
                self._prepared.clear()
            found = self._prepared[key] = self._prepare(operation, key)
        return found

    def _prepare(self, operation: Operation, key: tuple[object, ...]) -> Prepared:
        text = operation.agreed
        if len(set(operation.rows)) > 1:
            text += f" rows={list(operation.rows)}"
        encoded = text.encode()
        return Prepared(encoded, f"{self._group}: {shown(encoded)}", digest_of(repr(key[:-1]).encode()),
                        self._response(operation))

    def _response(self, operation: Operation) -> Response:
        collective = operation.collective
        elements = sum(array.size for array in operation.sources if array is not None)
        rows, row_elements = operation.rows, 1
        if collective is Collective.ALLTOALL:
            most = sum(rows)  # of this rank like of all, if there are no splits
            rows = (most, most)
        elif collective in (Collective.ALLREDUCE, Collective.REDUCE):
            rows, row_elements = (), 0
        if collective is Collective.BROADCAST and not elements:
            elements = sum(array.size for array in operation.outputs if array is not None)
        if is_empty(operation):
            collective = Collective.BARRIER
        return Response(names=(operation.agreed,), collective=collective, dtype=operation.dtype, op=operation.op,
                        root_rank=operation.root if operation.collective in ROOTED else -1, prescale=operation.prescale,
                        postscale=operation.postscale, elements=elements, contributors=self.ranks, rows=rows,
                        row_elements=row_elements)

    # --- alltoall -----------------------------------------------------------------------------------------------------

    def even_splits(self, rows: Sequence[int]) -> AlltoallSplits:
        """Return the splits of an alltoall in which all ranks send each rank `rows`, by its index."""
        starts = [0, *itertools.accumulate(rows)]
        mine = rows[self._index]
        return AlltoallSplits(tuple(rows), (mine,) * len(rows), (starts[self._index],) * len(rows))

    def splits(self, told: Array, what: str, unit: str) -> tuple[AlltoallSplits, int, int]:
        """Return this rank's splits of an alltoall, and the most that a rank sends and receives.

        Args:
            told: int64, of shape (ranks, 2, ranks): what each rank sends to each rank, and receives from each.
            what: for the error; of `unit`s.

        Raises:
            MismatchError: on all ranks, if what one rank sends to another is not what that one expects.
        """
        sent, expected = told[:, 0], told[:, 1].T
        if not np.array_equal(sent, expected):
            sender, receiver = map(int, np.argwhere(sent != expected)[0])
            raise MismatchError(f"{what}: rank {sender} sends {sent[sender, receiver]} {unit} to rank {receiver}, which "
                                f"expects {expected[sender, receiver]}: the input splits of a rank have to be the output "
                                "splits of the others")
        starts = np.cumsum(sent, axis=1) - sent
        return (AlltoallSplits(tuple(sent[self._index].tolist()), tuple(sent[:, self._index].tolist()),
                               tuple(starts[:, self._index].tolist())),
                int(sent.sum(axis=1).max()), int(sent.sum(axis=0).max()))


def memory_of(operation: Operation) -> tuple[Sequence[Array | None], Sequence[Array | None]]:
    """Return the sources and outputs of an operation's plan: one object if they are the same, so that nothing is copied."""
    sources, outputs = operation.sources, operation.outputs
    if not sources and operation.collective is Collective.BROADCAST:  # planes get what is overwritten as a source
        return outputs, outputs
    if not sources and operation.collective is Collective.SCATTER:
        return [_nothing(operation.dtype)], outputs
    if len(sources) == len(outputs) and all(map(operator.is_, sources, outputs)):
        return sources, sources
    return sources, outputs


@functools.cache
def _nothing(dtype: str) -> Array:
    return np.empty(0, SUPPORTED_DTYPES[dtype])


def shown(text: bytes) -> str:
    """Return a text as reports show it; of what fits on the board, so that all ranks show the same."""
    return shortened(text[:TEXT].decode(errors="replace"), LONGEST_SHOWN)


def is_empty(operation: Operation) -> bool:
    """Return whether no element travels, as all ranks that agree know: then an operation is a barrier."""
    if operation.collective is Collective.BARRIER:
        return True
    if operation.collective is Collective.ALLTOALL:
        return bool(operation.rows) and not any(operation.rows)
    if operation.rows:
        return not any(operation.rows)
    arrays = (*operation.sources, *operation.outputs)
    return not any(array.size for array in arrays if array is not None)
