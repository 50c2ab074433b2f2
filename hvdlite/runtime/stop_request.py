"""`stop_requested()`: all ranks agree on the step after which they stop (docs/protocol.md#stopping-together).

Before somebody is asked, ranks only tell rank 0 when they leave the job. Then, over rank 0:

    a rank that was asked        ->  rank 0      NOTICED
    rank 0                       ->  all         ASK
    each rank                    ->  rank 0      CALLS, with the number of its calls so far; it waits in the next one
    rank 0                       ->  all         STOP_AT, with one more than the greatest of these

No rank has come to that call, so all return True in it. A rank that has left the job counts no more.
"""

from __future__ import annotations

import math
import struct
import threading
from typing import Final

from hvdlite.engine.oob import OobChannel
from hvdlite.membership.messages import JOIN

_LABEL: Final = "stop_request"
_MESSAGE: Final = struct.Struct("<Bq")
_NOTICED, _ASK, _CALLS, _STOP_AT = range(4)
_LEFT: Final = -1


class StopRequest:
    """One rank's side. `is_due` is for one thread of the script's.

    Args:
        channel: to the other ranks.
    """

    def __init__(self, rank: int, size: int, channel: OobChannel) -> None:
        self._rank, self._size, self._channel = rank, size, channel
        self._lock = threading.Lock()  # guards the next two
        self._calls = 0  # and `JOIN` for each `join()` of all, before which numbers of calls may differ
        self._is_asked = False
        self._has_told = False
        self._stop_at: int | None = None
        self._asks = self._has_named = False  # on rank 0: whether it has asked all, and told them the call
        self._answers: dict[int, int] = {}  # there
        channel.subscribe(_LABEL, self._receive)

    def is_due(self, is_noticed: bool, joins: int) -> bool:
        """Return whether all ranks stop now.

        Args:
            is_noticed: whether this process has been asked to.
            joins: how often all ranks have joined.

        Raises:
            HorovodInternalError: when the job ends meanwhile.
        """
        with self._lock:
            self._calls = max(self._calls, joins * JOIN) + 1
            is_asked = self._is_asked
        if is_noticed and not self._has_told:
            self._has_told = True
            self._send(0, _NOTICED)
        if is_asked and self._stop_at is None:
            self._channel.wait(lambda: self._stop_at is not None, math.inf)
        return self._stop_at is not None and self._calls >= self._stop_at

    def leave(self) -> None:
        """This rank leaves the job."""
        self._send(0, _CALLS, _LEFT)

    def _send(self, to: int | None, kind: int, number: int = 0) -> None:
        receivers = range(self._size) if to is None else [to]
        self._channel.announce(_LABEL, receivers, _MESSAGE.pack(kind, number))

    def _receive(self, sender: int, text: bytes) -> None:
        """Take in a message; called by the background thread."""
        kind, number = _MESSAGE.unpack(text)
        if kind == _NOTICED and not self._asks:
            self._asks = True
            self._send(None, _ASK)
        elif kind == _ASK:
            with self._lock:
                self._is_asked, calls = True, self._calls
            self._send(0, _CALLS, calls)
        elif kind == _CALLS:
            self._answers[sender] = _LEFT if self._answers.get(sender) == _LEFT else number
            if self._asks and not self._has_named and len(self._answers) == self._size:
                self._has_named = True
                self._send(None, _STOP_AT, max(self._answers.values()) + 1)
        elif kind == _STOP_AT and self._stop_at is None:
            self._stop_at = number
