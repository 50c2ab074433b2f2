"""The timeline's file, which rank 0 writes in Chrome's trace format, for Perfetto and chrome://tracing.

The file is a JSON array that is complete after every write, because each write replaces the closing bracket by new events
and a closing bracket. A write that fails in its middle is taken back, and is the last one. Linux ends a write at the next
page when its process is killed (`generic_perform_write`), so SIGKILL at that moment cuts the last event; what precedes it
is complete, and the format does not require the array's end. A process is a rank, a thread is a tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hvdlite.core.errors import ConfigError
from hvdlite.negotiation.messages import TraceEvent

_log = logging.getLogger("hvdlite")
_encode = msgspec.json.encode
_END = b"\n]\n"


@dataclasses.dataclass(frozen=True)
class TimelineRequest:
    """The user of rank 0 wants a timeline in that file, or none any more ("")."""

    path: str
    answer: Callable[[Exception | None], None]  # ends the user's wait, with an error if there is one


class Timeline:
    """Rank 0's side of timelines: at most one at a time. Only the background thread calls it.

    Args:
        size: ranks of the job.
        switch: makes all ranks begin to trace what they do, or stop, at one decision.
    """

    def __init__(self, size: int, switch: Callable[[bool], None], clock: Callable[[], float]) -> None:
        self._size = size
        self._switch = switch
        self._clock = clock
        self._file: TimelineFile | None = None
        self._requests: list[TimelineRequest] = []  # not fulfilled yet

    def change(self, request: TimelineRequest) -> None:
        """Begin to fulfil a request."""
        if (self._file.path if self._file else "") == request.path:
            request.answer(None)
            return
        if request.path:
            try:
                opened = TimelineFile(request.path, self._size, self._clock)
            except ConfigError as error:
                request.answer(error)
                return
            if self._file is not None:
                self._file.close()
            self._file = opened
        self._requests.append(request)
        self._switch(bool(request.path))

    def started(self) -> None:
        """This rank traces from now on."""
        self._answer(starts=True)

    def receive(self, rank: int, events: Sequence[TraceEvent], leaving: bool) -> None:
        """Write what a rank reports; close the file after the last report of the last rank."""
        if self._file is None:
            return
        self._file.add(rank, events)
        if leaving:
            self._file.open_ranks.discard(rank)
        if not self._file.open_ranks:
            self._file.close()
            self._file = None
            self._answer(starts=False)

    def close(self, events: Sequence[TraceEvent], reason: Exception) -> None:
        """The job is over: write rank 0's last events and close the file; requests fail."""
        if self._file is not None:
            self._file.add(0, events)
            self._file.close()
        for request in self._requests:
            request.answer(reason)
        self._requests.clear()

    def _answer(self, *, starts: bool) -> None:
        for request in [each for each in self._requests if bool(each.path) == starts]:
            self._requests.remove(request)
            request.answer(None)


class TimelineFile:
    """An open timeline.

    Args:
        path: what is there is overwritten.
        size: ranks of the job.

    Attributes:
        open_ranks: those that may have more to report.

    Raises:
        ConfigError: when the file cannot be written.
    """

    def __init__(self, path: str, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.open_ranks = set(range(size))
        self._lanes: dict[tuple[int, str], int] = {}
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            self._put(b"[" + _END, 0)
        except OSError as error:
            self.close()
            raise ConfigError(f"the timeline cannot be written to {path}: {error.strerror}") from None
        self._position = 1  # where the next event goes, with the comma before it
        begin = {"ph": "M", "pid": 0, "name": "process_labels", "args": {
            "labels": "hvdlite", "start_time_since_epoch_in_micros": int((time.time() - time.monotonic() + clock()) * 1e6)}}
        ranks = [{"ph": "M", "pid": rank, "name": name, "args": value} for rank in range(size) for name, value in (
            ("process_name", {"name": f"rank {rank}"}), ("process_sort_index", {"sort_index": rank}))]
        self._write([begin, *ranks])

    def add(self, rank: int, events: Sequence[TraceEvent]) -> None:
        """Write what a rank reports."""
        records: list[dict[str, Any]] = []
        for event in events:
            if event.phase == "end":
                self.open_ranks.discard(rank)
                continue
            lane = self._lanes.get((rank, event.lane))
            if lane is None:
                lane = self._lanes[rank, event.lane] = len(self._lanes) + 1
                records.append({"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": event.lane}})
            record: dict[str, Any] = {"ph": event.phase, "pid": rank, "tid": lane, "ts": round(event.when, 3)}
            if event.name:
                record["name"] = event.name
            if event.phase == "i":
                record["s"] = "t"
            if event.detail:
                record["args"] = {"detail": event.detail}
            records.append(record)
        if records:
            self._write(records)

    def close(self) -> None:
        """Close the file; again is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, records: Sequence[dict[str, Any]]) -> None:
        if self._descriptor < 0:
            return
        body = b",\n".join(map(_encode, records))
        content = (b"\n" if self._position == 1 else b",\n") + body
        try:
            self._put(content + _END, self._position)
        except OSError as error:
            _log.error("the timeline %s ends here: %s", self.path, error.strerror)
            self._take_back()
            self.close()
            return
        self._position += len(content)

    def _put(self, content: bytes, position: int) -> None:
        """Write all of it, or raise `OSError`."""
        if os.pwrite(self._descriptor, content, position) < len(content):
            raise OSError(errno.ENOSPC, "no space left on the disk, or under `ulimit -f`")

    def _take_back(self) -> None:
        """End the file after the events that were written in full; these bytes have their place on the disk."""
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, _END, self._position)
            os.ftruncate(self._descriptor, self._position + len(_END))
