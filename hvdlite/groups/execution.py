"""Carries out the operations of one rank of a group, one after the other.

Theory of operation
- A rank gives each operation the next number, writes this and a text to the area, and executes a plan. Within the plan's
  first barrier all ranks of the host have written; when they differ, all raise `MismatchError`, and the group goes on.
- Ranks on several hosts have no common area: before a plan they gather the numbers and digests of all.
- The thread sleeps on this rank's word of the area, and fails with the group. It carries out sends and receives meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, OperationTimeoutError, PeerLeftError, PeerLostError
from hvdlite.core.types import Collective
from hvdlite.groups.call import Call
from hvdlite.groups.link import GroupLink
from hvdlite.groups.members import GroupMembers
from hvdlite.groups.messages import Messages
from hvdlite.groups.operation import Operation, Preparations, PreparedOperation, even_splits, shown, splits_of
from hvdlite.groups.peers import CallProgress, LocalPeers, OnlySplitsDiffer, Peers, RemotePeers, disagreement
from hvdlite.groups.reports import Reports
from hvdlite.handoff.group_state import PATIENCE_SECONDS, GroupState, LongWait
from hvdlite.memory.area import TEXT
from hvdlite.memory.patience import Patience
from hvdlite.negotiation.messages import Response
from hvdlite.planes.base import AlltoallSplits, Plan, Plane

REMEMBERED: Final = 2000
"""How many calls a rank remembers of each group."""
LOOK_SECONDS: Final = 1.0
"""How long a thread sleeps at most before it looks again whether others have left."""
ANSWER_SECONDS: Final = 2.0
"""How long the other ranks have to report their progress."""


class PastCall(NamedTuple):
    """One operation that this rank has called.

    Attributes:
        number: in the group, from 1.
        text: what was called; equal on all ranks if they agree.
        age: seconds since it began; 0 if it has not.
        state: "scheduled" before its turn comes, "started", or "completed"; what has failed stays "started".
    """

    number: int
    text: str
    age: float
    state: str


class GroupExecutor:
    """Carries out operations, on the thread that calls it: one at a time. The rest may be called from any thread.

    Args:
        plane: has the group's ranks as process set 0; owned by this object.
        link: by which ranks on several hosts announce how far they are; None if all share the state's area.
        messages: those of this rank; None if it is the only one.
        patience: seconds that a rank waits for others before it reports that to rank 0 of the runtime.
        polling: of script's threads that block, before they sleep; by default none.

    Attributes:
        peers: what is known of the other ranks.
        is_busy: whether the thread that carries out operations is in the middle of one.
    """

    def __init__(self, members: GroupMembers, plane: Plane, state: GroupState, reports: Reports,
                 messages: Messages | None, *, link: GroupLink | None = None, patience: float = PATIENCE_SECONDS,
                 polling: Patience | None = None) -> None:
        self.is_busy = False
        self._members = members
        self._rank = members.rank
        self._size = members.size
        self._plane = plane
        self._state = state
        self._reports = reports
        self._messages = messages
        self._patience = patience
        self._polling = polling or Patience(0.0)
        self._polls = False  # in the operation under way
        self._ranks = tuple(range(members.size))
        self._preparations = Preparations(members.name, self._ranks)
        self._completed = self._plans = 0
        self._text = b""  # of the operation under way
        self._timeout = self._deadline = 0.0  # of the operation under way; the deadline from its first wait on
        self._unchecked: PreparedOperation | None = None  # until it is known whether all ranks call it
        self._met = 0.0  # when that was known, on the reports' clock
        self._begun: deque[tuple[int, float, PreparedOperation]] = deque(maxlen=REMEMBERED)  # when operations have begun
        self._refused: deque[int] = deque(maxlen=REMEMBERED)  # about which ranks did not agree
        self._area = state.area
        self._local: LocalPeers | None = None
        if link is None:
            self.peers: Peers = LocalPeers(state.area)
            self._local = self.peers
        else:
            self.peers = RemotePeers(link, members.others, self)

    # --- operations ---------------------------------------------------------------------------------------------------

    def perform(self, operation: Operation, timeout: float, *, polls: bool = False) -> None:
        """Carry out one operation.

        Args:
            polls: whether this thread may poll: others of this rank need the GIL for their work, unless they wait for it.

        Raises:
            MismatchError: on all ranks.
            Exception: the others may be in the middle of a plan, so nothing can be carried out afterwards.
        """
        state = self._state
        self.is_busy, self._polls = True, polls
        try:
            self._perform(operation, timeout)
        except MismatchError:  # on all ranks
            self._refused.append(state.begun)
            self._completed = state.begun
            raise
        else:
            self._completed = state.begun
        finally:
            self.is_busy = False
            state.wait_for_all(None)

    def reason(self, failed: Exception) -> Exception:
        """Return why an operation has failed: between hosts a plane sees only that another rank does not answer.

        Args:
            failed: what it has raised.
        """
        if self._state.error is not None:
            return self._state.error
        if self._local is not None or isinstance(failed, (PeerLostError, OperationTimeoutError)):
            return failed
        left = self.peers.left(self._state.begun)
        return self._left(left) if left else failed

    def _perform(self, operation: Operation, timeout: float) -> None:
        state, reports = self._state, self._reports
        if state.error is not None:
            raise state.error.with_traceback(None)
        prepared = self._preparations.of(operation)
        response = prepared.response
        state.begun = number = state.begun + 1
        self._text, self._timeout, self._deadline = prepared.text, timeout, 0.0
        if operation.prepare is not None:
            operation.prepare()
        reports.began(prepared.lane)
        begun = self._met = reports.clock()
        self._unchecked = prepared
        self._begun.append((number, begun, prepared))
        try:
            if self._local is not None:
                self._local.write(number, prepared.text, prepared.digest)
            else:
                self._compare(prepared)
            self._move(operation, response)
        except OnlySplitsDiffer:
            self._exchange(operation, response)
        reports.ended(prepared.lane, response, begun, self._met)

    def _move(self, operation: Operation, response: Response) -> None:
        if response.collective is Collective.BARRIER:
            if self._local is not None:  # else the ranks have met when they compared
                self._execute(response, (), ())
        elif operation.collective is not Collective.ALLTOALL:
            self._execute(response, *operation.memory())
        elif operation.rows:
            self._execute(response, *operation.memory(), even_splits(operation.rows, self._rank))
        else:
            self._exchange(operation, response)

    def _exchange(self, operation: Operation, response: Response) -> None:
        """Carry out an alltoall for which the ranks have to exchange what they send."""
        rows = np.zeros((self._size, 2, self._size), np.int64)
        rows[self._rank] = operation.sent or operation.rows, operation.received or operation.rows
        self._gather(rows[self._rank].reshape(-1), rows.reshape(-1), "splits")
        unit = "bytes" if operation.dtype == "uint8" else "elements"
        what = f"{self._members.name}, call {self._state.begun}: {operation.agreed}"
        splits, sent, received = splits_of(rows, self._rank, what, unit)
        if sent:
            response = msgspec.structs.replace(response, collective=Collective.ALLTOALL, rows=(sent, received))
            self._execute(response, *operation.memory(), splits)

    def _compare(self, prepared: PreparedOperation) -> None:
        """Check that the ranks of several hosts agree."""
        digests = np.zeros((self._size, 2), np.int64)
        digests[self._rank] = self._state.begun, prepared.digest
        self._gather(digests[self._rank].copy(), digests.reshape(-1), "digests")
        self._all_have_come()
        if (digests != digests[self._rank]).any():
            texts = np.zeros((self._size, TEXT), np.uint8)  # what each rank calls
            own = prepared.text[:TEXT]
            texts[self._rank, :len(own)] = np.frombuffer(own, np.uint8)
            self._gather(texts[self._rank].copy(), texts.reshape(-1), "texts")
            called = [text.tobytes().rstrip(b"\0") for text in texts]
            raise disagreement(list(zip(digests[:, 0].tolist(), called, strict=True)), self._members)

    def _gather(self, own: Array, whole: Array, what: str) -> None:
        """Gather the same number of elements of each rank."""
        response = Response(names=(what,), collective=Collective.ALLGATHER, dtype=str(own.dtype), elements=own.size,
                            contributors=self._ranks, rows=(own.size,) * self._size, row_elements=1)
        self._execute(response, [own], [whole])

    def _execute(self, response: Response, sources: Sequence[Array | None], outputs: Sequence[Array | None],
                 splits: AlltoallSplits | None = None) -> None:
        self._plans += 1
        self._plane.execute(Plan(self._plans, self._ranks, response, sources, outputs, None, splits), self._wait_until)

    # --- waiting --------------------------------------------------------------------------------------------------------

    def _wait_until(self, predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        if not predicate() and not (self._may_poll() and self._polling.look(predicate)):
            self._sleep_until(predicate, poll_interval or LOOK_SECONDS)
        prepared, local = self._unchecked, self._local
        if prepared is None or local is None:
            return
        self._all_have_come()
        if not local.agrees(self._state.begun, prepared.digest):
            raise disagreement(local.texts(self._state.begun), self._members)

    def _may_poll(self) -> bool:
        return self._polls and self._local is not None and (self._messages is None or not self._messages.is_active)

    def _sleep_until(self, predicate: Callable[[], bool], look: float) -> None:
        state, word, messages = self._state, self._area.word, self._messages
        now = time.monotonic()
        self._deadline = self._deadline or now + self._timeout
        patient_until = now + self._patience
        while True:
            seen = word.value
            if predicate():
                return
            if state.error is not None:
                raise state.error.with_traceback(None)
            self._check_left()
            if messages is not None and messages.is_active and messages.advance(blocked=True):
                continue
            now = time.monotonic()
            if now >= self._deadline and (self.peers.ask(self._deadline) or now >= self._deadline + ANSWER_SECONDS):
                raise self._timed_out()
            if now >= patient_until and (self.peers.ask(patient_until) or now >= patient_until + ANSWER_SECONDS):
                patient_until = now + self._patience
                self._impatient()
            times = [each if now < each else each + ANSWER_SECONDS for each in (self._deadline, patient_until)]
            if messages is not None and messages.is_active:
                times.append(messages.next_deadline)
            word.wait(seen, max(0.0, min(look, *(each - now for each in times))))

    def _all_have_come(self) -> None:
        self._unchecked, self._met = None, self._reports.clock()
        self._state.wait_for_all(None)

    def _impatient(self) -> None:
        """A wait takes long: report to rank 0 of the runtime who waits for whom; may raise an error that ends it."""
        if self._unchecked is None:
            self._reports.suspect()
            return
        begun, known = self._state.begun, self._state.collective
        since = time.monotonic() - self._patience if known is None else known.since
        self._state.wait_for_all(LongWait(f"{self._members.name}, call {begun}: {shown(self._text)}", begun, self._ranks,
                                          self.peers.missing(begun), since))

    def _check_left(self) -> None:
        """Raise an error if the call waits for a rank that has left.

        Of ranks that have left, those that did not make the call are named. Else the others wait until all have begun it:
        a rank that has given up early must not hide whom it has waited for.
        """
        left = self.peers.left(self._state.begun)
        if not left:
            return
        missing = self.peers.missing(self._state.begun)
        if not missing or not set(missing).isdisjoint(left):
            raise self._left(left)
        self.peers.ask(time.monotonic() - LOOK_SECONDS)

    def _left(self, left: Sequence[int]) -> PeerLeftError:
        missing = self.peers.missing(self._state.begun)
        gone = [rank for rank in left if rank in missing]
        if gone:
            return PeerLeftError(f"{self._call()} needs {self._members.named(gone)}, which left the group (its "
                                 "process ended, or destroyed or aborted the group) without making this call", gone[0])
        also = f", which {self._members.named(missing)} did not make" if missing else ""
        return PeerLeftError(f"{self._call()} needs {self._members.named(left)}, which left the group in the middle of "
                             f"this call{also} (it failed there, was interrupted, or destroyed or aborted the group)",
                             left[0])

    def _timed_out(self) -> OperationTimeoutError:
        text = f"{self._call()} has not ended within its timeout of {self._timeout:g} s"
        missing = self.peers.missing(self._state.begun)
        if missing:
            text += f": {self._members.named(missing)} did not make this call"
            others = self.peers.last_calls(missing)
            text += "".join(f"\n{self._members.named([rank])} last called {last}" for rank, last in others[:8])
        else:
            text += (": all ranks have made this call, and one of them does not go on in it; rank 0's log names ranks that "
                     "do not answer")
        return OperationTimeoutError(text, missing)

    def _call(self) -> str:
        return f"{self._members.name}, call {self._state.begun}: {self._text.decode(errors='replace')}"

    # --- how far this rank is ---------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let the thread that carries out an operation look again; callable from any thread."""
        self._area.wake((self._area.index,))

    def progress(self) -> CallProgress:
        """Return how far this rank is; callable from any thread."""
        return CallProgress(self._state.begun, self._completed, shown(self._text))

    def past_calls(self, queue: Sequence[Call]) -> list[PastCall]:
        """Return the last operations, oldest first, and then those of calls that are queued."""
        completed, now, refused = self._completed, self._reports.clock(), frozenset(self._refused)
        found = [PastCall(number, prepared.response.names[0], now - begun,
                          "completed" if number <= completed and number not in refused else "started")
                 for number, begun, prepared in list(self._begun)]
        first = found[-1].number + 1 if found else 1
        waiting = [operation.agreed for call in queue for operation in call.operations]
        return found + [PastCall(number, text, 0.0, "scheduled") for number, text in enumerate(waiting, first)]

    def leave(self, *, is_reason: bool = True) -> None:
        """Let the other ranks see that this one carries out no operations any more; see `Area.leave`."""
        self._area.leave(self._completed, is_reason=is_reason)
        if is_reason and isinstance(self.peers, RemotePeers):
            self.peers.leave(self._completed)

    def close(self) -> None:
        """Free what this object owns; in a forked child, its descriptors."""
        self._plane.close()
