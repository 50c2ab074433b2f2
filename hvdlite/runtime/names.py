"""Names for calls without one, and labels for gradient sets."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator

from hvdlite.core.process_set import GLOBAL_PROCESS_SET_ID
from hvdlite.handoff.job_state import JobState


class Names:
    """Numbers calls and optimizers: ranks that make the same ones in the same order get the same names. Thread-safe."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self._lock = threading.Lock()  # guards the rest
        self._counters: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._labels: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._joins = 0  # how often all ranks had joined when the counters were last used

    def unnamed(self, adapter: str, kind: str, process_set: int = GLOBAL_PROCESS_SET_ID) -> str:
        """Return the next name for a call without one; equal on all ranks of a set that make the same calls in order."""
        with self._lock:
            if self._joins != self._state.joins:  # ranks may have made different numbers of calls before
                self._joins = self._state.joins
                self._counters.clear()
            return _numbered(self._counters, f"{adapter}.{kind}.noname", process_set)

    def of_call(self, adapter: str, kind: str, name: str | None, process_set: int) -> str:
        """Return the name under which a collective is negotiated: Horovod's, or by the order of calls without one."""
        return self.unnamed(adapter, kind, process_set) if name is None else f"{kind}.{name}"

    def of_transfer(self, adapter: str, name: str | None, sender: int, receiver: int) -> str:
        """Return the name under which a tensor from one rank to another is negotiated."""
        way = f"{sender}to{receiver}"
        return self.unnamed(adapter, f"send.{way}") if name is None else f"send.{way}.{name}"

    def label(self, adapter: str, process_set: int = GLOBAL_PROCESS_SET_ID) -> str:
        """Return the next label for a gradient set; equal on all ranks of a set that make their optimizers in order."""
        with self._lock:
            return _numbered(self._labels, f"{adapter}.optimizer", process_set)


def member_names(base: str, count: int) -> list[str]:
    """Return Horovod's names for the members of a group."""
    return [f"{base}_{index}of{count}" for index in range(1, count + 1)]


def _numbered(counters: defaultdict[str, Iterator[int]], where: str, process_set: int) -> str:
    if process_set != GLOBAL_PROCESS_SET_ID:
        where += f".set{process_set}"
    return f"{where}.{next(counters[where])}"
