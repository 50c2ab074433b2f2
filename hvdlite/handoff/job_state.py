"""The state of the job, written by the background thread and read by user threads."""

from __future__ import annotations

import threading

from hvdlite.core.errors import HorovodInternalError
from hvdlite.handoff.buckets import LearnedLayout
from hvdlite.handoff.group_state import GroupState
from hvdlite.negotiation.process_sets import ProcessSetTable


class JobState:
    """Written by the background thread only, but for `groups`; user threads read it.

    Attributes:
        process_sets: the process sets that exist.
        layouts: the learned layouts that have memory, by the label of their gradient set.
        tuned: the knobs that have been changed since the beginning.
        joins: how often all ranks have joined.
        failure: the error that ended the job; None while the job runs.
        departed: the ranks that have left the job normally.
        closing: what groups fail with once the background thread ends; None while it runs.
        groups: the groups that live on this runtime; written by user threads.
        ended: set when the background thread has ended.
    """

    def __init__(self, size: int) -> None:
        self.process_sets = ProcessSetTable(size)
        self.layouts: dict[str, LearnedLayout] = {}
        self.tuned: dict[str, int] = {}
        self.joins = 0
        self.failure: HorovodInternalError | None = None
        self.departed: set[int] = set()
        self.closing: Exception | None = None
        self.groups: list[GroupState] = []
        self.ended = threading.Event()

    def closing_error(self) -> HorovodInternalError:
        """Return the error of everything that the background thread does not complete any more."""
        return self.failure or HorovodInternalError("hvdlite was shut down on this rank before the collective was complete")

    def fail_groups(self, error: Exception) -> None:
        """The background thread has ended: let all groups fail; their other ranks fail by their own runtimes.

        All have the error before the first one is woken, whose script may go on and leave another.
        """
        self.closing = error
        for group in list(self.groups):
            group.has_runtime, group.error = False, group.error or error
        for group in list(self.groups):
            group.fail(error)
