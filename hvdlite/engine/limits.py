"""Times, counts and sizes of the engine that are not knobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

Clock = Callable[[], float]
"""Seconds on a monotonic clock, the same for all ranks of the job."""

FLUSH_SECONDS: Final = 2.0
"""How long the last messages may take when a rank ends."""
LOOK_SECONDS: Final = 0.25
"""How often a rank that waits looks whether it has waited long."""
LISTEN_SECONDS: Final = 0.2
"""How long a rank that never has to wait works on a plan before it looks for messages."""
TRACE_BATCH: Final = 256
"""How many events of a timeline are sent without waiting for another message."""
EAGER_TRAFFIC: Final = 1 << 20
"""Bytes that one eager tensor may bring to rank 0 over all ranks."""
EAGER_WAITED_FOR: Final = 256 << 10
"""Bytes that one eager tensor may bring to rank 0 from other hosts if callers block: a plane needs more messages."""
