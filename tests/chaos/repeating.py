"""The same again and again, in the same processes: nothing grows."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

from tests.chaos.programs import repeating
from tests.chaos.rows import Row, Trouble
from tests.worlds import HANGS_SECONDS, over_tcp, processes

GROWTH = 4 << 20
"""Bytes that a process may grow by after a third of the time: arenas of the allocator."""


def again(chance: random.Random, row: Row, program: Callable[..., object], seconds: float,
          environment: dict[str, str] | None = None) -> None:
    """Run two ranks for some seconds, and add what they did."""
    ended = processes(2, program, seconds, timeout=seconds + HANGS_SECONDS, environment=environment)
    for count, memory, descriptors, threads in (rank.result for rank in ended):
        assert memory < GROWTH and descriptors <= 0 and threads <= 0, (count, memory, descriptors, threads)
    row.tried += ended[0].result[0]
    row.survived += ended[0].result[0]
    most = max(rank.result[1] for rank in ended)
    row.remark = f"{most >> 10:,} KiB more at the end than after a third, no descriptors, no threads"


def troubles(seconds: float) -> tuple[Trouble, ...]:
    """Return what is repeated, in rounds of some seconds each."""
    return (
        Trouble("starts of two ranks on one host", lambda chance, row: again(chance, row, repeating.starts, seconds)),
        Trouble("starts of two ranks over TCP",
                lambda chance, row: again(chance, row, repeating.starts, seconds, over_tcp())),
        Trouble("collectives of two ranks", lambda chance, row: again(chance, row, repeating.collectives, seconds)),
        Trouble("collectives of two ranks over TCP and Gloo",
                lambda chance, row: again(chance, row, repeating.collectives, seconds,
                                          {**over_tcp(), "HVDLITE_CPU_OPERATIONS": "gloo"})),
    ) if sys.platform.startswith("linux") else ()
