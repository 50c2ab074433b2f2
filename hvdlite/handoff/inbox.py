"""The inbox: the queue of work from user threads to the background thread."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from hvdlite.core.errors import DuplicateNameError, ForkedProcessError, NotInitializedError
from hvdlite.handoff.buckets import BucketEntry
from hvdlite.handoff.entry import Entry
from hvdlite.handoff.handle import BlockedWaiters, Handle
from hvdlite.handoff.job_state import JobState
from hvdlite.handoff.refusals import Refusals
from hvdlite.negotiation.messages import LayoutStale, MailboxStale, Retired, RoundDone


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Something that the background thread does for a user thread."""

    run: Callable[[], object]
    abandon: Callable[[Exception], object] = lambda error: None  # called instead of `run` when that thread has ended


Item = Entry | BucketEntry | RoundDone | LayoutStale | Retired | MailboxStale | BlockedWaiters | Task
"""Work for the background thread. `BlockedWaiters` in the inbox means that they are to be reported to the coordinator."""


class Inbox:
    """A queue from user threads to the background thread. Adding to it never blocks.

    Args:
        wake: ends the background thread's current or next wait; callable from any thread and from signal handlers.
        spins: whether the background thread polls for a while before it sleeps.
        is_elastic: whether the job goes on in another world when it has failed here.

    Attributes:
        items: user threads append, the background thread removes.
        awake: written by the background thread: False only around a blocking wait.
        closed: written by user threads: this rank is leaving, and nothing new is accepted.
        last_caller: written by user threads: the thread that last called a collective.
        pid: the process to which the rank belongs; constant.
    """

    def __init__(self, rank: int, state: JobState, wake: Callable[[], None], *, spins: bool,
                 is_elastic: bool = False) -> None:
        self.items: deque[Item] = deque()
        self.awake = True
        self.closed = False
        self.last_caller = threading.get_ident()
        self.pid: Final = os.getpid()
        self._rank, self._state, self._wake, self._spins = rank, state, wake, spins
        self._refusals = Refusals() if is_elastic else None
        # Of tensors under way, with their process sets. There is no lock: a signal handler may interrupt its holder, and
        # wait for other threads.
        self._names: dict[tuple[int, str], object] = {}

    # --- user threads ----------------------------------------------------------------------------------------------

    @property
    def in_child(self) -> bool:
        """Whether this process is a forked child, to which the rank does not belong."""
        return self.pid != os.getpid()

    def check_usable(self, name: str) -> None:
        """Raise the error of a call that cannot be made any more.

        Raises:
            ForkedProcessError: in a forked child.
            HorovodInternalError: when the job has failed.
            WorldEnded: likewise, in an elastic job, when the script does not heed that.
            NotInitializedError: after `shutdown()`.
        """
        if self.in_child:
            raise ForkedProcessError(f"'{name}': this process (pid {os.getpid()}) was forked from rank "
                                     f"{self._rank} (pid {self.pid}); collectives belong to the rank itself. "
                                     "Start workers with the spawn method if they must call init()")
        failure = self._state.failure
        if failure is not None:
            failure.with_traceback(None)
            raise failure if self._refusals is None else self._refusals.error(failure)
        if self.closed:
            raise NotInitializedError(f"'{name}': hvdlite has been shut down; call init() again")

    def enqueue(self, entry: Entry, *, at_once: bool = True) -> Handle:
        """Enqueue a tensor under a name that is free.

        Args:
            at_once: False lets the entry travel together with the next one, or when this rank waits for something.

        Raises:
            DuplicateNameError: when the name is in use; otherwise like `check_usable`.
        """
        self.reserve(entry.key)
        self.put(entry, at_once=at_once)
        return entry.handle

    def reserve(self, key: tuple[int, str]) -> None:
        """Let a name be in use: a process set and a tensor's name.

        Raises:
            DuplicateNameError: when it is; otherwise like `check_usable`.
        """
        name = key[1]
        self.check_usable(name)
        own = object()
        if self._names.setdefault(key, own) is not own:  # one step
            raise DuplicateNameError(f"'{name}' is still being processed on rank {self._rank}; wait for its handle "
                                     "first, or use another name")

    def put(self, item: Item, *, at_once: bool = True) -> None:
        """Enqueue an item of the thread that calls collectives."""
        self.last_caller = threading.get_ident()
        self.items.append(item)
        # The thread clears `awake`, then looks into the inbox, then sleeps: whoever sees it awake has been seen.
        if at_once and not self.awake:
            self._wake()
        if self._state.ended.is_set():
            self.abandon_all()  # the thread ended between the caller's check and the append

    def post(self, item: Item) -> None:
        """Enqueue an item from any thread, in the middle of anything: a finalizer or a signal handler may call this.

        It takes no lock but the doorbell's, which its holder may take again. After the end, and in a forked child, the item
        is dropped.
        """
        if not (self.in_child or self._state.ended.is_set()):
            self.items.append(item)
            if not self.awake:
                self._wake()

    def hurry(self) -> None:
        """The caller is about to block: let the background thread begin with what it has not been woken for."""
        if (self._spins or self.items) and not self.awake:
            self._wake()  # it may sleep already, since before the caller did, or not have seen its next task

    def release(self, key: tuple[int, str]) -> None:
        """Make a name free again; callable from any thread."""
        self._names.pop(key, None)

    # --- the background thread -------------------------------------------------------------------------------------

    def abandon_all(self) -> None:
        """Fail what no thread takes out of the inbox any more; callable from any thread."""
        while True:
            try:
                item = self.items.popleft()
            except IndexError:
                return
            if isinstance(item, (Entry, BucketEntry, Task)):
                item.abandon(self._state.closing_error())
