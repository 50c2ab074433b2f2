"""What a rank says of itself when others wait for it: where its script is, and what it did last."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

from hvdlite.negotiation.coordinator import Stall
from hvdlite.negotiation.messages import Account

_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(str(Path(_PATHS[name])) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).resolve().parent.parent)


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
