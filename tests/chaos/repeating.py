"""The same again and again, in the same processes: nothing grows."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tests.chaos.programs import launching, repeating
from tests.chaos.rows import Row, Trouble
from tests.worlds import HANGS_SECONDS, over_tcp, processes

GROWTH = 4 << 20
"""Bytes that a process may grow by after a third of the time: arenas of the allocator."""


def again(row: Row, program: Callable[..., object], seconds: float, size: int, environment: dict[str, str] | None) -> None:
    """Run a program's processes for some seconds, and add what they did."""
    ended = processes(size, program, seconds, timeout=seconds + HANGS_SECONDS, environment=environment)
    for count, memory, descriptors, threads in (rank.result for rank in ended):
        assert memory < GROWTH and descriptors <= 0 and threads <= 0, (count, memory, descriptors, threads)
    row.tried += ended[0].result[0]
    row.survived += ended[0].result[0]
    most = max(rank.result[1] for rank in ended)
    row.remark = f"{most >> 10:,} KiB more at the end than after a third, no descriptors, no threads"


def troubles(seconds: float) -> tuple[Trouble, ...]:
    """Return what is repeated, in rounds of some seconds each."""
    def repeated(what: str, program: Callable[..., object], share: float, goal: int, size: int = 2,
                 environment: dict[str, str] | None = None) -> Trouble:
        return Trouble(what, lambda chance, row: again(row, program, seconds, size, environment), share, goal=goal)

    over_gloo = {**over_tcp(), "HVDLITE_CPU_OPERATIONS": "gloo"}
    return (
        repeated("jobs of one hvdrun process, whose ranks only end", launching.jobs, 2, 10_000, size=1),
        repeated("starts of two ranks on one host", repeating.starts, 2, 10_000),
        repeated("starts of two ranks over TCP", repeating.starts, 2, 10_000, environment=over_tcp()),
        repeated("collectives of two ranks", repeating.collectives, 3, 1_000_000),
        repeated("collectives of two ranks over TCP and Gloo", repeating.collectives, 3, 1_000_000, environment=over_gloo),
    ) if sys.platform.startswith("linux") else ()
