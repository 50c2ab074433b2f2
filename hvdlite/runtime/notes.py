"""How planes of different ranks swap the few bytes by which they connect: through rank 0, authenticated like all messages.

A plane that makes a connection for a process set does so in the middle of a plan, on all members at the same place of the
decision stream. So a swap needs no answer: everybody says its own and waits for the others'; a death interrupts that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hvdlite.negotiation.messages import Aside, Note
from hvdlite.planes.base import WaitUntil


class Notes:
    """One rank's; only its runtime thread calls it.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._received: dict[str, dict[int, bytes]] = {}  # by label and sender
        self._say: Callable[[Aside], None] = lambda aside: None

    def speak_through(self, say: Callable[[Aside], None]) -> None:
        """Send what is swapped from now on with `say`."""
        self._say = say

    def take_in(self, notes: Iterable[Note]) -> None:
        """A decision brought notes."""
        for note in notes:
            if self._rank in note.ranks:
                self._received.setdefault(note.label, {})[note.sender] = note.text

    def swap(self, label: str, ranks: Sequence[int], text: bytes, wait_until: WaitUntil) -> list[bytes]:
        """Return what each of `ranks` gave, in their order; all of them call this with the same label, once."""
        self._say(Aside(notes=(Note(label, self._rank, tuple(ranks), text),)))
        received = self._received.setdefault(label, {})
        wait_until(lambda: len(received) == len(ranks))
        del self._received[label]
        return [received[rank] for rank in ranks]
