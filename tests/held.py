"""What a process holds: for programs of ranks that compare two moments of the same state.

A rank that has left the job closes its connections to those that have not: they look before a barrier, and leave after it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import Counter

ENDS_SECONDS = 30.0
"""How long a thread may take to its end."""


def open_files() -> dict[str, int]:
    """Return how many descriptors this process has of each kind, such as a path, "socket" or "anon_inode:[eventfd]"."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[re.sub(r":\[\d+\]", "", os.readlink(f"/proc/self/fd/{number}"))] += 1
    return dict(found)


def join_threads() -> None:
    """Wait for all other threads: after a job, that which serves reports ends by itself."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(ENDS_SECONDS)
