"""The progress of the other ranks of a group: on one host by the group's area, between hosts by announcements.

On one host a rank writes the number of its call, a text that describes it and the text's digest to the area; then it arrives
at the first barrier of the call. When that barrier is complete, all ranks have written, and each one compares. So ranks that
differ all find it, at the same point, and after the same number of barriers. (On machines that reorder stores the barrier
orders what is written here, like all that ranks write before it. What is read without it is for messages only.)

Between hosts, ranks announce nothing in the ordinary case. A rank that leaves announces its *progress*: the calls that
it has begun and completed last. A rank that waits for long, or must report why a call has failed, asks the others for
theirs; their background threads answer, whatever their scripts do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from hvdlite.core.errors import MismatchError
from hvdlite.groups.members import GroupMembers
from hvdlite.memory.area import DIGEST, LEFT, LENGTH, NUMBER, TEXT, Area

if TYPE_CHECKING:
    from hvdlite.groups.execution import GroupExecutor
    from hvdlite.groups.link import GroupLink

SPLITS: Final = b"; splits "
"""In the text of an alltoall: what follows may differ between ranks. They then exchange their splits."""
_QUESTION: Final = b""


class Peers(Protocol):
    """The progress of the others as this rank is aware of it, by their indices in the group."""

    def ask(self, since: float) -> bool:
        """Return whether what is known is as new as the time `since`; if not, see to it that it becomes so."""

    def missing(self, number: int) -> tuple[int, ...]:
        """Return the ranks that are not known to have begun call `number`."""

    def left(self, number: int) -> tuple[int, ...]:
        """Return the ranks that have left without completing call `number`."""

    def last_calls(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        """Return some ranks, and for each the call that it has begun last, as a text."""


class LocalPeers:
    """Implements `Peers` for ranks that share an area. Only the thread that carries out a call writes and compares."""

    def __init__(self, area: Area) -> None:
        self._area, self._index = area, area.index
        self._others = [index for index in range(area.size) if index != area.index]
        self._written = [-1, -1]  # the digests of the texts that this rank has written last, by parity

    def write(self, number: int, text: bytes, digest: int) -> None:
        """Say what this rank calls."""
        area, parity = self._area, number & 1
        head = area.heads[self._index][parity]
        if self._written[parity] != digest:
            shown = text[:TEXT]
            area.texts[self._index][parity][:len(shown)] = shown
            head[LENGTH] = len(shown)
            head[DIGEST] = self._written[parity] = digest
        head[NUMBER] = number

    def agrees(self, number: int, digest: int) -> bool:
        """Return whether all ranks, which have written call `number`, have written this digest."""
        heads, parity = self._area.heads, number & 1
        for rank in self._others:
            head = heads[rank][parity]
            if head[DIGEST] != digest or head[NUMBER] != number:
                return False
        return True

    def texts(self, number: int) -> list[tuple[int, bytes]]:
        """Return the number of each rank's call, and its text, where call `number` is written."""
        parity = number & 1
        return [(heads[parity][NUMBER], bytes(texts[parity][:heads[parity][LENGTH]]))
                for heads, texts in zip(self._area.heads, self._area.texts, strict=True)]

    def ask(self, since: float) -> bool:
        return True  # what is in the area is always up to date

    def missing(self, number: int) -> tuple[int, ...]:
        heads = self._area.heads  # none once the group is closed
        return tuple(rank for rank in self._others if heads and max(each[NUMBER] for each in heads[rank]) < number)

    def left(self, number: int) -> tuple[int, ...]:
        lines = self._area.lines
        return tuple(rank for rank in self._others if lines and 0 < lines[rank][LEFT] <= number)

    def last_calls(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        found = []
        for rank in ranks:
            even, odd = self._area.heads[rank]
            number, text = self.texts(int(odd[NUMBER] > even[NUMBER]))[rank]
            found.append((rank, shown_call(number, text.decode(errors="replace"))))
        return found


class CallProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank is."""

    begun: int = 0  # the number of the call that it has begun last; 0 for none
    completed: int = 0  # of the one that it has completed last
    text: str = ""  # what the call that it has begun last is
    has_left: bool = False  # it makes no calls any more


class RemotePeers:
    """Implements `Peers` for ranks on several hosts.

    Args:
        link: carries announcements; those of one rank arrive in order.
        others: the other ranks.
        execution: its own progress is announced; it is woken when something has been received. Any thread may do so.
    """

    def __init__(self, link: GroupLink, others: list[int], execution: GroupExecutor) -> None:
        self._link = link
        self._others = others
        self._execution = execution
        self._known = dict.fromkeys(others, CallProgress())
        self._asked = -math.inf
        self._unanswered: set[int] = set()
        self._has_left = False
        link.listen(self._receive)

    def ask(self, since: float) -> bool:
        if self._asked < since:
            self._asked = time.monotonic()
            self._unanswered = {rank for rank in self._others if not self._known[rank].has_left}
            self._link.announce(sorted(self._unanswered), _QUESTION)
        return not self._unanswered

    def missing(self, number: int) -> tuple[int, ...]:
        return tuple(rank for rank in self._others if self._known[rank].begun < number)

    def left(self, number: int) -> tuple[int, ...]:
        return tuple(rank for rank, known in self._known.items() if known.has_left and known.completed < number)

    def last_calls(self, ranks: Sequence[int]) -> list[tuple[int, str]]:
        return [(rank, shown_call(self._known[rank].begun, self._known[rank].text)
                 + (", as far as is known: it does not answer" if rank in self._unanswered else "")) for rank in ranks]

    def leave(self, completed: int) -> None:
        """See `Area.leave`."""
        if not self._has_left and self._others:
            self._has_left = True
            progress = msgspec.structs.replace(self._execution.progress(), completed=completed, has_left=True)
            self._link.announce(self._others, msgspec.msgpack.encode(progress))

    def _receive(self, source: int, text: bytes) -> None:
        """Take in an announcement of another rank; callable from any thread."""
        if text == _QUESTION:
            if not self._has_left:
                self._link.announce((source,), msgspec.msgpack.encode(self._execution.progress()))
            return
        self._known[source] = msgspec.msgpack.decode(text, type=CallProgress)
        self._unanswered.discard(source)
        self._execution.wake()


class OnlySplitsDiffer(MismatchError):
    """The ranks call the same alltoall, but some are given what they get from each rank, and others do not."""


def disagreement(texts: Sequence[tuple[int, bytes]], members: GroupMembers) -> MismatchError:
    """Return the error of ranks that do not call the same; the same kind of error on all of them.

    Args:
        texts: by rank of the group: the number of its call, and what it is.
    """
    beginnings = {(number, text.partition(SPLITS)[0]) for number, text in texts}
    if len(beginnings) == 1 and all(SPLITS in text for _, text in texts):
        return OnlySplitsDiffer(members.name)
    calls: dict[str, list[int]] = {}
    first = texts[0][0]
    for rank, (number, text) in enumerate(texts):
        what = text.decode(errors="replace")
        calls.setdefault(what if number == first else f"{what} (as call {number})", []).append(rank)
    found = "; ".join(f"{text} on {members.named(ranks)}" for text, ranks in calls.items())
    return MismatchError(f"{members.name}, call {first}: the ranks do not call the same: {found}. All ranks have to make "
                         "the same calls in the same order")


def shown_call(number: int, text: str) -> str:
    """Return the last call of a rank as messages show it; number 0 stands for none."""
    return f"call {number}: {text}" if number else "nothing in this group"
