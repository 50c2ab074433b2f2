"""When the next checkpoint is due: after some time, at the same step on all ranks (docs/protocol.md#agreed-calls)."""

from __future__ import annotations

import re
import time
from typing import Final

from hvdlite import api
from hvdlite.runtime.agreed_call import AgreedCall
from hvdlite.runtime.runtime import Runtime

_UNITS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Every:
    """Says at which step the next checkpoint is due; rank 0's clock counts.

    Args:
        interval: such as "90 s", "10 min" or "2 h"; or a number of seconds.

    Raises:
        ValueError: for anything else.
    """

    def __init__(self, interval: str | float) -> None:
        self.seconds = _seconds(interval)
        self._last = time.monotonic()
        self._world: Runtime | None = None
        self._call: AgreedCall | None = None  # of this world

    def is_due(self, is_wanted: bool = False) -> bool:
        """Return whether to save now: the same on all ranks, which call this once a step.

        Args:
            is_wanted: whether this rank wants it soon, whatever the time.
        """
        runtime = api.runtime()
        if self._call is None or self._world is not runtime:
            self._world, self._call = runtime, runtime.agreed_call(runtime.names.unnamed("checkpoint", "every"))
        is_late = runtime.world.rank == 0 and time.monotonic() - self._last >= self.seconds
        is_due = self._call.is_due(is_late or is_wanted, runtime.joins)
        if is_due:
            self._last = time.monotonic()
        return is_due


def _seconds(interval: str | float) -> float:
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(interval))
    try:
        assert match is not None
        seconds = float(match[1]) * _UNITS[match[2] or "s"]
    except (AssertionError, KeyError, ValueError):
        raise ValueError(f"every={interval!r} is no interval; use seconds, or such as '90 s', '10 min', '2 h'") from None
    return seconds
