"""torch's stores as stores in which ranks meet: what differs between those of C++ and those that are written in Python."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
from typing import Any, Final

SHORTEST_SECONDS: Final = 0.01
"""The shortest wait of a store: 0 is for ever."""
POLL_SECONDS: Final = 0.001, 0.5
"""The shortest and the longest pause between two looks into the store."""
POLL_SHARE: Final = 0.1
"""Between them, the pause is this share of the time waited: who waits long looks rarely, and does not load the store."""


class TorchStore:
    """A `hvdlite.bootstrap.store.KeyValues`, made of a store of `torch.distributed`.

    It looks for a key (`check`) again and again: `TCPStore.wait` writes to stderr when it is in vain. One that is written in
    Python may have neither, nor `delete_key`: then `get` cannot look once, and takes as long as the store lets it.
    """

    def __init__(self, store: Any) -> None:
        innermost = self._store = store
        while hasattr(innermost, "underlying_store"):  # a `PrefixStore`
            innermost = innermost.underlying_store
        self.seconds = store.timeout.total_seconds() or math.inf
        self.host: str = getattr(innermost, "host", "")
        self.where = f"{getattr(innermost, 'port', '')} {getattr(innermost, 'path', '')}"
        self._awaited, self._since = "", 0.0  # the last key, and since when: several calls for one are one wait

    def put(self, key: str, value: bytes) -> None:
        """Store bytes under a key."""
        self._store.set(key, value)

    def get(self, key: str, seconds: float) -> bytes | None:
        """Return them; None if they are not there after so many seconds. 0 looks once.

        Raises:
            RuntimeError: torch's, when the store fails, or cannot look once.
        """
        start = time.monotonic()
        if seconds and key != self._awaited:
            self._awaited, self._since = key, start
        until, (shortest, longest) = start + seconds, POLL_SECONDS
        try:
            while not self._store.check([key]):
                now = time.monotonic()
                if now >= until:
                    return None
                time.sleep(min(max(shortest, POLL_SHARE * (now - self._since)), longest, until - now))
        except RuntimeError:  # it cannot look
            if not seconds:
                raise
            if self._is_in_vain(key, until):
                return None
        value: bytes = self._store.get(key)
        return value

    def forget(self, key: str) -> None:
        """Remove a key, if the store can."""
        with contextlib.suppress(Exception):
            self._store.delete_key(key)

    def _is_in_vain(self, key: str, until: float) -> bool:
        """Wait for a key, if the store can; return whether the time is over without it."""
        try:
            self._store.wait([key], datetime.timedelta(seconds=max(SHORTEST_SECONDS, until - time.monotonic())))
        except RuntimeError:  # else it cannot wait, either
            return time.monotonic() > until - SHORTEST_SECONDS
        return False
