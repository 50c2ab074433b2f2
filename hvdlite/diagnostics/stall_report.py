"""The stall report: which tensors wait for which ranks, and the status of those ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import re
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.slowness import Slowness, diagnose
from hvdlite.negotiation.agreement import named_ranks
from hvdlite.negotiation.messages import GpuProgress, RankStatus
from hvdlite.negotiation.stalls import NO_STALL, Stall

_log = logging.getLogger("hvdlite")

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(str(Path(_PATHS[name])) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).resolve().parent.parent)

SHOWN: Final = 10
"""Number of a rank's last collectives in a report."""
RECENT: Final = 200
"""How many collectives a rank remembers."""
_C_LEVEL_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


class CallHistory:
    """The names of the collectives that this rank has called last. Any thread may add to it."""

    def __init__(self) -> None:
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._numbers = itertools.count(1)  # of all collectives, since the beginning
        self._count = 0

    def add(self, name: str) -> None:
        """This rank has called a collective; those that a rank may leave out are not recorded."""
        if name.endswith(NO_STALL):
            return
        self._recent.append(name)
        self._count = next(self._numbers)

    def status(self, thread: int, waiting: Iterable[str], gpu: tuple[GpuProgress, ...], ledger: Ledger) -> RankStatus:
        """Describe this rank.

        Args:
            thread: identifies the thread that last called a collective; its stack is reported, or the main thread's if it
                has ended.
            waiting: what it has enqueued and not got back.
        """
        recent = tuple(self._recent)
        first_number = self._count - len(self._recent) + 1
        frames = sys._current_frames()
        frame = frames.get(thread) or frames.get(threading.main_thread().ident or 0)
        location = location_of(frame) if frame else "nowhere: the thread that called collectives has ended"
        return RankStatus(location=location, stack="".join(traceback.format_stack(frame)) if frame else "", recent=recent,
                          first_number=first_number, waiting=tuple(waiting), gpu=gpu, ledger=ledger)


def location_of(frame: FrameType) -> str:
    """Return where a stack is in the script: its innermost frame outside of hvdlite and of installed libraries."""
    chosen = script_frame(frame) or frame
    return _location(chosen.f_code.co_name, chosen.f_code.co_filename, chosen.f_lineno)


def script_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a stack that is the script's, or None."""
    while frame is not None and not is_script(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def location_in_dump(stacks: str) -> str:
    """Like `location_of`, of what `faulthandler` wrote of a process; "" when there is nothing to be seen."""
    current = stacks.partition("Current thread")[2] or stacks
    frames = [(match["function"], match["file"], int(match["line"])) for match in _C_LEVEL_FRAME.finditer(current)]
    return next((_location(*frame) for frame in frames if is_script(frame[1])), _location(*frames[0]) if frames else "")


def is_script(file: str) -> bool:
    """Return whether a file is neither an installed package's nor the standard library's."""
    return not file.startswith((*_LIBRARIES, _PACKAGE, "<"))


def _location(function: str, file: str, line: int) -> str:
    return f"{function}(), {Path(file).name}:{line}"


@dataclasses.dataclass(frozen=True)
class RankState:
    """The state of one rank when a report is made."""

    rank: int
    state: str  # "alive", "joined", "left", or why it does not answer
    status: RankStatus | None  # None: it did not answer
    stacks: str = ""  # of a rank that did not answer, as far as the C level could see


@dataclasses.dataclass(frozen=True)
class StallReport:
    """The tensors that wait, the ranks for which they wait, and the state of those ranks."""

    stalls: Sequence[Stall]
    rank_states: Mapping[int, RankState]  # of every rank that is missing somewhere, and of some that are not
    stories: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by tensor
    circle: Collection[int] = ()  # ranks that wait for each other in sends and receives

    @property
    def slowness(self) -> Slowness | None:
        """Why the job is slow, if it is and all ranks have been asked; ranks that wait are not compared."""
        if self.stalls:
            return None
        return diagnose({rank: each.status.ledger for rank, each in self.rank_states.items() if each.status is not None})

    @property
    def missing(self) -> list[int]:
        """The ranks for which something waits, ascending."""
        return sorted({rank for stall in self.stalls for rank in stall.missing})

    def diagnosis(self, rank: int) -> str:
        """Say in one line what others wait for from a missing rank, and what it is doing instead."""
        stalls = [stall for stall in self.stalls if rank in stall.missing]
        told = f"{stalls[0].fault(rank)} '{stalls[0].name}'" + (f" (and {len(stalls) - 1} more)" if stalls[1:] else "")
        rank_state = self.rank_states.get(rank, RankState(rank, "unknown", None))
        status = rank_state.status
        if status is None:
            where = location_in_dump(rank_state.stacks)
            return (f"rank {rank} {told} and does not answer: {rank_state.state}"
                    f"{f'; it is in {where}' if where else ''}")
        doing = f"waits for '{status.waiting[0]}'" if status.waiting else "is"
        return f"rank {rank} {told}: it {doing} in {status.location}"

    def difference(self, rank: int) -> str:
        """Say where a rank's collectives first differ from those of one that is not missing; "" when that is not known."""
        status = self.rank_states[rank].status if rank in self.rank_states else None
        others = [other for other in self.rank_states.values() if other.status and other.rank not in self.missing]
        if status is None or not others:
            return ""
        found = first_difference(status, others[0].status)  # type: ignore[arg-type]
        if found is None:
            return ""
        number, own, other = found
        return (f"its collectives differ from rank {others[0].rank}'s since number {number}: it "
                f"{f'called {own!r}' if own else 'called no more'}, rank {others[0].rank} "
                f"{f'called {other!r}' if other else 'called no more'}")

    def text(self) -> str:
        """Return the report for people."""
        if not self.stalls:
            lines = ["report: no tensor waits for a rank"]
        else:
            lines = [f"stall report: {len(self.stalls)} tensor{'s' * (len(self.stalls) > 1)} waiting for some ranks"]
        lines += [f"  {stall}" for stall in self.stalls]
        if self.circle:
            lines.append(f"  {named_ranks(sorted(self.circle))} wait for each other in sends and receives")
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank in sorted({*self.missing, *self.rank_states}):
            alike.setdefault(self._rank_lines(rank), []).append(rank)
        for (first, *more), ranks in alike.items():
            others = f"; alike: {named_ranks(ranks[1:])}" if ranks[1:] else ""
            lines += [f"  rank {ranks[0]} {first}{others}", *more] if first else []
        if self.slowness is not None:
            lines.append(f"  {self.slowness}")
        for name, story in self.stories.items():
            lines += [f"  what happened to '{name}' on rank 0:", *(f"    {line}" for line in story.splitlines())]
        return "\n".join(lines)

    def _rank_lines(self, rank: int) -> tuple[str, ...]:
        """Return the lines about a rank, the first one without its name; ("",) if it was asked only for comparison."""
        rank_state = self.rank_states.get(rank, RankState(rank, "unknown", None))
        status = rank_state.status
        if rank in self.missing:
            lines = [self.diagnosis(rank).removeprefix(f"rank {rank} ")]
        elif self.stalls and len(self.rank_states) < 2 * len(self.missing) + 2:
            return ("",)
        else:
            location = status.location if status else location_in_dump(rank_state.stacks)
            lines = [f"({rank_state.state}) is in {location}"]
        if difference := self.difference(rank) if rank in self.missing else "":
            lines.append(f"    {difference}")
        if status is not None:
            lines.append(f"    its last collectives: {', '.join(status.recent[-SHOWN:]) or 'none'}")
        stack = status.stack if status is not None else rank_state.stacks
        return (*lines, *(f"    {line}" for line in stack.rstrip().splitlines()))

    def deliver(self, path: str) -> None:
        """Write the report to standard error, and write it to `path` unless that is ""."""
        _log.warning("%s", self.text())
        if path:
            self.write(path)

    def write(self, path: str) -> None:
        """Write `as_dict` to a JSON file, which is complete at any time; a failure is logged."""
        try:
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=Path(path).absolute().parent, delete=False) as file:
                json.dump(self.as_dict(), file, indent=1)
            os.replace(file.name, path)
        except OSError as error:
            _log.error("the stall report cannot be written to %s: %s", path, error.strerror)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for programs; only strings, numbers, lists and dictionaries."""
        def of(rank: int, rank_state: RankState) -> dict[str, Any]:
            status = rank_state.status
            return {"state": rank_state.state, "answered": status is not None,
                    "place": status.location if status else location_in_dump(rank_state.stacks),
                    "stack": status.stack if status else rank_state.stacks,
                    "last_collectives": list(status.recent[-SHOWN:]) if status else [],
                    "waiting_for": list(status.waiting) if status else [],
                    "first_difference": self.difference(rank) if rank in self.missing else ""}
        return {"stalls": [{"name": stall.name, "waited_seconds": round(stall.waited, 3), "submitted": list(stall.enqueued),
                            "missing": list(stall.missing)} for stall in self.stalls],
                "diagnosis": [self.diagnosis(rank) for rank in self.missing],
                "circle": sorted(self.circle),
                "ranks": {str(rank): of(rank, rank_state) for rank, rank_state in sorted(self.rank_states.items())},
                "stories": dict(self.stories),
                "slowness": None if self.slowness is None else self.slowness.as_dict()}


def first_difference(one: RankStatus, other: RankStatus) -> tuple[int, str, str] | None:
    """Return the first collective that only one of two ranks has called, as (number from 1, the one's name, the other's).

    A name is "" where a rank has called nothing yet. Collectives that both called, in another order, are no difference: an
    optimizer's hooks run in any order.
    """
    start = max(one.first_number, other.first_number)
    mine, theirs = (list(each.recent[start - each.first_number:]) for each in (one, other))
    common = Counter(mine) & Counter(theirs)
    only_mine, only_theirs = (_beyond(names, common.copy()) for names in (mine, theirs))
    if not only_mine and not only_theirs:
        return None
    place = min(only[0][0] for only in (only_mine, only_theirs) if only)
    return (start + place, only_mine[0][1] if only_mine else "", only_theirs[0][1] if only_theirs else "")


def _beyond(names: Sequence[str], common: Counter[str]) -> list[tuple[int, str]]:
    """Return those of `names`, with their places, that are left when those of `common` are taken away, first ones first."""
    left = []
    for place, name in enumerate(names):
        if common[name] > 0:
            common[name] -= 1
        else:
            left.append((place, name))
    return left
