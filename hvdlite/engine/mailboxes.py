"""The mailboxes of a rank: opened, frozen and closed by decisions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.diagnostics.flight_recorder import FlightRecorder
from hvdlite.diagnostics.stall_report import CallHistory
from hvdlite.handoff.exchange import MailboxCall
from hvdlite.handoff.handoff import Handoff
from hvdlite.handoff.mailbox import MailboxEnd
from hvdlite.memory.area import Area, area_bytes
from hvdlite.memory.patience import Patience
from hvdlite.memory.shared import Range
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.messages import Mailbox, MailboxFrozen, MailboxStale
from hvdlite.planes.arithmetic import Casts

Areas = Callable[[int], Range]
"""Returns the next range of so many bytes, without pages; all ranks make the same calls in order."""


class Mailboxes:
    """One rank's ends of mailboxes. Only the background thread calls it.

    Attributes:
        waiting: tensors for which threads wait in mailboxes that are to end, by mailbox.
        held: bytes of this rank's part of the areas, by area.

    Args:
        areas: None where the ranks share no memory; then no mailbox is ever opened.
        handoff: gets the mailboxes that user threads may use, and calls that become requests.
        history: of the collectives that this rank has called.
        casts: conversions of 16-bit floats.
        spin: seconds for which threads poll at most before they sleep, where there is a core for each rank.
    """

    def __init__(self, areas: Areas | None, handoff: Handoff, controller: Controller, recorder: FlightRecorder,
                 history: CallHistory, *, casts: Casts, spin: float = 0.0) -> None:
        self.waiting: dict[int, str] = {}
        self.held: dict[int, int] = {}
        self._rank = controller.rank
        self._make_area, self._handoff, self._controller = areas, handoff, controller
        self._casts, self._spin = casts, spin
        self._recorder, self._history = recorder, history
        self._last: dict[int, MailboxEnd] = {}  # by area
        self._areas: dict[int, Range] = {}  # of all members of mailboxes, by turns
        self._ends: dict[int, MailboxEnd] = {}
        self._unusable: dict[int, int] = {}  # mailboxes without memory here, and the round before their first

    @property
    def in_use(self) -> bool:
        """Whether a call is under way in some mailbox; then a thread most likely waits for it."""
        return any(end.has_call for end in self._ends.values())

    def open(self, mailbox: Mailbox) -> None:
        """Let threads use a mailbox, if this rank is a member of its process set."""
        assert self._make_area is not None
        ranks, number = self._handoff.state.process_sets[mailbox.process_set_id], mailbox.area
        nbytes, area = area_bytes(len(ranks), mailbox.capacity), None
        with contextlib.suppress(MemoryError, OSError):
            if number not in self._areas:
                self._areas[number] = self._make_area(nbytes)
            if self._rank in ranks:
                self._areas[number].allocate(0, nbytes)
                self.held[number] = nbytes // len(ranks)
                area = Area(self._areas[number].bytes, ranks.index(self._rank), len(ranks), mailbox.capacity)
        if self._rank not in ranks:
            return
        last = self._last.get(number)
        if area is None or (last is not None and last.is_busy):  # there was no memory, or a thread is still in it
            self._unusable[mailbox.mailbox_id] = mailbox.first_round - 1
            self._controller.report_mailbox(MailboxStale(mailbox.mailbox_id, mailbox.stem))
        else:
            everybody = self._handoff.state.process_sets[GLOBAL_PROCESS_SET_ID]  # on this host: else there are no mailboxes
            patience = Patience.of_ranks(self._spin, len(everybody))
            end = MailboxEnd(mailbox, ranks, area, self._casts, self._handoff.inbox, self._finished, patience)
            self._last[number] = end
            self._ends[mailbox.mailbox_id] = self._handoff.mailboxes[mailbox.process_set_id, mailbox.stem] = end

    def stale(self, stale: MailboxStale) -> None:
        """A thread cannot go on in a mailbox."""
        if stale.mailbox_id in self._ends:
            self.waiting[stale.mailbox_id] = stale.name
            self._controller.report_mailbox(stale)

    def freeze(self, mailbox_id: int) -> None:
        """Let no thread write to a mailbox, and confirm it."""
        end = self._ends.get(mailbox_id)
        if end is not None:
            self._withdraw(end)
            end.when_unlocked(lambda: self._controller.report_mailbox(MailboxFrozen(mailbox_id, end.freeze())))
        elif mailbox_id in self._unusable:
            self._controller.report_mailbox(MailboxFrozen(mailbox_id, self._unusable.pop(mailbox_id)))

    def close(self, mailbox_id: int) -> None:
        """All ranks have frozen a mailbox; what is not complete becomes a request."""
        end = self._ends.pop(mailbox_id, None)
        self.waiting.pop(mailbox_id, None)
        if end is not None:
            end.when_unlocked(lambda: self._close(end))

    def act_again(self) -> bool:
        """Do what could not be done under locks; return whether some of it is left.

        Their holders do it as they leave, but a thread that is interrupted just then does not.
        """
        late = [end for end in self._last.values() if end.is_busy]
        for end in late:
            end.act()
        return any(end.is_busy for end in late)

    def _close(self, end: MailboxEnd) -> None:
        entry = end.close()
        if entry is not None:
            self._handoff.inbox.post(entry)

    def leave(self, error: HorovodInternalError) -> None:
        """Let no thread use a mailbox any more; fail what is under way in them. The coordinator goes on closing them."""
        for end in self._ends.values():
            self._withdraw(end)
            end.fail(error)

    def end(self, error: HorovodInternalError) -> None:
        """The world ends: fail what is under way, and let go of the memory."""
        self.leave(error)
        self._ends.clear()
        self._areas.clear()
        self.held.clear()
        self._last.clear()

    def _withdraw(self, end: MailboxEnd) -> None:
        key = end.mailbox.process_set_id, end.mailbox.stem
        if self._handoff.mailboxes.get(key) is end:
            del self._handoff.mailboxes[key]

    def _finished(self, call: MailboxCall) -> None:
        """A call is over; any thread may call this."""
        if call.is_done:
            name = call.key[1]
            self._history.add(name)
            self._recorder.finished(name, "a mailbox")
