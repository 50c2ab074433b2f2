"""How a thread waits in a call of an ordered group: it sleeps on a word in shared memory, and fails with the group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from hvdlite.core.errors import OperationTimeoutError, PeerLeftError
from hvdlite.groups.board import names
from hvdlite.memory.group_area import GroupArea

LOOK_SECONDS: Final = 1.0
"""How long a thread sleeps at most before it looks again whether others have left."""
ANSWER_SECONDS: Final = 2.0
"""How long the other ranks have to say how far they are."""


class Others(Protocol):
    """What a rank knows of the other ranks' calls."""

    def ask(self, since: float) -> bool:
        """Return whether what is known is as new as the time `since`; if not, see to it that it becomes so."""

    def missing(self, sequence: int) -> list[int]:
        """Return the ranks that are not known to have begun call `sequence`."""

    def left(self, sequence: int) -> list[int]:
        """Return the ranks that have left without completing call `sequence`."""

    def last_calls(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """Return some ranks, and for each the call that it has begun last, as a text."""

    def leave(self, completed: int) -> None:
        """This rank makes no calls any more; those that wait see it. Again is fine.

        Args:
            completed: the number of the last call that it has completed; 0 for none.
        """

    def close(self) -> None:
        """Look at nothing any more."""


class Waiter:
    """Waits for the other ranks in one call after the other; implements `planes.base.WaitUntil`.

    Only the thread that carries out a call waits; any thread may let it fail.

    Args:
        group: for messages.
        members: the name of each rank, for messages.
        impatient: called whenever a wait has taken `patience` seconds (again); may raise an error that ends it.

    Attributes:
        error: what every wait fails with; None while the group can be used.
    """

    def __init__(self, group: str, area: GroupArea, others: Others, members: tuple[str, ...],
                 impatient: Callable[[], None], patience: float) -> None:
        self.error: Exception | None = None
        self._impatient, self._patience = impatient, patience
        self._group, self._area, self._others, self._members = group, area, others, members
        self._sequence, self._text, self._timeout, self._deadline = 0, b"", 0.0, 0.0

    def begin(self, sequence: int, text: bytes, timeout: float) -> None:
        """A call begins."""
        self._sequence, self._text, self._timeout = sequence, text, timeout
        self._deadline = 0.0

    def fail(self, error: Exception) -> None:
        """Let the wait under way and all later ones fail; callable from any thread. The first error stays."""
        if self.error is None:
            self.error = error
        self._area.ring()

    def reason(self, failed: Exception) -> Exception:
        """Return why a call has failed: a plane between hosts sees only that another rank does not answer.

        Args:
            failed: the plane's error; it has waited for news of other ranks before it has raised that.
        """
        left = self._others.left(self._sequence)
        return self._left(left) if left else failed

    def __call__(self, predicate: Callable[[], bool], *, poll_interval: float = 0.0) -> None:
        if predicate():
            return
        word, look = self._area.word, poll_interval or LOOK_SECONDS
        now = time.monotonic()
        if not self._deadline:
            self._deadline = now + self._timeout
        patient_until = now + self._patience
        while True:
            seen = word.value
            if predicate():
                return
            if self.error is not None:
                raise self.error.with_traceback(None)
            self._check_left()
            now = time.monotonic()
            if now >= self._deadline and (self._others.ask(self._deadline) or now >= self._deadline + ANSWER_SECONDS):
                raise self._timed_out()
            if now >= patient_until and (self._others.ask(patient_until) or now >= patient_until + ANSWER_SECONDS):
                patient_until = now + self._patience
                self._impatient()
            next_times = (each if now < each else each + ANSWER_SECONDS for each in (self._deadline, patient_until))
            word.wait(seen, max(0.0, min(look, *(each - now for each in next_times))))

    def _check_left(self) -> None:
        """Raise an error if the call waits for a rank that has left.

        Of ranks that have left, those that did not make the call are named. Else the others wait until all have begun it:
        a rank that has given up early must not hide whom it has waited for.
        """
        left = self._others.left(self._sequence)
        if not left:
            return
        missing = self._others.missing(self._sequence)
        if not missing or not set(missing).isdisjoint(left):
            raise self._left(left)
        self._others.ask(time.monotonic() - LOOK_SECONDS)

    def _left(self, left: list[int]) -> PeerLeftError:
        missing = self._others.missing(self._sequence)
        gone = [rank for rank in left if rank in missing]
        if gone:
            return PeerLeftError(f"{self._call()} needs {names(gone, self._members)}, which left the group (its "
                                 "process ended, or destroyed or aborted the group) without making this call", gone[0])
        also = f", which {names(missing, self._members)} did not make" if missing else ""
        return PeerLeftError(f"{self._call()} needs {names(left, self._members)}, which left the group in the middle of "
                             f"this call{also} (it failed there, was interrupted, or destroyed or aborted the group)",
                             left[0])

    def _timed_out(self) -> OperationTimeoutError:
        text = f"{self._call()} has not ended within its timeout of {self._timeout:g} s"
        missing = self._others.missing(self._sequence)
        if missing:
            text += f": {names(missing, self._members)} did not make this call"
            others = self._others.last_calls(missing)
            text += "".join(f"\n{names([rank], self._members)} last called {last}" for rank, last in others[:8])
        else:
            text += (": all ranks have made this call, and one of them does not go on in it; rank 0's log names ranks that "
                     "do not answer")
        return OperationTimeoutError(text, tuple(missing))

    def _call(self) -> str:
        return f"{self._group}, call {self._sequence}: {self._text.decode(errors='replace')}"
