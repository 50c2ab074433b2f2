"""How a thread waits in a call of an ordered group: it sleeps on a word in shared memory, and fails with the group."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from hvdlite.core.errors import OperationTimeoutError, PeerLeftError
from hvdlite.memory.group_area import GroupArea
from hvdlite.ordered.board import Board, names

LOOK_SECONDS: Final = 1.0
"""How long a thread sleeps at most before it looks again whether others have left."""


class Waiter:
    """Waits for the other ranks in one call after the other; implements `planes.base.WaitUntil`.

    Only the thread that carries out a call waits; any thread may let it fail.

    Args:
        group: for messages.
        board: None where the ranks of the group do not share one.
        members: the name of each rank, for messages.
        impatient: called whenever a wait has taken `patience` seconds (again); may raise an error that ends it.

    Attributes:
        error: what every wait fails with; None while the group can be used.
    """

    def __init__(self, group: str, area: GroupArea, board: Board | None, members: tuple[str, ...],
                 impatient: Callable[[], None], patience: float) -> None:
        self.error: Exception | None = None
        self._impatient, self._patience = impatient, patience
        self._group, self._area, self._board, self._members = group, area, board, members
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
            if now >= self._deadline:
                raise self._timed_out()
            if now >= patient_until:
                patient_until = now + self._patience
                self._impatient()
            word.wait(seen, min(look, self._deadline - now, patient_until - now))

    def _check_left(self) -> None:
        """Raise an error if the call waits for a rank that has left.

        Of ranks that have left, those that did not make the call are named. Else the others wait until all have begun it:
        a rank that has given up early must not hide whom it has waited for.
        """
        left = self._board.left(self._sequence) if self._board is not None else []
        if self._board is None or not left:
            return
        missing = self._board.missing(self._sequence)
        gone = [rank for rank in left if rank in missing]
        if gone:
            raise PeerLeftError(f"{self._call()} needs {names(gone, self._members)}, which left the group (its "
                                "process ended, or destroyed or aborted the group) without making this call", gone[0])
        if not missing:
            raise PeerLeftError(f"{self._call()} needs {names(left, self._members)}, which left the group in the middle of "
                                "this call (it failed there, was interrupted, or destroyed or aborted the group)", left[0])

    def _timed_out(self) -> OperationTimeoutError:
        text = f"{self._call()} has not ended within its timeout of {self._timeout:g} s"
        missing: list[int] = []
        if self._board is not None:
            missing = self._board.missing(self._sequence)
            if missing:
                text += f": {names(missing, self._members)} did not make this call"
                others = self._board.last_calls(missing)
                text += "".join(f"\n{names([rank], self._members)} last called {last}" for rank, last in others[:8])
        return OperationTimeoutError(text, tuple(missing))

    def _call(self) -> str:
        return f"{self._group}, call {self._sequence}: {self._text.decode(errors='replace')}"
