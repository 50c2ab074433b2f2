"""Carries out the operations of one rank of an ordered group, one after the other.

Theory of operation
- A rank gives each operation the next number, writes this and a text to the board, and executes a plan. Within the plan's
  first barrier all ranks of the host have written; when they differ, all raise `MismatchError`, and the group goes on.
- Ranks on several hosts have no common board: before a plan they gather the numbers and digests of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, OperationTimeoutError, PeerLostError
from hvdlite.core.types import Collective
from hvdlite.groups.board import Board, OnlySplitsDiffer, disagreement
from hvdlite.groups.call import Call
from hvdlite.groups.history import History, PastCall
from hvdlite.groups.long_waits import LongWait, LongWaits
from hvdlite.groups.operations import Operation
from hvdlite.groups.plans import Plans, Prepared, memory_of, shown
from hvdlite.groups.reporter import Reporter
from hvdlite.groups.standings import Announcements, Standing, Standings
from hvdlite.groups.waiter import Others, Waiter
from hvdlite.memory.group_area import TEXT, GroupArea
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import AlltoallSplits, Plan, Plane


class Executor:
    """Carries out operations, on the thread that calls it: one at a time. The rest may be called from any thread.

    Args:
        group: its name, for messages.
        plane: has the group's ranks as process set 0; owned by this object.
        announcements: owned by this object; see `GroupEnd`.
        members: for messages: the name of each rank.

    Attributes:
        begun: the number of the operation that this rank has begun last; 0 for none.
        is_busy: whether the thread that carries out operations is in the middle of one.
        waiter: how that thread waits; its error ends all operations.
        long_waits: those of the whole group.
    """

    def __init__(self, group: str, rank: int, size: int, plane: Plane, area: GroupArea, announcements: Announcements | None,
                 members: tuple[str, ...], reporter: Reporter, patience: float) -> None:
        self.begun = self._completed = self._plans_executed = 0
        self.is_busy = False
        self._group, self._rank, self._size, self._members = group, rank, size, members
        self._plane, self._reporter = plane, reporter
        self._plans = Plans(group, rank, size)
        self._history = History()
        self.long_waits = LongWaits(reporter.waits_changed, patience)
        self._text = b""  # of the operation under way
        self._unchecked: Prepared | None = None  # until it is known whether all ranks call it
        self._met = 0.0  # when that was known, on the reporter's clock
        self._board: Board | None = None
        if announcements is None:
            self._others: Others = Board(area)
            self._board = self._others
        else:
            self._others = Standings(announcements, rank, size, self._standing, area.ring)
        self.waiter = Waiter(group, area, self._others, members, self._impatient, patience)

    # --- operations ---------------------------------------------------------------------------------------------------

    def perform(self, operation: Operation, timeout: float) -> None:
        """Carry out one operation.

        Raises:
            MismatchError: on all ranks.
            Exception: the others may be in the middle of a plan, so nothing can be carried out afterwards.
        """
        self.is_busy = True
        try:
            self._perform(operation, timeout)
        except MismatchError:  # of which all ranks know
            self._history.refuse(self.begun)
            self._completed = self.begun
            raise
        else:
            self._completed = self.begun
        finally:
            self.is_busy = False
            self.long_waits.over()

    def reason(self, failed: Exception) -> Exception:
        """Return why an operation has failed: between hosts a plane sees only that another rank does not answer."""
        if self.waiter.error is not None:
            return self.waiter.error
        if self._board is not None or isinstance(failed, (PeerLostError, OperationTimeoutError)):
            return failed
        return self.waiter.reason(failed)

    def _perform(self, operation: Operation, timeout: float) -> None:
        if self.waiter.error is not None:
            raise self.waiter.error.with_traceback(None)
        prepared = self._plans.prepared(operation)
        reporter, response = self._reporter, prepared.response
        self.begun = sequence = self.begun + 1
        self._text = prepared.text
        self.waiter.begin(sequence, prepared.text, timeout)
        if operation.prepare is not None:
            operation.prepare()
        reporter.began(prepared.lane)
        begun = self._met = reporter.clock()
        self._unchecked = prepared
        self._history.add((sequence, begun, prepared))
        try:
            if self._board is not None:
                self._board.write(sequence, prepared.text, prepared.digest)
            else:
                self._compare(prepared)
            self._move(operation, response)
        except OnlySplitsDiffer:
            self._exchange(operation, response)
        reporter.ended(prepared.lane, response, begun, self._met)

    def _move(self, operation: Operation, response: Response) -> None:
        if response.collective is Collective.BARRIER:
            if self._board is not None:  # else the ranks have met when they compared
                self._execute(response, (), ())
        elif operation.collective is not Collective.ALLTOALL:
            self._execute(response, *memory_of(operation))
        elif operation.rows:
            self._execute(response, *memory_of(operation), self._plans.even_splits(operation.rows))
        else:
            self._exchange(operation, response)

    def _exchange(self, operation: Operation, response: Response) -> None:
        """Carry out an alltoall for which the ranks have to tell each other what they send."""
        told = np.zeros((self._size, 2, self._size), np.int64)
        told[self._rank] = operation.sent or operation.rows, operation.received or operation.rows
        self._gather(told[self._rank].reshape(-1), told.reshape(-1), "splits")
        unit = "bytes" if operation.dtype == "uint8" else "elements"
        splits, sent, received = self._plans.splits(told, f"{self._group}, call {self.begun}: {operation.agreed}", unit)
        if sent:
            response = msgspec.structs.replace(response, collective=Collective.ALLTOALL, rows=(sent, received))
            self._execute(response, *memory_of(operation), splits)

    def _compare(self, prepared: Prepared) -> None:
        """Check that the ranks of several hosts agree."""
        told = np.zeros((self._size, 2), np.int64)
        told[self._rank] = self.begun, prepared.digest
        self._gather(told[self._rank].copy(), told.reshape(-1), "digests")
        self._all_have_come()
        if (told != told[self._rank]).any():
            texts = self._gather_texts(prepared)
            raise disagreement(self._group, list(zip(told[:, 0].tolist(), texts, strict=True)), self._members)

    def _gather_texts(self, prepared: Prepared) -> list[bytes]:
        """Return what each rank calls."""
        texts = np.zeros((self._size, TEXT), np.uint8)
        own = prepared.text[:TEXT]
        texts[self._rank, :len(own)] = np.frombuffer(own, np.uint8)
        self._gather(texts[self._rank].copy(), texts.reshape(-1), "texts")
        return [text.tobytes().rstrip(b"\0") for text in texts]

    def _gather(self, own: Array, whole: Array, what: str) -> None:
        """Gather the same number of elements of each rank."""
        response = Response(names=(what,), collective=Collective.ALLGATHER, dtype=str(own.dtype), elements=own.size,
                            contributors=self._plans.ranks, rows=(own.size,) * self._size, row_elements=1)
        self._execute(response, [own], [whole])

    def _execute(self, response: Response, sources: Sequence[Array | None], outputs: Sequence[Array | None],
                 splits: AlltoallSplits | None = None) -> None:
        self._plans_executed += 1
        self._plane.execute(Plan(self._plans_executed, self._plans.ranks, response, sources, outputs, None, splits),
                            self._wait_until)

    def _wait_until(self, predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        self.waiter(predicate, poll_interval=poll_interval)
        prepared, board = self._unchecked, self._board
        if prepared is None or board is None:
            return
        self._all_have_come()
        if not board.agrees(self.begun, prepared.digest):
            raise disagreement(self._group, board.texts(self.begun), self._members)

    def _all_have_come(self) -> None:
        self._unchecked, self._met = None, self._reporter.clock()
        self.long_waits.over()

    def _impatient(self) -> None:
        """A wait takes long: tell rank 0 of the runtime who waits for whom."""
        if self._unchecked is not None:
            self.long_waits.tell()
        else:
            self._reporter.suspect()

    # --- how far the ranks are ----------------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        return Standing(self.begun, self._completed, shown(self._text))

    def long_wait(self) -> LongWait | None:
        """Return the operation in which this rank has waited for long for others to call it, if it does."""
        begun, text, since = self.begun, shown(self._text), self.long_waits.since
        if not since:
            return None
        return LongWait(f"{self._group}, call {begun}: {text}", begun, range(self._size), self._others.missing(begun),
                        time.monotonic() - since)

    def past_calls(self, queue: Sequence[Call]) -> list[PastCall]:
        """Return the last operations, oldest first, and then those of calls that are queued."""
        return self._history.calls(self._completed, self._reporter.clock(), queue)

    # --- the end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Let the other ranks see that this one carries out no operations any more."""
        self._others.leave(self._completed)

    def close(self) -> None:
        """Free what this object owns."""
        self._plane.close()
        self._others.close()

    def close_in_child(self) -> None:
        """In a forked child: close every descriptor; what is shared with the parent is left as it is."""
        self._plane.close()
