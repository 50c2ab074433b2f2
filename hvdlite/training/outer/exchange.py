"""The exchange of a fragment between workers: ranks that have the same place in their workers exchange a slice of it.

The rank at place i of a worker has slice i of the worker's change, which is the same on all its ranks. In an ordered group
with the ranks at place i of the other workers:

    alltoall    piece j of the slice goes to worker j, which adds all workers' pieces in their order, and divides
    allgather   the means of all pieces

Then the ranks of a worker gather the slices. So each byte crosses a link between workers once, and all ranks decode the same
bytes. Between workers the group's own thread works, so gradients are reduced meanwhile.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError
from hvdlite.core.types import Collective
from hvdlite.groups.call import Call
from hvdlite.groups.group import Group
from hvdlite.groups.operation import Operation
from hvdlite.training.outer.codec import Codec, codec_of
from hvdlite.training.outer.fragment import Errors, with_errors


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One rank's place among the workers.

    Attributes:
        workers: their number.
        slices: that are exchanged: as many as the smallest worker has ranks.
        wire: the codec, see `DiLoCo`.
        between: the group with the ranks at the same place in the other workers; None on ranks without a slice.
        inside: the group of this worker's ranks; None where this rank is the only one.
    """

    workers: int
    slices: int
    wire: str | None
    between: Group | None
    inside: Group | None

    @classmethod
    def open(cls, label: str, workers: Sequence[tuple[int, ...]], rank: int, wire: str | None) -> Exchange:
        """Make the groups; all ranks call this.

        Args:
            label: of the groups, equal on all ranks.
            workers: the ranks of each worker.
            rank: this one.
        """
        own = next(worker for worker in workers if rank in worker)
        slices, place = min(map(len, workers)), own.index(rank)
        between = inside = None
        if place < slices:
            between = api.open_group(f"{label}.between.{place}", [worker[place] for worker in workers])
        if len(own) > 1:
            inside = api.open_group(f"{label}.inside.{workers.index(own)}", own)
        return cls(len(workers), slices, wire, between, inside)

    def close(self) -> None:
        """Leave the groups."""
        for group in (self.between, self.inside):
            if group is not None:
                group.close()


class Round:
    """One exchange of a fragment, which begins when this is made; all ranks make the same ones in the same order.

    Args:
        what: for messages, the same on all ranks.
        change: of this worker, flat.
        errors: of the last exchange of this fragment.

    Attributes:
        errors: when `finish` has returned: what rounding has left, for the next exchange.
        seconds: then, how long the exchange between the workers took.
    """

    def __init__(self, exchange: Exchange, what: str, change: Array, errors: Errors | None) -> None:
        self._exchange, self._what = exchange, what
        self._size = change.size
        self._codec: Codec = codec_of(exchange.wire, change.dtype)
        workers, slices = exchange.workers, exchange.slices
        rows = -(-change.size // self._codec.values)
        self._piece_rows = -(-rows // (workers * slices))
        self._slice_rows = self._piece_rows * workers
        self._slice = np.empty((self._slice_rows if exchange.between else 0, self._codec.nbytes), np.uint8)
        self._call: Call | None = None
        self.errors: Errors | None = None
        self.seconds, self._begun = 0.0, time.monotonic()
        if exchange.between is not None:
            values = self._slice_rows * self._codec.values
            place = 0 if exchange.inside is None else exchange.inside.rank
            own = change[place * values:(place + 1) * values]
            self._values = np.concatenate([own, np.zeros(values - own.size, own.dtype)])
            self._start(exchange.between, errors)

    def _start(self, between: Group, errors: Errors | None) -> None:
        workers, nbytes = self._exchange.workers, self._piece_rows * self._codec.nbytes
        self._received = np.empty_like(self._slice)
        self._mean = np.empty((self._piece_rows, self._codec.nbytes), np.uint8)
        self._left: list[Array | None] = []
        old_change, old_mean = (None, None) if errors is None else (errors.change, errors.mean)

        def encode_change() -> None:
            self._left.append(with_errors(self._values, old_change, self._codec, self._slice))

        def encode_mean() -> None:
            pieces = np.split(self._received, workers)
            with np.errstate(over="ignore", invalid="ignore"):  # such rounds are skipped
                mean = self._codec.decode(pieces[0]).copy()
                for piece in pieces[1:]:
                    mean += self._codec.decode(piece)
                mean /= workers
            self._left.append(with_errors(mean, old_mean, self._codec, self._mean))

        self._call = between.start([
            self._operation(Collective.ALLTOALL, self._slice, self._received, (nbytes,) * workers, encode_change),
            self._operation(Collective.ALLGATHER, self._mean, self._slice, (nbytes,) * workers, encode_mean)])

    def finish(self) -> Array:
        """Wait for the end; return the mean change of all workers, flat: bitwise equal on all ranks.

        Raises:
            MismatchError: when other ranks exchange something else.
            PeerLeftError: when another rank has left the job.
            HorovodInternalError: like every collective.
        """
        exchange = self._exchange
        if self._call is not None:
            self._call.wait()
            _check(self._call)
            self.seconds = self._call.ended - self._begun
            change, mean = self._left
            self.errors = None if change is None or mean is None else Errors(change, mean)
        whole = self._slice
        if exchange.inside is not None:
            nbytes, others = self._slice_rows * self._codec.nbytes, exchange.inside.size - exchange.slices
            rows = (nbytes,) * exchange.slices + (0,) * others
            whole = np.empty((self._slice_rows * exchange.slices, self._codec.nbytes), np.uint8)
            gather = self._operation(Collective.ALLGATHER, self._slice, whole, rows)
            _check(exchange.inside.start([gather], blocking=True))
        return self._codec.decode(whole)[:self._size]

    def _operation(self, collective: Collective, source: Array, output: Array, rows: tuple[int, ...],
                   prepare: Callable[[], None] | None = None) -> Operation:
        return Operation(collective=collective, agreed=f"{self._what} ({collective.name.lower()} of {sum(rows)} bytes)",
                         dtype="uint8", sources=[source.reshape(-1)], outputs=[output.reshape(-1)], rows=rows,
                         prepare=prepare)


def _check(call: Call) -> None:
    if isinstance(call.error, MismatchError):
        raise MismatchError(f"{call.error}. Here ranks have made different numbers of steps, or not all of them have called "
                            "synchronize_outer()")
    if call.error is not None:
        raise call.error.with_traceback(None)
