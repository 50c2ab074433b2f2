"""Waiting for a library that makes progress only while it is called (MPI)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from hvdlite.control.base import yield_processor

POLL_SECONDS: Final = 200e-6
"""How long an engine is polled before messages are looked for."""


def poll(predicate: Callable[[], bool], poll_interval: float, hurried: Callable[[], object],
         look_out: Callable[[], object]) -> None:
    """Return when the predicate holds; look out for messages meanwhile, which may raise.

    Args:
        poll_interval: seconds to sleep between looks, for the script to have the processor.
        hurried: returns whether the script is blocked in a wait, and so leaves the processor to this thread.
    """
    while not predicate():
        if hurried():
            until = time.perf_counter() + POLL_SECONDS
            while time.perf_counter() < until:
                if predicate():
                    return
                yield_processor()
        else:
            time.sleep(poll_interval)
        look_out()
