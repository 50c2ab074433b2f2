"""The board of an ordered group on one host: each rank says there what it calls, and finds whether the others call the same.

A rank writes the number of its call, a text that describes it and the text's digest; then it arrives at the first barrier of
the call. When that barrier is complete, all ranks have written, and each one compares. So ranks that differ all find it, at
the same point, and after the same number of barriers.

On machines that reorder stores the barrier orders what is written here, like all that ranks write before it. What is read
without it (`missing`) is for messages only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from hvdlite.core.errors import MismatchError
from hvdlite.memory.group_area import TEXT, GroupArea


def digest_of(text: bytes) -> int:
    """Return a number of 63 bits that stands for a text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


SPLITS: Final = b"; splits "
"""In the text of an alltoall: what follows may differ between ranks. They then exchange their splits."""


class Board:
    """One rank's view of the board; implements `waiter.Others`.

    Only the thread that carries out a call writes and compares.
    """

    def __init__(self, area: GroupArea) -> None:
        self._area, self._index = area, area.index
        self._others = [(index, area.heads[index]) for index in range(area.size) if index != area.index]
        self._written = [-1, -1]  # the digests of the texts that this rank has written last, by parity

    def write(self, sequence: int, text: bytes, digest: int) -> None:
        """Say what this rank calls."""
        area, parity = self._area, sequence & 1
        head = area.heads[self._index][parity]
        if self._written[parity] != digest:
            shown = text[:TEXT]
            area.texts[self._index][parity][:len(shown)] = shown
            head[2] = len(shown)
            head[1] = self._written[parity] = digest
        head[0] = sequence

    def agrees(self, sequence: int, digest: int) -> bool:
        """Return whether all ranks, which have written call `sequence`, have written this digest."""
        parity = sequence & 1
        for _, heads in self._others:
            number, other, _ = heads[parity]
            if other != digest or number != sequence:
                return False
        return True

    def texts(self, sequence: int) -> list[tuple[int, bytes]]:
        """Return the number of each rank's call, and its text, where call `sequence` is written."""
        area, parity = self._area, sequence & 1
        return [(area.heads[index][parity][0], bytes(area.texts[index][parity][:area.heads[index][parity][2]]))
                for index in range(area.size)]

    def ask(self, since: float) -> bool:
        """See `waiter.Others`: what is on the board is always up to date."""
        return True

    def missing(self, sequence: int) -> list[int]:
        """See `waiter.Others`."""
        return [index for index, heads in self._others if max(heads[0][0], heads[1][0]) < sequence]

    def last_calls(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """See `waiter.Others`."""
        found = []
        for rank in ranks:
            heads = self._area.heads[rank]
            parity = int(heads[1][0] > heads[0][0])
            number, text = self.texts(parity)[rank]
            found.append((rank, shown_call(number, text.decode(errors="replace"))))
        return found

    def leave(self, completed: int) -> None:
        """See `waiter.Others`; those that sleep see it when they are woken."""
        if self._area.lines:  # else a thread of this rank is late: the group was closed, which others have seen
            self._area.lines[self._index][0] = 1 + completed

    def close(self) -> None:
        """Look at the memory no more."""
        self._others = []

    def left(self, sequence: int) -> list[int]:
        """See `waiter.Others`."""
        return [index for index, line in enumerate(self._area.lines) if 0 < line[0] <= sequence and index != self._index]


class OnlySplitsDiffer(MismatchError):
    """The ranks call the same alltoall, but some know without being told what they get from each rank, and others do not."""


def disagreement(group: str, texts: Sequence[tuple[int, bytes]], name_of: Sequence[str]) -> MismatchError:
    """Return the error of ranks that do not call the same; the same kind of error on all of them.

    Args:
        texts: by rank of the group: the number of its call, and what it is.
        name_of: of each rank, for messages.
    """
    beginnings = {(number, text.partition(SPLITS)[0]) for number, text in texts}
    if len(beginnings) == 1 and all(SPLITS in text for _, text in texts):
        return OnlySplitsDiffer(group)
    calls: dict[str, list[int]] = {}
    sequence = texts[0][0]
    for rank, (number, text) in enumerate(texts):
        what = text.decode(errors="replace")
        calls.setdefault(what if number == sequence else f"{what} (as call {number})", []).append(rank)
    found = "; ".join(f"{text} on {names(ranks, name_of)}" for text, ranks in calls.items())
    return MismatchError(f"{group}, call {sequence}: the ranks do not call the same: {found}. All ranks have to make the "
                         "same calls in the same order")


def shown_call(number: int, text: str) -> str:
    """Return the last call of a rank as messages show it; number 0 stands for none."""
    return f"call {number}: {text}" if number else "nothing in this group"


def names(ranks: Sequence[int], name_of: Sequence[str]) -> str:
    """Return a text that names ranks of a group."""
    found = [name_of[rank] for rank in ranks]
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {', '.join(found[:8])}{', ...' if len(found) > 8 else ''}"
