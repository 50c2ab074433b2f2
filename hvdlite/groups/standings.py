"""What the ranks of an ordered group on several hosts know of each other's calls: they have no common board.

In the ordinary case they tell each other nothing. A rank that leaves tells the others how far it is, its *standing*. A rank
that waits for long, or must say why a call has failed, asks the others for theirs; their background threads answer, whatever
their scripts do. Messages travel through rank 0 of the runtime on which the group lives.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from hvdlite.groups.board import shown_call

_QUESTION = b""


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank is."""

    begun: int = 0  # the number of the call that it has begun last; 0 for none
    completed: int = 0  # of the one that it has completed last
    text: str = ""  # what the call that it has begun last is
    has_left: bool = False  # it makes no calls any more


class Announcements(Protocol):
    """Carries a few bytes between the ranks of a group. Callable from any thread."""

    def announce(self, to: Sequence[int], text: bytes) -> None:
        """Send a few bytes to other ranks; those of one rank arrive in order."""

    def hear(self, hear: Callable[[int, bytes], None]) -> None:
        """Let a function be called with the sender and text of each announcement, those included that have come before."""

    def close(self) -> None:
        """Hear nothing any more."""


class Standings:
    """One rank's view of the others; implements `waiter.Others`.

    Args:
        announcements: owned by this object.
        own: returns how far this rank is; called by any thread.
        changed: called when something has been heard; by any thread.
    """

    def __init__(self, announcements: Announcements, rank: int, size: int, own: Callable[[], Standing],
                 changed: Callable[[], None]) -> None:
        self._announcements, self._own, self._changed = announcements, own, changed
        self._others = [other for other in range(size) if other != rank]
        self._known = dict.fromkeys(self._others, Standing())
        self._asked, self._unanswered = -math.inf, set[int]()
        self._has_left = False
        announcements.hear(self._heard)

    def ask(self, since: float) -> bool:
        """See `waiter.Others`."""
        if self._asked < since:
            self._asked = time.monotonic()
            self._unanswered = {rank for rank in self._others if not self._known[rank].has_left}
            self._announcements.announce(sorted(self._unanswered), _QUESTION)
        return not self._unanswered

    def missing(self, sequence: int) -> list[int]:
        """See `waiter.Others`."""
        return [rank for rank in self._others if self._known[rank].begun < sequence]

    def left(self, sequence: int) -> list[int]:
        """See `waiter.Others`."""
        return [rank for rank in self._others if self._known[rank].has_left and self._known[rank].completed < sequence]

    def last_calls(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """See `waiter.Others`."""
        return [(rank, shown_call(self._known[rank].begun, self._known[rank].text)
                 + (", as far as is known: it does not answer" if rank in self._unanswered else "")) for rank in ranks]

    def leave(self, completed: int) -> None:
        """See `waiter.Others`."""
        if not self._has_left and self._others:
            self._has_left = True
            standing = msgspec.structs.replace(self._own(), completed=completed, has_left=True)
            self._announcements.announce(self._others, msgspec.msgpack.encode(standing))

    def close(self) -> None:
        """Hear nothing any more."""
        self._announcements.close()

    def _heard(self, source: int, text: bytes) -> None:
        if text == _QUESTION:
            if not self._has_left:
                self._announcements.announce((source,), msgspec.msgpack.encode(self._own()))
            return
        self._known[source] = msgspec.msgpack.decode(text, type=Standing)
        self._unanswered.discard(source)
        self._changed()
