"""The output of many ranks on one console: whole lines, with prefixes. Pure, except one `write`."""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

_PIECE: Final = re.compile(r"[^\r\n]*(?:\r\n|\r(?!$)|\n)|[^\r\n]*\r(?=$)")
FOLD_SECONDS: Final = 0.3
"""Seconds that a line waits for the same line of other ranks, when lines are folded."""
WITHHELD: Final = 40
"""The number of last lines that are kept of a hidden stream, to show them if its rank fails."""

Key = tuple[int, str]
"""A rank and the name of one of its streams, "stdout" or "stderr"."""


@dataclasses.dataclass
class _Stream:
    """One rank's stdout or stderr."""

    decoder: codecs.IncrementalDecoder
    unfinished: str = ""


@dataclasses.dataclass
class _Folded:
    """A line that waits for the other ranks."""

    name: str
    body: str
    until: float
    ranks: list[int]


class Console:
    """Merges streams.

    A line is written when it is complete. A segment that ends in a carriage return (a progress bar) is written with it, so
    that the next segment of the same stream overwrites it; output of another stream begins on a new line instead.

    Args:
        write: called with a stream's name ("stdout" or "stderr") and text for it.
        prefix: returns the prefix of each line of (ranks, stream name).
        shown: returns whether a stream is shown; the last lines of hidden ones are kept for `reveal`.
        fold: the number of ranks whose identical lines become one; 0 does not fold.
        clock: returns seconds, for folding.
        names: returns how ranks are called in prefixes.
    """

    def __init__(self, write: Callable[[str, str], None], prefix: Callable[[str, str], str], *,
                 shown: Callable[[int, str], bool] = lambda rank, name: True, fold: int = 0,
                 clock: Callable[[], float] = lambda: 0.0,
                 names: Callable[[Iterable[int]], str] = lambda ranks: format_ranks(ranks)) -> None:
        self.fold = fold
        self._write, self._prefix, self._shown = write, prefix, shown
        self._clock, self._names = clock, names
        self._streams: dict[Key, _Stream] = {}
        self._bar_of: Key | None = None  # the stream whose progress bar the cursor is on
        self._waiting: deque[_Folded] = deque()
        self._withheld: dict[Key, deque[str]] = {}

    def feed(self, rank: int, name: str, content: bytes) -> None:
        """Add output of a rank; empty when the stream has ended."""
        key = (rank, name)
        stream = self._streams.setdefault(key, _Stream(codecs.getincrementaldecoder("utf-8")("replace")))
        text = stream.unfinished + stream.decoder.decode(content, final=not content)
        end = 0
        for match in _PIECE.finditer(text):
            if match.group().endswith("\r") and match.end() == len(text) and content:
                break  # the next byte may make it \r\n
            self._take(key, match.group())
            end = match.end()
        stream.unfinished = text[end:]
        if not content and stream.unfinished:
            self._take(key, stream.unfinished.rstrip("\r") + "\n")
            stream.unfinished = ""

    def finish(self) -> None:
        """Write unfinished lines, and end with the cursor at the beginning of a line."""
        for rank, name in list(self._streams):
            self.feed(rank, name, b"")
        self._unfold(everything=True)
        self._leave_bar()

    def note(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._unfold(everything=True)
        self._leave_bar()
        self._write("stderr", text + "\n")

    def reveal(self, rank: int) -> None:
        """Write the last lines of a rank's hidden output."""
        for name in ("stdout", "stderr"):
            for body in self._withheld.pop((rank, name), ()):
                self._line(name, self._names([rank]), body)

    def flush_due(self) -> float | None:
        """Write lines that have waited long enough; return the seconds until the next call, None if none is needed."""
        self._unfold()
        return max(0.0, self._waiting[0].until - self._clock()) if self._waiting else None

    def _take(self, key: Key, piece: str) -> None:
        rank, name = key
        body, bar = piece.rstrip("\r\n"), piece.endswith("\r") and not piece.endswith("\n")
        if bar and not body:
            return  # only a carriage return, before the bar's first text
        if not self._shown(rank, name):
            if not bar:
                self._withheld.setdefault(key, deque(maxlen=WITHHELD)).append(body)
        elif self.fold > 1 and not bar:
            self._hold(rank, name, body)
        else:
            self._unfold(everything=True)
            self._emit(key, body, bar)

    def _hold(self, rank: int, name: str, body: str) -> None:
        """Add a rank's line to the same line of others, if none of its own lines waits behind that one."""
        for line in reversed(self._waiting):
            if rank in line.ranks:
                break
            if (line.name, line.body) == (name, body):
                line.ranks.append(rank)
                return self._unfold()
        self._waiting.append(_Folded(name, body, self._clock() + FOLD_SECONDS, [rank]))

    def _unfold(self, *, everything: bool = False) -> None:
        while self._waiting:
            line = self._waiting[0]
            if not everything and len(line.ranks) < self.fold and line.until > self._clock():
                return
            self._waiting.popleft()
            times = f" (x{len(line.ranks)})" if len(line.ranks) > 1 else ""
            self._line(line.name, self._names(line.ranks), line.body + times)

    def _line(self, name: str, ranks: str, body: str) -> None:
        self._leave_bar()
        self._write(name, f"{self._prefix(ranks, name)}{body}\n")

    def _emit(self, key: Key, body: str, bar: bool) -> None:
        if self._bar_of is not None and self._bar_of != key:
            self._leave_bar()
        self._write(key[1], f"{self._prefix(self._names([key[0]]), key[1])}{body}{chr(13) if bar else chr(10)}")
        self._bar_of = key if bar else None

    def _leave_bar(self) -> None:
        if self._bar_of is not None:
            self._write(self._bar_of[1], "\n")
            self._bar_of = None


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ranges: 0-3,5."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
