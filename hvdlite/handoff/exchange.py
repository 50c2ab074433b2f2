"""What the ranks of a mailbox do with each other's values: one class for each kind of collective.

Before a round is complete, a rank writes to its own place only; afterwards it only reads, from all places. So no kind needs
a second step in which ranks wait for each other. The same arithmetic as in `ShmPlane` gives the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.entry import Entry
from hvdlite.memory.area import ROWS, Area
from hvdlite.negotiation.fusion import even_rows
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts, Reduction

CHUNK: Final = 256 << 10
"""Bytes of each rank that are reduced per NumPy call, so that the result is still in the cache when it is divided."""


class Signature(NamedTuple):
    """What must be the same on all ranks, but for the number in a name: calls without a name are numbered.

    Attributes:
        stem: see `stem_and_number`.
        shape: without the first dimension where ranks' rows may differ.
        root: an index among the ranks of the process set; -1 for none.
    """

    stem: str
    collective: Collective
    dtype: str
    shape: tuple[int, ...]
    op: ReduceOp = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1


@dataclasses.dataclass(eq=False, slots=True)
class MailboxCall:
    """A call between its thread and the end of its round.

    Attributes:
        key: what is in use meanwhile: the process set and the name.
        name_number: see `stem_and_number`.
        source: this rank's values, flat.
        output: receives the result, flat; None if its size is known only from the others.
        make_entry: makes an ordinary request of it; its name is in use already.
        rows: of this rank; rows of all ranks once it is done.
        splits: of an alltoall.
        result: what the caller gets when it is done; set then where there is no output.
        round_id: of the mailbox; 0 before it is known.
        is_done: whether there is a result.
        is_over: whether its name is free: it is done, has failed, or has not begun.
        entry: once it has become a request.
        error: once it has failed.
    """

    key: tuple[int, str]
    signature: Signature
    name_number: int
    source: Array
    output: Array | None
    make_entry: Callable[[], Entry]
    result: Any = None
    rows: tuple[int, ...] = ()
    splits: Sequence[int] = ()
    round_id: int = 0
    is_done: bool = False
    is_over: bool = False
    entry: Entry | None = None
    error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes that this rank writes at most."""
        return self.source.nbytes + 8 * len(self.splits)


class Exchange:
    """Calls of one signature in one area.

    Args:
        members: the ranks of the process set.
    """

    def __init__(self, signature: Signature, members: tuple[int, ...], area: Area, casts: Casts) -> None:
        self.signature, self.area, self.index, self.size = signature, area, area.index, area.size
        self.dtype = SUPPORTED_DTYPES[signature.dtype]

    def write(self, call: MailboxCall, parity: int) -> None:
        """Write this rank's values."""

    def collect(self, call: MailboxCall, parity: int) -> None:
        """Make the result; all ranks have written."""

    def place(self, rank: int, parity: int, elements: int, begin: int = 0) -> Array:
        """Return a rank's values, from a byte on."""
        return self.area.values[rank][parity][begin:begin + elements * self.dtype.itemsize].view(self.dtype)

    def rows(self, parity: int) -> list[int]:
        """Return the rows that each rank has brought."""
        return [both[parity][ROWS] for both in self.area.heads]

    def output(self, call: MailboxCall, rows: int) -> Array:
        """Return memory for so many rows, which becomes the result."""
        call.result = np.empty((rows, *self.signature.shape), self.dtype)
        flat: Array = call.result.reshape(-1)
        return flat


class Barrier(Exchange):
    """Nobody has values."""


class Allreduce(Exchange):
    """Every rank reduces all values."""

    def __init__(self, signature: Signature, members: tuple[int, ...], area: Area, casts: Casts) -> None:
        super().__init__(signature, members, area, casts)
        elements = int(np.prod(signature.shape, dtype=np.int64))
        response = Response(names=(signature.stem,), collective=Collective.ALLREDUCE, dtype=signature.dtype,
                            op=signature.op, prescale=signature.prescale, postscale=signature.postscale,
                            contributors=members)
        self.reduction = Reduction(response, self.dtype, self.size, min(elements, CHUNK // self.dtype.itemsize), casts)
        self.places = [[self.place(rank, parity, elements) for rank in range(self.size)] for parity in range(2)]

    def write(self, call: MailboxCall, parity: int) -> None:
        self.reduction.copy_prescaled(call.source, self.places[parity][self.index])

    def collect(self, call: MailboxCall, parity: int) -> None:
        assert call.output is not None
        self.reduction.combine(self.places[parity], call.output)


class Reducescatter(Allreduce):
    """Every rank reduces its rows of all values."""

    def collect(self, call: MailboxCall, parity: int) -> None:
        rows, *rest = self.signature.shape
        shares, each = even_rows(rows, self.size), int(np.prod(rest, dtype=np.int64))
        begin, own_rows = sum(shares[:self.index]), shares[self.index]
        call.result = np.empty((own_rows, *rest), self.dtype)
        own = slice(begin * each, (begin + own_rows) * each)
        self.reduction.combine([place[own] for place in self.places[parity]], call.result.reshape(-1))


class Broadcast(Exchange):
    """Every rank copies the root's values."""

    def write(self, call: MailboxCall, parity: int) -> None:
        if self.index == self.signature.root:
            self.place(self.index, parity, call.source.size)[...] = call.source

    def collect(self, call: MailboxCall, parity: int) -> None:
        if self.index != self.signature.root:
            call.source[...] = self.place(self.signature.root, parity, call.source.size)


class Allgather(Exchange):
    """Every rank copies all values, one after the other."""

    def write(self, call: MailboxCall, parity: int) -> None:
        self.place(self.index, parity, call.source.size)[...] = call.source

    def collect(self, call: MailboxCall, parity: int) -> None:
        rows = self.rows(parity)
        output, each, end = self.output(call, sum(rows)), int(np.prod(self.signature.shape, dtype=np.int64)), 0
        for rank, count in enumerate(rows):
            begin, end = end, end + count * each
            output[begin:end] = self.place(rank, parity, count * each)
        call.rows = tuple(rows)


class Alltoall(Exchange):
    """A rank's splits stand before its values; every rank copies its part of all values."""

    def write(self, call: MailboxCall, parity: int) -> None:
        place = self.area.values[self.index][parity]
        place[:8 * self.size].view(np.int64)[...] = call.splits
        self.place(self.index, parity, call.source.size, 8 * self.size)[...] = call.source

    def collect(self, call: MailboxCall, parity: int) -> None:
        splits = [self.area.values[rank][parity][:8 * self.size].view(np.int64) for rank in range(self.size)]
        received = np.array([each[self.index] for each in splits], np.int64)
        output, each, end = self.output(call, int(received.sum())), int(np.prod(self.signature.shape, dtype=np.int64)), 0
        for rank, count in enumerate(received):
            begin, end = end, end + int(count) * each
            before = 8 * self.size + int(splits[rank][:self.index].sum()) * each * self.dtype.itemsize
            output[begin:end] = self.place(rank, parity, int(count) * each, before)
        call.result = call.result, received


EXCHANGES: Final = {Collective.ALLREDUCE: Allreduce, Collective.REDUCESCATTER: Reducescatter,
                    Collective.BROADCAST: Broadcast, Collective.ALLGATHER: Allgather, Collective.ALLTOALL: Alltoall,
                    Collective.BARRIER: Barrier}
