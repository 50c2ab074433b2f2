"""What the background thread sees of a group of ranks, whose calls are carried out by other threads."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from hvdlite.memory.area import Area
from hvdlite.negotiation.messages import CallWait, GroupCalls

PATIENCE_SECONDS: Final = 4.0
"""How long a rank waits for the others before it reports that to rank 0."""


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class LongWait:
    """A call in which this rank has waited for long.

    Attributes:
        name: for reports.
        number: of the collective in the group; 0 for a send or receive.
        ranks: that take part; of the group.
        missing: for which it waits, as seen by this rank; of the group.
        since: in `time.monotonic()`.
    """

    name: str
    number: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    since: float


@dataclasses.dataclass(eq=False)
class GroupState:
    """Written by the group's threads, and read without a lock by any.

    Attributes:
        identity: the same on all ranks of the group, and of no other group.
        ranks: of the runtime: those of the group, in its order.
        area: where this rank's threads sleep.
        changed: to be called when long waits are others than before.
        error: what every call fails with; None while the group can be used. The first one stays.
        has_runtime: False once the background thread has ended, which then is so on the other ranks, too.
        on_report: called when collectives fail, and when rank 0 gathers a report; once for all groups that have the same.
        begun: the number of the collective that this rank has begun last; 0 for none.
        runner: the thread that carries out a call; 0 for none.
        queue: calls that have not begun.
        waiting: by call: the thread that waits for it however long that takes, and what is set when it is over.
        callbacks: a key for each callback of a send or receive that has not returned.
        long_waits: by what waits.
        collective: the long wait for others to make the collective that is under way.
    """

    identity: str
    ranks: tuple[int, ...]
    area: Area
    changed: Callable[[], object] = _nothing
    error: Exception | None = None
    has_runtime: bool = True
    on_report: Callable[[], object] = _nothing
    begun: int = 0
    runner: int = 0
    queue: deque[object] = dataclasses.field(default_factory=deque)
    waiting: dict[object, tuple[int, threading.Event]] = dataclasses.field(default_factory=dict)
    callbacks: set[object] = dataclasses.field(default_factory=set)
    long_waits: dict[object, LongWait] = dataclasses.field(default_factory=dict)
    collective: LongWait | None = None

    # --- for the group's threads ----------------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Let the group fail: whoever waits in it finds the error."""
        self.error = self.error or error
        self.area.wake((self.area.index,))

    def wait_long(self, key: object, wait: LongWait) -> None:
        """A send or receive has been waited for long."""
        self.long_waits[key] = wait
        self.changed()

    def end_wait(self, key: object) -> None:
        """It is not waited for any more; again is fine."""
        if self.long_waits.pop(key, None) is not None:
            self.changed()

    def wait_for_all(self, wait: LongWait | None) -> None:
        """The collective under way has been waited for long; None: it is not any more."""
        if wait is not self.collective:
            self.collective = wait
            self.changed()

    def counted(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Return a callback of sends or receives as one that counts in `callbacks` until it has returned."""
        key = object()
        self.callbacks.add(key)

        def call() -> None:
            try:
                callback()
            finally:
                self.callbacks.discard(key)
        return call

    # --- for reports ------------------------------------------------------------------------------------------------------

    def calls(self) -> GroupCalls:
        """Return how far this rank is, and in which calls it has waited for long, with ranks of the runtime."""
        now, collective = time.monotonic(), self.collective
        waits = [*list(self.long_waits.values()), *([] if collective is None else [collective])]
        return GroupCalls(self.identity, self.begun, tuple(
            CallWait(wait.name, wait.number, self._of_runtime(wait.ranks), self._of_runtime(wait.missing), now - wait.since)
            for wait in waits))

    def blocked_threads(self) -> frozenset[int] | None:
        """Return the threads that cannot go on before a collective in which this rank has waited for long is over.

        None while calls are carried out that are not such a collective, and while a callback of a send or receive may make
        calls: they may end any time.
        """
        has_queue, runner = bool(self.queue), self.runner  # in this order: the runner is set before a call leaves the queue
        if self.callbacks:
            return None
        if self.collective is None:
            return None if runner or has_queue else frozenset()
        return frozenset((runner, *(thread for thread, over in list(self.waiting.values()) if not over.is_set())))

    def _of_runtime(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.ranks[rank] for rank in ranks)
