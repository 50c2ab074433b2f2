"""Tensors that wait too long: what rank 0 tells about them, and what a rank says of itself when others wait for it."""

from __future__ import annotations

import logging
import math
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from hvdlite.negotiation.coordinator import Coordinator, Stall
from hvdlite.negotiation.messages import Account

_log = logging.getLogger("hvdlite")

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(str(Path(_PATHS[name])) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).resolve().parent.parent)


ACCOUNT_SECONDS: Final = 2.0
"""How long rank 0 waits for missing ranks to say where they are."""
LOOKS: Final = 4
"""How often stalls are looked for during the time after which they are told."""


class StallWatch:
    """Rank 0's lookout: finds stalls, asks the missing ranks, and logs one report.

    Args:
        after: seconds after which a tensor's waiting is told; 0 turns the lookout off.
    """

    def __init__(self, coordinator: Coordinator, after: float) -> None:
        self._coordinator, self._after = coordinator, after
        self._next_look = math.inf  # on the caller's clock; infinite while nothing waits
        self._stalls: list[Stall] = []  # found, and not yet reported
        self._report_due = math.inf

    def look(self, now: float) -> bool:
        """Do what is due at `now`; return whether ranks were asked, so that the coordinator has something to say."""
        asked = False
        if self._after <= 0 or not self._coordinator.anything_waits:
            self._next_look = math.inf
        elif self._next_look == math.inf:
            self._next_look = now + self._after
        elif now >= self._next_look:
            self._next_look = now + self._after / LOOKS
            found = self._coordinator.stalls(now, self._after)
            if found:
                asked = True
                self._stalls += found
                self._report_due = now + ACCOUNT_SECONDS
                self._coordinator.inquire(sorted(self._missing()))
        if self._stalls and (now >= self._report_due or self._coordinator.accounts.keys() >= self._missing()):
            _log.warning("%s", stall_report(self._stalls, self._coordinator.accounts, ACCOUNT_SECONDS))
            self._stalls.clear()
            self._report_due = math.inf
        return asked

    def due(self, now: float) -> float | None:
        """Return the seconds until there is something to do; None while nothing waits."""
        when = min(self._next_look, self._report_due)
        return None if when == math.inf else max(0.0, when - now)

    def _missing(self) -> set[int]:
        return {rank for stall in self._stalls for rank in stall.missing}


def account(thread: int | None, recent: Iterable[str], waiting: Iterable[str]) -> Account:
    """Describe this rank.

    Args:
        thread: identifies the thread that last called a collective; its stack is told.
        recent: the last collectives, oldest first.
        waiting: what it has submitted and not got back.
    """
    frame = None if thread is None else sys._current_frames().get(thread)
    if frame is None:
        return Account("nowhere: the thread that called collectives has ended", "", tuple(recent), tuple(waiting))
    return Account(place_of(frame), "".join(traceback.format_stack(frame)), tuple(recent), tuple(waiting))


def place_of(frame: FrameType) -> str:
    """Return where a stack is in the script: its innermost frame outside of hvdlite and of installed libraries."""
    chosen, current = frame, frame
    while current is not None:
        file = current.f_code.co_filename
        if not file.startswith((*_LIBRARIES, _PACKAGE, "<")):
            chosen = current
            break
        current = current.f_back  # type: ignore[assignment]
    return f"{chosen.f_code.co_name}(), {Path(chosen.f_code.co_filename).name}:{chosen.f_lineno}"


def stall_report(stalls: Sequence[Stall], accounts: dict[int, Account], patience: float) -> str:
    """Return what rank 0 logs about stalls, once the missing ranks have been asked.

    Args:
        accounts: by rank; a rank that did not answer within `patience` seconds is not there.
    """
    lines = [f"stall report: {len(stalls)} tensor{'s' * (len(stalls) > 1)} waiting for some ranks"]
    lines += [f"  {stall}" for stall in stalls]
    for rank in sorted({rank for stall in stalls for rank in stall.missing}):
        names = [stall.name for stall in stalls if rank in stall.missing]
        told = f"'{names[0]}'" + (f" (and {len(names) - 1} more)" if names[1:] else "")
        said = accounts.get(rank)
        if said is None:
            lines.append(f"  rank {rank} never submitted {told} and did not answer within {patience:.0f} s: its process is "
                         "stopped, or something in it holds Python's lock")
            continue
        doing = f"waits for '{said.waiting[0]}'" if said.waiting else "is"
        lines.append(f"  rank {rank} never submitted {told}: it {doing} in {said.place}")
        lines.append(f"    its last collectives: {', '.join(said.recent) or 'none'}")
        lines += [f"    {line}" for line in said.stack.rstrip().splitlines()]
    return "\n".join(lines)
