"""Operations of a group: collectives as one rank calls them, and what all calls of one have in common."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.errors import MismatchError
from hvdlite.core.texts import shortened
from hvdlite.core.types import ROOTED, Collective, ReduceOp
from hvdlite.memory.area import TEXT
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import AlltoallSplits

LONGEST_SHOWN: Final = 200
"""Characters of a text in reports."""
_KEPT: Final = 4096
"""Different operations whose preparation is kept; of more, it begins anew."""


class Operation(msgspec.Struct, frozen=True, eq=False, kw_only=True):  # several times faster to make than a dataclass
    """One collective. Ranks and the root are indices in the group.

    Arrays are flat, contiguous and of `dtype`; what travels without arithmetic may be `uint8` whatever it is. Sources and
    outputs are as in `planes.base.Plan`. An output may be its source.

    Attributes:
        agreed: what has to be equal on all ranks, as errors show it: "all_reduce(SUM, float32[64, 10])". The same text means
            the same dtype and numbers of elements. Of an alltoall, what follows "; splits " may differ.
        rows: elements of each rank: that it contributes (allgather, gather), or that it gets (reducescatter, scatter); in an
            alltoall, what it gets from each rank, where that is the same for all. Then there is no `sent` and no `received`,
            and ranks need not exchange them first.
        sent: alltoall: elements that this rank sends to each rank.
        received: alltoall: elements that this rank receives from each rank.
        prescale: factor of this rank's values before a reduction.
        postscale: factor of its result.
        prepare: called when its turn comes: it copies values into the sources. What it raises ends the group on this rank.
    """

    collective: Collective
    agreed: str
    dtype: str
    sources: Sequence[Array | None] = ()
    outputs: Sequence[Array | None] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = -1
    rows: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    prescale: float = 1.0
    postscale: float = 1.0
    prepare: Callable[[], None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no element travels, on all ranks that agree: then it is a barrier."""
        if self.collective is Collective.BARRIER:
            return True
        if self.rows:
            return not any(self.rows)
        if self.collective is Collective.ALLTOALL:
            return False
        return not any(array.size for array in (*self.sources, *self.outputs) if array is not None)

    def memory(self) -> tuple[Sequence[Array | None], Sequence[Array | None]]:
        """Return the sources and outputs of its plan: one object if they are the same, so that nothing is copied."""
        sources, outputs = self.sources, self.outputs
        if not sources and self.collective is Collective.BROADCAST:  # planes get what is overwritten as a source
            return outputs, outputs
        if not sources and self.collective is Collective.SCATTER:
            return [_nothing(self.dtype)], outputs
        if len(sources) == len(outputs) and all(map(operator.is_, sources, outputs)):
            return sources, sources
        return sources, outputs


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PreparedOperation:
    """What all calls of an operation have in common.

    Attributes:
        text: what has to be equal on all ranks.
        lane: the name of such calls in reports.
        digest: a number of 63 bits that stands for the text, and for what the plane needs to be equal.
        response: for the plane.
    """

    text: bytes
    lane: str
    digest: int
    response: Response


class Preparations:
    """What the calls of a group have in common, kept by operation.

    Args:
        group: its name, for messages.
        ranks: all ranks of the group.
    """

    def __init__(self, group: str, ranks: tuple[int, ...]) -> None:
        self._group, self._ranks = group, ranks
        self._kept: dict[tuple[object, ...], PreparedOperation] = {}

    def of(self, operation: Operation) -> PreparedOperation:
        """Return what all calls of this operation have in common."""
        key = (operation.agreed, operation.collective, operation.dtype, operation.op, operation.root, operation.rows,
               operation.postscale, operation.prescale)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            text = operation.agreed + (f" rows={list(operation.rows)}" if len(set(operation.rows)) > 1 else "")
            encoded = text.encode()
            digest = hashlib.blake2b(repr(key[:-1]).encode(), digest_size=8).digest()
            found = self._kept[key] = PreparedOperation(encoded, f"{self._group}: {shown(encoded)}",
                                                        int.from_bytes(digest, "little") >> 1, self._response(operation))
        return found

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
        if operation.is_empty:
            collective = Collective.BARRIER
        return Response(names=(operation.agreed,), collective=collective, dtype=operation.dtype, op=operation.op,
                        root_rank=operation.root if operation.collective in ROOTED else -1, prescale=operation.prescale,
                        postscale=operation.postscale, elements=elements, contributors=self._ranks, rows=rows,
                        row_elements=row_elements)


def even_splits(rows: Sequence[int], index: int) -> AlltoallSplits:
    """Return the splits of a rank in an alltoall in which all ranks send each rank `rows`, by its index."""
    starts = [0, *itertools.accumulate(rows)]
    mine = rows[index]
    return AlltoallSplits(tuple(rows), (mine,) * len(rows), (starts[index],) * len(rows))


def splits_of(counts: Array, index: int, what: str, unit: str) -> tuple[AlltoallSplits, int, int]:
    """Return a rank's splits of an alltoall, and the most that a rank sends and receives.

    Args:
        counts: int64, of shape (ranks, 2, ranks): what each rank sends to each rank, and receives from each.
        what: for the error; of `unit`s.

    Raises:
        MismatchError: on all ranks, if what one rank sends to another is not what that one expects.
    """
    sent, expected = counts[:, 0], counts[:, 1].T
    if not np.array_equal(sent, expected):
        sender, receiver = map(int, np.argwhere(sent != expected)[0])
        raise MismatchError(f"{what}: rank {sender} sends {sent[sender, receiver]} {unit} to rank {receiver}, which "
                            f"expects {expected[sender, receiver]}: the input splits of a rank have to be the output "
                            "splits of the others")
    starts = np.cumsum(sent, axis=1) - sent
    return (AlltoallSplits(tuple(sent[index].tolist()), tuple(sent[:, index].tolist()), tuple(starts[:, index].tolist())),
            int(sent.sum(axis=1).max()), int(sent.sum(axis=0).max()))


def shown(text: bytes) -> str:
    """Return a text as reports show it; of what fits into an area, so that all ranks show the same."""
    return shortened(text[:TEXT].decode(errors="replace"), LONGEST_SHOWN)


@functools.cache
def _nothing(dtype: str) -> Array:
    return np.empty(0, SUPPORTED_DTYPES[dtype])
