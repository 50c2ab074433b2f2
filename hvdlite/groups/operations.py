"""Operations of an ordered group: collectives as one rank calls them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hvdlite.core.array import Array
from hvdlite.core.types import Collective, ReduceOp


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Operation:
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
