"""Many ranks' output on one console: whole lines, prefixed, never torn. Pure but for one `write`."""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections.abc import Callable
from typing import Final

_PIECE: Final = re.compile(r"[^\r\n]*(?:\r\n|\r(?!$)|\n)|[^\r\n]*\r(?=$)")


@dataclasses.dataclass
class _Stream:
    """One rank's stdout or stderr."""

    decoder: codecs.IncrementalDecoder
    unfinished: str = ""


class Console:
    """Merges streams.

    A line is written when it is complete. A segment that ends in a carriage return (a progress bar) is written with it,
    so that it is overwritten in place as long as its own stream goes on; when another stream comes between, the bar is
    left standing and a new line begins.

    Args:
        write: takes a stream's name ("stdout" or "stderr") and text for it.
        prefix: returns what stands before each line of (rank, stream name).
    """

    def __init__(self, write: Callable[[str, str], None], prefix: Callable[[int, str], str]) -> None:
        self._write, self._prefix = write, prefix
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._bar_of: tuple[int, str] | None = None  # whose progress bar the cursor stands on

    def feed(self, rank: int, name: str, content: bytes) -> None:
        """Take in what a rank wrote; empty means that the stream has ended."""
        key = (rank, name)
        stream = self._streams.setdefault(key, _Stream(codecs.getincrementaldecoder("utf-8")("replace")))
        text = stream.unfinished + stream.decoder.decode(content, final=not content)
        end = 0
        for match in _PIECE.finditer(text):
            if match.group().endswith("\r") and match.end() == len(text) and content:
                break  # the next byte may make it \r\n
            self._emit(key, match.group())
            end = match.end()
        stream.unfinished = text[end:]
        if not content and stream.unfinished:
            self._emit(key, stream.unfinished.rstrip("\r") + "\n")
            stream.unfinished = ""

    def finish(self) -> None:
        """Write what is unfinished, and leave the cursor at the beginning of a line."""
        for rank, name in list(self._streams):
            self.feed(rank, name, b"")
        self._leave_bar()

    def note(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._leave_bar()
        self._write("stderr", text + "\n")

    def _emit(self, key: tuple[int, str], piece: str) -> None:
        bar = piece.endswith("\r") and not piece.endswith("\n")
        body = piece.rstrip("\r\n")
        if bar and not body:
            return  # a bare return before the bar's first text
        if self._bar_of is not None and self._bar_of != key:
            self._leave_bar()
        self._write(key[1], f"{self._prefix(*key)}{body}{chr(13) if bar else chr(10)}")
        self._bar_of = key if bar else None

    def _leave_bar(self) -> None:
        if self._bar_of is not None:
            self._write(self._bar_of[1], "\n")
            self._bar_of = None
