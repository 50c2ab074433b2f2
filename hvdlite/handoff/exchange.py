"""What the ranks of a mailbox do with each other's values: as `ShmPlane` with small tensors (`planes/exchange.py`).

Before a round is complete, a rank writes to its own place only; afterwards it only reads, from all places.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES, Array
from hvdlite.core.types import Collective, ReduceOp
from hvdlite.handoff.buckets import BucketEntry
from hvdlite.handoff.entry import Entry
from hvdlite.memory.area import ROWS, Area
from hvdlite.negotiation.fusion import even_rows
from hvdlite.negotiation.mailboxes import OPERATIONS
from hvdlite.negotiation.messages import Response
from hvdlite.planes.arithmetic import Casts
from hvdlite.planes.exchange import WHOLE, Exchange, join

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


class BucketSignature(NamedTuple):
    """The same of a learned bucket, but for the number of its round; fields as in `BucketReady`.

    Attributes:
        unused: the indices, or a digest of many.
        behind: how many more rounds than steps this rank has made.
    """

    bucket_id: int
    unused: tuple[int, ...] | str
    in_step: bool
    behind: int


@dataclasses.dataclass(eq=False, slots=True)
class MailboxCall:
    """A call between its thread and the end of its round.

    Attributes:
        patience_seconds: how long a thread waits before it notifies the coordinator.
        is_in_place: whether the ranks write to each other's memory: a call is then over when all have done so.
        key: what is in use meanwhile: the process set and the name.
        name_number: see `stem_and_number`; of a bucket the number of the round.
        source: this rank's values, flat.
        output: receives the result, flat; None if its size is known only from the others.
        make_entry: makes an ordinary request of it; its name is in use already.
        rows: of this rank; rows of all ranks once it is done.
        splits: of an alltoall.
        result: what the caller gets when it is done; set then where there is no output.
        round_id: of the mailbox; 0 before it is known.
        is_collected: whether this rank has done its part of making the result.
        is_done: whether there is a result.
        is_over: whether its name is free: it is done, has failed, or has not begun.
        entry: once it has become a request.
        error: once it has failed.
    """

    patience_seconds: ClassVar[float] = 0.1
    is_in_place: ClassVar[bool] = False
    key: tuple[int, str]
    signature: Signature | BucketSignature
    name_number: int
    source: Array
    output: Array | None
    make_entry: Callable[[], Entry | BucketEntry]
    result: Any = None
    rows: tuple[int, ...] = ()
    splits: Sequence[int] = ()
    round_id: int = 0
    is_collected: bool = False
    is_done: bool = False
    is_over: bool = False
    entry: Entry | BucketEntry | None = None
    error: Exception | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes that this rank writes at most."""
        return self.source.nbytes + 8 * len(self.splits)

    def exchange(self, members: tuple[int, ...], area: Area, casts: Casts) -> MailboxExchange | None:
        """Return what carries out calls of this signature; None if no mailbox can."""
        assert isinstance(self.signature, Signature)
        if self.signature.op not in OPERATIONS:  # Adasum is no reduction of single elements
            return None
        return EXCHANGES[self.signature.collective](self.signature, members, area, casts)


class MailboxExchange:
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

    def output(self, call: MailboxCall, rows: int) -> Array:
        """Return memory for so many rows, which becomes the result."""
        call.result = np.empty((rows, *self.signature.shape), self.dtype)
        flat: Array = call.result.reshape(-1)
        return flat


class Barrier(MailboxExchange):
    """Nobody has values."""


class Whole(MailboxExchange):
    """All ranks have as many values."""

    def __init__(self, signature: Signature, members: tuple[int, ...], area: Area, casts: Casts) -> None:
        super().__init__(signature, members, area, casts)
        rows, each = (*signature.shape, 1)[0], math.prod(signature.shape[1:])
        response = Response(names=(signature.stem,), collective=signature.collective, dtype=signature.dtype,
                            op=signature.op, prescale=signature.prescale, postscale=signature.postscale,
                            contributors=members, rows=even_rows(rows, self.size), row_elements=each)
        places = [[both[parity] for both in area.values] for parity in range(2)]
        self.exchange: Exchange = WHOLE[signature.collective](response, math.prod(signature.shape), places, self.index,
                                                              root=signature.root, chunk=CHUNK, casts=casts)

    def write(self, call: MailboxCall, parity: int) -> None:
        self.exchange.write(parity, call.source)

    def collect(self, call: MailboxCall, parity: int) -> None:
        self.exchange.collect(parity, call.source, call.source if call.output is None else call.output)


class Reducescatter(Whole):
    """A rank's rows of the sum are a new array."""

    def collect(self, call: MailboxCall, parity: int) -> None:
        rows, *rest = self.signature.shape
        call.result = np.empty((even_rows(rows, self.size)[self.index], *rest), self.dtype)
        self.exchange.collect(parity, call.source, call.result.reshape(-1))


class Allgather(MailboxExchange):
    """Every rank copies all values, one after the other."""

    def write(self, call: MailboxCall, parity: int) -> None:
        self.place(self.index, parity, call.source.size)[...] = call.source

    def collect(self, call: MailboxCall, parity: int) -> None:
        call.rows = tuple(both[parity][ROWS] for both in self.area.heads)
        each = math.prod(self.signature.shape)
        join((self.place(rank, parity, count * each) for rank, count in enumerate(call.rows)),
             self.output(call, sum(call.rows)))


class Alltoall(MailboxExchange):
    """A rank's splits stand before its values; every rank copies its part of all values."""

    def write(self, call: MailboxCall, parity: int) -> None:
        place = self.area.values[self.index][parity]
        place[:8 * self.size].view(np.int64)[...] = call.splits
        self.place(self.index, parity, call.source.size, 8 * self.size)[...] = call.source

    def collect(self, call: MailboxCall, parity: int) -> None:
        splits = [both[parity][:8 * self.size].view(np.int64).tolist() for both in self.area.values]
        received = [each[self.index] for each in splits]
        each = math.prod(self.signature.shape)
        begins = [8 * self.size + sum(given[:self.index]) * each * self.dtype.itemsize for given in splits]
        join((self.place(rank, parity, received[rank] * each, begins[rank]) for rank in range(self.size)),
             self.output(call, sum(received)))
        call.result = call.result, np.array(received, np.int64)


EXCHANGES: Final = {Collective.ALLREDUCE: Whole, Collective.REDUCESCATTER: Reducescatter, Collective.BROADCAST: Whole,
                    Collective.ALLGATHER: Allgather, Collective.ALLTOALL: Alltoall, Collective.BARRIER: Barrier}
