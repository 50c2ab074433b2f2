"""The handoff: everything that a rank's user threads and its background thread share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hvdlite.handoff.handle import BlockedWaiters
from hvdlite.handoff.inbox import Inbox
from hvdlite.handoff.job_state import JobState
from hvdlite.handoff.mailbox import MailboxEnd


@dataclasses.dataclass(frozen=True)
class Handoff:
    """The only objects that both kinds of threads touch, beside the entries and handles that pass through them.

    Attributes:
        inbox: what user threads enqueue.
        waiters: the handles on which user threads are blocked.
        state: what the background thread reports of the job.
        mailboxes: those that user threads may use, by process set and stem; written by the background thread.
    """

    inbox: Inbox
    waiters: BlockedWaiters
    state: JobState
    mailboxes: dict[tuple[int, str], MailboxEnd] = dataclasses.field(default_factory=dict)

    @classmethod
    def create(cls, rank: int, size: int, wake: Callable[[], None], *, spins: bool, is_elastic: bool = False) -> Handoff:
        """Return what one rank's threads share; the arguments are those of `Inbox`."""
        state = JobState(size)
        inbox = Inbox(rank, state, wake, spins=spins, is_elastic=is_elastic)
        return cls(inbox, BlockedWaiters(inbox.hurry, inbox.put), state)
