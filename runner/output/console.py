"""The output of many ranks on one console: whole lines, with prefixes. Pure, except one `write`."""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import itertools
import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from hvdlite_runner.placement import format_ranks

_END: Final = re.compile(r"\r\n|\r|\n")
LONGEST_LINE: Final = 1 << 16
"""Characters after which a line is written before its end has come."""
FOLD_SECONDS: Final = 0.3
"""Seconds that a line waits for the same line of other ranks, when lines are folded."""
BLOCK_SECONDS: Final = 1.0
"""Seconds in which a traceback is written: half of it for its lines, while its rank does not end, half for other ranks."""
WITHHELD: Final = 40
"""The number of last lines that are kept of a hidden stream, to show them if its rank fails."""

_FAILURE: Final = re.compile(  # torch names the rank; a SyntaxError of the script; argparse; Python without its program
    r"(\[rank\d+\]: )?Traceback \(most recent call last\):|  File \".*\", line \d+|usage: .*|"
    r"\S*python\S*: (No module named|can't) .*")
"""The first line of what a rank writes when it fails: a traceback, or what stands for one."""
_OF_OTHERS: Final = re.compile(r".*\[\d+\] hvdlite ERROR: rank \d+: rank \d+ failed with .*")
"""What a rank logs of another rank's failure, which hvdrun names itself."""
_RANK: Final = re.compile(r"^\[rank\d+\]: ", re.MULTILINE)
Key = tuple[int, str]
"""A rank and the name of one of its streams, "stdout" or "stderr"."""


@dataclasses.dataclass(frozen=True)
class OutputSettings:
    """How the output of a job's processes is shown.

    Attributes:
        directory: a folder for the output of each process, if any.
        prefix: whether lines begin with their rank.
        timestamps: whether lines begin with the time.
        show: "all", "rank0" or "errors".
        fold: whether a line that several ranks print is shown once.
        quiet: whether of hvdrun's own lines only failures are shown.
    """

    directory: str | None = None
    prefix: bool = True
    timestamps: bool = False
    show: str = "all"
    fold: bool = False
    quiet: bool = False


@dataclasses.dataclass
class _LineBuffer:
    """What has come of a line of one rank's stdout or stderr."""

    decoder: codecs.IncrementalDecoder
    unfinished: list[str] = dataclasses.field(default_factory=list)  # pieces of a line whose end has not come
    length: int = 0  # of these pieces
    held_return: bool = False  # a carriage return was the last character: the next one may make it \r\n
    is_cut: bool = False  # the line's beginning has been written already
    block: list[str] = dataclasses.field(default_factory=list)  # lines from a traceback's first one on
    block_until: float = 0.0


@dataclasses.dataclass
class _Folded:
    """A line that waits for the other ranks, or the lines of a traceback."""

    number: int  # counted from 0
    name: str
    body: str
    until: float
    ranks: list[int]


class Console:
    """Merges streams.

    A line is written when it is complete, or when `LONGEST_LINE` characters of it have come; then the rest follows it on the
    same line, unless another stream writes in between. A segment that ends in a carriage return (a progress bar) is written
    with it, so that the next segment of the same stream overwrites it; output of another stream begins on a new line
    instead. The time is linear in the length of the output.

    The lines from a traceback on (or a SyntaxError, or a usage), until the rank ends, are one block. Equal blocks of several
    ranks are written once.

    A process has a key: its rank, or in an elastic job its member's id.

    Args:
        write: called with a stream's name ("stdout" or "stderr") and text for it.
        settings: the prefix of each line, and what is shown; the last lines of hidden streams are kept for `reveal`.
        rank_of: returns the rank of a process; -1 for none.
        clock: returns seconds, for folding.

    Attributes:
        fold: the number of processes whose identical lines become one; 0 does not fold.
        processes: their number, as far as it is known.
        last_blocks: the traceback with which the standard error of a process ends.
        drops_interrupts: whether what ranks write of a KeyboardInterrupt is left out.
    """

    def __init__(self, write: Callable[[str, str], None], settings: OutputSettings,
                 rank_of: Callable[[int], int] = int, clock: Callable[[], float] = time.monotonic) -> None:
        self.fold = self.processes = 0
        self.last_blocks: dict[int, str] = {}
        self.drops_interrupts = False
        self._write = write
        self._settings = settings
        self._rank_of = rank_of
        self._clock = clock
        self._streams: dict[Key, _LineBuffer] = {}
        self._cursor_of: Key | None = None  # the stream whose progress bar or unfinished line the cursor is on
        self._waiting: deque[_Folded] = deque()
        self._by_number: dict[int, _Folded] = {}  # the same lines
        self._numbers: dict[tuple[str, str], list[int]] = {}  # of lines with the same text, ascending; old ones, too
        self._last_of: dict[int, int] = {}  # the number of each rank's last line
        self._count = 0  # of lines that have waited
        self._withheld: dict[Key, deque[str]] = {}

    def feed(self, rank: int, name: str, content: bytes) -> None:
        """Add output of a rank; empty when the stream has ended."""
        key = (rank, name)
        stream = self._streams.setdefault(key, _LineBuffer(codecs.getincrementaldecoder("utf-8")("replace")))
        text = "\r" * stream.held_return + stream.decoder.decode(content, final=not content)
        stream.held_return = bool(content) and text.endswith("\r")
        text = text[:-1] if stream.held_return else text
        start = 0
        for match in _END.finditer(text):
            stream.unfinished.append(text[start:match.start()])
            self._take(key, stream, "\r" if match.group() == "\r" else "\n")
            start = match.end()
        stream.unfinished.append(text[start:])
        stream.length += len(text) - start
        if stream.length >= LONGEST_LINE:
            self._take(key, stream, "")
        if not content:
            if stream.length or stream.is_cut:
                self._take(key, stream, "\n")
            if stream.block:
                self._close_block(key, stream, BLOCK_SECONDS)  # the others may still begin to end
            del self._streams[key]

    def finish(self) -> None:
        """Write unfinished lines, and end with the cursor at the beginning of a line."""
        for rank, name in list(self._streams):
            self.feed(rank, name, b"")
        self._unfold(everything=True)
        self._leave_line()

    def note(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._close_blocks(math.inf)
        self._unfold(everything=True)
        self._leave_line()
        self._write("stderr", text + "\n")

    def reveal(self, rank: int) -> None:
        """Write the last lines of a rank's hidden output."""
        for name in ("stdout", "stderr"):
            stream = self._streams.get((rank, name))
            if stream is not None and stream.block and not self._shown(rank, name):
                self._close_block((rank, name), stream)
            for body in self._withheld.pop((rank, name), ()):
                for line in body.split("\n"):
                    self._line(name, [rank], line)

    def flush_due(self) -> float | None:
        """Write lines that have waited long enough; return the seconds until the next call, None if none is needed."""
        now = self._clock()
        self._close_blocks(now)
        self._unfold()
        due = [stream.block_until for stream in self._streams.values() if stream.block]
        due += [line.until for line in itertools.islice(self._waiting, 1)]
        return max(0.0, min(due) - now) if due else None

    def _close_blocks(self, now: float, *, if_complete: bool = False) -> None:
        """Write the blocks that have been collected for long enough.

        Args:
            if_complete: only those whose last line may be that of the exception.
        """
        for key, stream in self._streams.items():
            if stream.block and stream.block_until <= now and not (if_complete and stream.block[-1][:1] in ("", " ")):
                self._close_block(key, stream)

    def _close_block(self, key: Key, stream: _LineBuffer, patience: float = BLOCK_SECONDS / 2) -> None:
        """Write a block, once for all ranks that have an equal one within `patience` seconds."""
        text, stream.block = _RANK.sub("", "\n".join(stream.block)), []
        self.last_blocks[key[0]] = text
        if self.drops_interrupts and "KeyboardInterrupt" in text:
            return
        if self._shown(*key):
            self._hold(*key, text, patience)
        else:
            self._withhold(key, text)

    def _withhold(self, key: Key, text: str) -> None:
        self._withheld.setdefault(key, deque(maxlen=WITHHELD)).append(text)

    def _take(self, key: Key, stream: _LineBuffer, end: str) -> None:
        """Show what has come of a line; `end` is its end, or "" when it goes on."""
        body, was_cut = "".join(stream.unfinished), stream.is_cut
        stream.unfinished, stream.length, stream.is_cut = [], 0, not end
        rank, name = key
        if name == "stderr" and end == "\n" and _OF_OTHERS.fullmatch(body):
            return
        if name == "stderr" and not stream.block:
            self.last_blocks.pop(rank, None)
        if not body and (end == "\r" or (was_cut and self._cursor_of != key)):
            return  # only a carriage return, before the bar's first text; or only the end of a line that was left
        if self.drops_interrupts and name == "stderr" and "KeyboardInterrupt" in body and not stream.block:
            return
        is_shown = self._shown(rank, name)
        if end == "\n" and not was_cut and (stream.block or (name == "stderr" and _FAILURE.fullmatch(body))):
            stream.block_until = stream.block_until if stream.block else self._clock() + BLOCK_SECONDS / 2
            stream.block.append(body)
        elif is_shown and self.fold > 1 and end == "\n" and not was_cut:
            self._hold(rank, name, body)
        else:
            if stream.block:
                self._close_block(key, stream)
                self.last_blocks.pop(rank)  # the rank goes on
            if not is_shown:
                return self._withhold(key, body) if end != "\r" else None
            self._close_blocks(math.inf, if_complete=True)
            self._unfold(everything=True)
            self._emit(key, body, end, continues=was_cut and self._cursor_of == key)

    def _hold(self, rank: int, name: str, body: str, patience: float = FOLD_SECONDS) -> None:
        """Add a rank's line to the same line of others, if it waits behind all of this rank's."""
        numbers = self._numbers.setdefault((name, body), [])
        first = self._waiting[0].number if self._waiting else self._count
        index = bisect.bisect_left(numbers, max(first, self._last_of.get(rank, -1) + 1))
        if index < len(numbers):
            self._by_number[numbers[index]].ranks.append(rank)
            self._last_of[rank] = numbers[index]
            return self._unfold()
        if len(numbers) > 2 * len(self._waiting) + WITHHELD:
            del numbers[:index]  # they wait no more
        line = _Folded(self._count, name, body, self._clock() + patience, [rank])
        self._count += 1
        self._waiting.append(line)
        self._by_number[line.number] = line
        numbers.append(line.number)
        self._last_of[rank] = line.number

    def _unfold(self, *, everything: bool = False) -> None:
        while self._waiting:
            line = self._waiting[0]
            if not everything and len(line.ranks) < max(self.fold, self.processes) and line.until > self._clock():
                return
            self._waiting.popleft()
            del self._by_number[line.number]
            if self._numbers[line.name, line.body][-1] == line.number:
                del self._numbers[line.name, line.body]
            is_block = "\n" in line.body
            times = f" (x{len(line.ranks)})" if len(line.ranks) > 1 and not is_block else ""
            for each in line.body.split("\n"):
                self._line(line.name, line.ranks, each + times)

    def _line(self, name: str, ranks: Sequence[int], body: str) -> None:
        self._leave_line()
        self._write(name, f"{self._prefix(ranks, name)}{body}\n")

    def _prefix(self, keys: Sequence[int], name: str) -> str:
        """Return the prefix of a line of some processes, which are called by their ranks, or +key before they have one."""
        when = f"{time.asctime()} " if self._settings.timestamps else ""
        if not self._settings.prefix:
            return when
        ranks = {key: self._rank_of(key) for key in sorted(keys)}
        ranked = format_ranks(rank for rank in ranks.values() if rank >= 0)
        names = ",".join(filter(None, [ranked, *(f"+{key}" for key, rank in ranks.items() if rank < 0)]))
        return f"{when}[{names}]<{name}>:"

    def _shown(self, key: int, name: str) -> bool:
        return {"all": True, "rank0": self._rank_of(key) == 0, "errors": name == "stderr"}[self._settings.show]

    def _emit(self, key: Key, body: str, end: str, *, continues: bool) -> None:
        if self._cursor_of is not None and self._cursor_of != key:
            self._leave_line()
        prefix = "" if continues else self._prefix([key[0]], key[1])
        self._write(key[1], f"{prefix}{body}{end}")
        self._cursor_of = None if end == "\n" else key

    def _leave_line(self) -> None:
        if self._cursor_of is not None:
            self._write(self._cursor_of[1], "\n")
            self._cursor_of = None
