"""Entries: a call between the user's thread and the background thread, with its request, memory and handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdlite.core.array import SUPPORTED_DTYPES
from hvdlite.core.device import AnyArray, Completion, DeviceArray, empty, flattened
from hvdlite.core.types import Collective
from hvdlite.handoff.handle import BlockedWaiters, Handle
from hvdlite.negotiation.messages import Request, Response, Wait
from hvdlite.planes.base import AlltoallSplits


class Entry:
    """A tensor, or a group of them, between its call and its completion."""

    __slots__ = ("_abandoned", "_result", "handle", "outputs", "request", "sources")

    def __init__(self, request: Request, sources: Sequence[AnyArray | None], outputs: Sequence[AnyArray | None],
                 result: Any, waiters: BlockedWaiters) -> None:
        self.request = request
        self.sources = [None if source is None else flattened(source) for source in sources]
        self.outputs: list[AnyArray | None] = self.sources if outputs is sources else [
            None if output is None else flattened(output) for output in outputs]
        self._result = result  # what the handle returns
        self.handle = Handle(request.name, waiters,
                             Wait(request.process_set_id, request.label or request.name, request.round_id))
        self._abandoned = False

    @property
    def key(self) -> tuple[int, str]:
        """What must be unique among the entries of a rank: the process set and the name."""
        return self.request.process_set_id, self.request.name

    def prepare(self, response: Response, rank: int, ranks: Sequence[int], splits: AlltoallSplits | None) -> None:
        """Allocate an output whose size is only in the response.

        Args:
            rank: this rank; `ranks` are the members of the process set.
            splits: of an alltoall.
        """
        match response.collective:
            case Collective.ALLGATHER if self.request.collective is not Collective.ALLGATHER:
                self._follow(response)
            case Collective.ALLGATHER:
                self._allocate(sum(response.rows))
            case Collective.GATHER if rank == response.root_rank:
                self._allocate(sum(response.rows))
            case Collective.GATHER:
                self.outputs = [None]
            case Collective.REDUCESCATTER | Collective.SCATTER:
                self._allocate(response.rows[ranks.index(rank)])
            case Collective.ALLTOALL:
                assert splits is not None
                received = np.array(splits.recv_rows, np.int64)
                self._allocate(int(received.sum()))
                self._result = (self._result, received)
            case Collective.ADD_PROCESS_SET | Collective.JOIN:
                self._result = response.rows[0]

    def _follow(self, response: Response) -> None:
        """Others have a sparse gradient, this rank has none: contribute no rows to what they gather."""
        dtype = SUPPORTED_DTYPES[response.dtype]
        result = np.empty((sum(response.rows), response.row_elements), dtype)
        self.sources, self._result, self.outputs = [np.empty(0, dtype)], result, [flattened(result)]

    def _allocate(self, rows: int) -> None:
        (source,) = self.sources
        assert source is not None
        result = empty(source, (rows, *self.request.shape[1:]))
        self._result, self.outputs = result, [flattened(result)]

    def deliver(self, result: bytes) -> None:
        """Take a result that came with the decision."""
        (output,) = self.outputs
        if output is not None:  # else this rank sent it
            assert isinstance(output, np.ndarray)
            np.copyto(output.view(np.uint8), np.frombuffer(result, np.uint8))

    def complete(self, response: Response, completion: Completion | None = None) -> None:
        """Hand the result to whoever waits.

        Args:
            completion: on a GPU: what the result is behind.
        """
        if completion is not None:
            completion = completion.for_entry((self.sources, self.outputs), {
                array.ready.stream for array in (*self.sources, *self.outputs)
                if type(array) is DeviceArray and array.ready is not None})
        if not self._abandoned:
            self.handle.ranks_in_step, self.handle.rows = response.ranks_in_step, response.rows
            self.handle._complete(self._result, response.contributors, completion)

    def fail(self, error: Exception) -> None:
        """Hand an error to whoever waits."""
        if not self._abandoned:
            self.handle._fail(error)

    def abandon(self, error: Exception) -> None:
        """Fail the handle now, although the others may still need this entry's memory; again is fine."""
        self.fail(error)
        self._abandoned = True


class NotifyingEntry(Entry):
    """An entry that calls a function when it is complete or has failed: in the background thread, with the error."""

    __slots__ = ("_notify",)

    def __init__(self, request: Request, sources: Sequence[AnyArray | None], outputs: Sequence[AnyArray | None],
                 result: Any, waiters: BlockedWaiters, notify: Callable[[Exception | None], None]) -> None:
        super().__init__(request, sources, outputs, result, waiters)
        self._notify = notify

    def complete(self, response: Response, completion: Completion | None = None) -> None:
        super().complete(response, completion)
        self._notify(None)

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._notify(error)
