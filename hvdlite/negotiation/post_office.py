"""Notes at the coordinator: passed on to those whom they are for, or kept until somebody asks for them. Pure.

So connecting N ranks costs as many texts as there are pairs that connect, not N times N of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from hvdlite.negotiation.messages import Note, SideMessage, Wanted


class PostOffice:
    """The coordinator's notes."""

    def __init__(self) -> None:
        self._kept: dict[Wanted, Note] = {}
        self._asked: defaultdict[Wanted, list[int]] = defaultdict(list)  # who waits for a note that has not come
        self._out: defaultdict[int, list[Note]] = defaultdict(list)  # to be delivered, by receiver

    def take(self, rank: int, side_message: SideMessage) -> None:
        """Take in the notes that a rank sends, and those that it wants."""
        for note in side_message.notes:
            bare = Note(note.label, note.sender, note.text)
            place = Wanted(note.label, note.sender)
            if not note.ranks:
                self._kept[place] = bare
            for receiver in note.ranks or self._asked.pop(place, ()):
                self._out[receiver].append(bare)
        for wanted in side_message.wanted:
            if wanted in self._kept:
                self._out[rank].append(self._kept[wanted])
            else:
                self._asked[wanted].append(rank)
        for label in side_message.withdrawn:
            self._kept.pop(Wanted(label, rank), None)

    def deliver(self) -> Mapping[int, tuple[Note, ...]]:
        """Return what is to be delivered, by receiver, once."""
        out = {rank: tuple(notes) for rank, notes in self._out.items()}
        self._out.clear()
        return out
