"""What rank 0 tells about tensors that wait too long, and what a rank says of itself when others wait for it."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from hvdlite.negotiation.coordinator import Stall
from hvdlite.negotiation.messages import Account

_log = logging.getLogger("hvdlite")

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(str(Path(_PATHS[name])) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).resolve().parent.parent)

SHOWN: Final = 10
"""How many of a rank's last collectives a report shows."""
_C_LEVEL_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


def account(thread: int, recent: Sequence[str], begun: int, waiting: Iterable[str]) -> Account:
    """Describe this rank.

    Args:
        thread: identifies the thread that last called a collective; its stack is told, or the main thread's if it has ended.
        recent: the last collectives, oldest first; the first of them was this rank's collective number `begun`.
        waiting: what it has submitted and not got back.
    """
    frames = sys._current_frames()
    frame = frames.get(thread) or frames.get(threading.main_thread().ident or 0)
    if frame is None:
        return Account("nowhere: the thread that called collectives has ended", "", tuple(recent), begun, tuple(waiting))
    return Account(place_of(frame), "".join(traceback.format_stack(frame)), tuple(recent), begun, tuple(waiting))


def place_of(frame: FrameType) -> str:
    """Return where a stack is in the script: its innermost frame outside of hvdlite and of installed libraries."""
    chosen, current = frame, frame
    while current is not None:
        if _is_script(current.f_code.co_filename):
            chosen = current
            break
        current = current.f_back  # type: ignore[assignment]
    return _place(chosen.f_code.co_name, chosen.f_code.co_filename, chosen.f_lineno)


def place_in(stacks: str) -> str:
    """Like `place_of`, of what `faulthandler` wrote of a process; "" when there is nothing to be seen."""
    current = stacks.partition("Current thread")[2] or stacks
    frames = [(match["function"], match["file"], int(match["line"])) for match in _C_LEVEL_FRAME.finditer(current)]
    return next((_place(*frame) for frame in frames if _is_script(frame[1])), _place(*frames[0]) if frames else "")


def _is_script(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, _PACKAGE, "<"))


def _place(function: str, file: str, line: int) -> str:
    return f"{function}(), {Path(file).name}:{line}"


@dataclasses.dataclass(frozen=True)
class Standing:
    """What is known of one rank when a report is made."""

    rank: int
    state: str  # "alive", "joined", "left", or why it does not answer
    account: Account | None  # None: it did not answer
    stacks: str = ""  # of a rank that did not answer, as far as the C level could tell


@dataclasses.dataclass(frozen=True)
class StallReport:
    """Which tensors wait, for whom, and what those ranks are doing."""

    stalls: Sequence[Stall]
    standings: Mapping[int, Standing]  # of every rank that is missing somewhere, and of some that are not
    stories: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by tensor

    @property
    def missing(self) -> list[int]:
        """The ranks for which something waits, ascending."""
        return sorted({rank for stall in self.stalls for rank in stall.missing})

    def diagnosis(self, rank: int) -> str:
        """Say in one line what others wait for from a missing rank, and what it is doing instead."""
        names = [stall.name for stall in self.stalls if rank in stall.missing]
        told = f"'{names[0]}'" + (f" (and {len(names) - 1} more)" if names[1:] else "")
        standing = self.standings.get(rank, Standing(rank, "unknown", None))
        said = standing.account
        if said is None:
            where = place_in(standing.stacks)
            return (f"rank {rank} never submitted {told} and does not answer: {standing.state}"
                    f"{f'; it is in {where}' if where else ''}")
        doing = f"waits for '{said.waiting[0]}'" if said.waiting else "is"
        return f"rank {rank} never submitted {told}: it {doing} in {said.place}"

    def difference(self, rank: int) -> str:
        """Say where a rank's collectives first differ from those of one that is not missing; "" when that is not known."""
        said = self.standings[rank].account if rank in self.standings else None
        others = [standing for standing in self.standings.values() if standing.account and standing.rank not in self.missing]
        if said is None or not others:
            return ""
        found = first_difference(said, others[0].account)  # type: ignore[arg-type]
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
        for rank in sorted({*self.missing, *self.standings}):
            lines += self._rank_lines(rank)
        for name, story in self.stories.items():
            lines += [f"  what happened to '{name}' on rank 0:", *(f"    {line}" for line in story.splitlines())]
        return "\n".join(lines)

    def _rank_lines(self, rank: int) -> list[str]:
        standing = self.standings.get(rank)
        said = None if standing is None else standing.account
        if rank in self.missing:
            lines = [f"  {self.diagnosis(rank)}"]
        elif self.stalls and len(self.standings) < 2 * len(self.missing) + 2:
            return []  # asked only for comparison
        else:
            lines = [f"  rank {rank} ({'unknown' if standing is None else standing.state}) is in "
                     f"{place_in(standing.stacks) if standing and not said else said.place if said else '?'}"]
        if difference := self.difference(rank) if rank in self.missing else "":
            lines.append(f"    {difference}")
        if said is not None:
            lines.append(f"    its last collectives: {', '.join(said.recent[-SHOWN:]) or 'none'}")
        stack = said.stack if said is not None else standing.stacks if standing is not None else ""
        return lines + [f"    {line}" for line in stack.rstrip().splitlines()]

    def deliver(self, path: str) -> None:
        """Tell the report on standard error, and write it to `path` unless that is ""."""
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
        def of(rank: int, standing: Standing) -> dict[str, Any]:
            said = standing.account
            return {"state": standing.state, "answered": said is not None,
                    "place": said.place if said else place_in(standing.stacks),
                    "stack": said.stack if said else standing.stacks,
                    "last_collectives": list(said.recent[-SHOWN:]) if said else [],
                    "waiting_for": list(said.waiting) if said else [],
                    "first_difference": self.difference(rank) if rank in self.missing else ""}
        return {"stalls": [{"name": stall.name, "waited_seconds": round(stall.waited, 3), "submitted": list(stall.submitted),
                            "missing": list(stall.missing)} for stall in self.stalls],
                "diagnosis": [self.diagnosis(rank) for rank in self.missing],
                "ranks": {str(rank): of(rank, standing) for rank, standing in sorted(self.standings.items())},
                "stories": dict(self.stories)}


def first_difference(one: Account, other: Account) -> tuple[int, str, str] | None:
    """Return the first collective that only one of two ranks has called, as (number from 1, the one's name, the other's).

    A name is "" where a rank has called nothing yet. Collectives that both called, in another order, are no difference: an
    optimizer's hooks run in any order.
    """
    start = max(one.begun, other.begun)
    mine, theirs = (list(each.recent[start - each.begun:]) for each in (one, other))
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
