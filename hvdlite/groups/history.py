"""The last calls of a group on one rank, and how far each has come: for those who look for what went wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from hvdlite.groups.call import Call
from hvdlite.groups.plans import Prepared

REMEMBERED: Final = 2000
"""How many calls a rank remembers of each group."""


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


class History:
    """The last `REMEMBERED` calls of one rank. One thread at a time adds to it; any may read it.

    Attributes:
        add: remember the number of a call that begins, the time, and what it is. (The deque's own method: each call pays.)
    """

    def __init__(self) -> None:
        self._begun: deque[tuple[int, float, Prepared]] = deque(maxlen=REMEMBERED)
        self._refused: deque[int] = deque(maxlen=REMEMBERED)
        self.add = self._begun.append

    def refuse(self, number: int) -> None:
        """The ranks did not agree about a call."""
        self._refused.append(number)

    def calls(self, completed: int, now: float, queue: Sequence[Call]) -> list[PastCall]:
        """Return the calls, in order.

        Args:
            completed: the number of the last call that is over.
            now: on the clock of `add`.
            queue: what has not begun.
        """
        refused = frozenset(self._refused)
        found = [PastCall(number, prepared.response.names[0], now - begun,
                          "completed" if number <= completed and number not in refused else "started")
                 for number, begun, prepared in list(self._begun)]
        first = found[-1].number + 1 if found else 1
        waiting = [operation.agreed for call in queue for operation in call.operations]
        return found + [PastCall(number, text, 0.0, "scheduled") for number, text in enumerate(waiting, first)]
