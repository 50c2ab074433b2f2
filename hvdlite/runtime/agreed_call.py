"""All ranks agree on one of the calls that each of them makes once a step: to stop, or to save, after the same step.

Before somebody wants that, ranks only tell rank 0 when they leave the job. Then, over rank 0
(docs/protocol.md#agreed-calls):

    a rank that wants it         ->  rank 0      WANTED
    rank 0                       ->  all         ASK
    each rank                    ->  rank 0      CALLS, with the number of its calls so far; it waits in the next one
    rank 0                       ->  all         NAMED, with one more than the greatest of these

No rank has come to that call, so it is the one on all. A rank that has left the job counts no more. Agreements are numbered:
what a rank wants in one that has been named already is not wanted again.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import deque
from typing import Final

from hvdlite.engine.oob import OobChannel
from hvdlite.membership.messages import JOIN

_MESSAGE: Final = struct.Struct("<BIq")
_WANTED, _ASK, _CALLS, _NAMED = range(4)
_LEFT: Final = -1


class AgreedCall:
    """One rank's side. `is_due` is for one thread of the script's.

    Args:
        label: of the agreements of this kind.
        channel: to the other ranks.

    Attributes:
        count: how many calls were the agreed one.
    """

    def __init__(self, label: str, rank: int, size: int, channel: OobChannel) -> None:
        self._label, self._rank, self._size, self._channel = label, rank, size, channel
        self.count = 0
        self._lock = threading.Lock()  # guards the next four
        self._calls = 0  # and `JOIN` for each `join()` of all, before which numbers of calls may differ
        self._asked = 0  # agreements of which rank 0 has asked,
        self._answered = 0  # and those for which it has named a call
        self._named: deque[int] = deque()  # calls that are to come
        self._wanted = 0  # the last agreement that this rank has wanted
        self._answers: dict[int, int] = {}  # on rank 0: in the present agreement
        self._left: set[int] = set()  # there: ranks
        channel.subscribe(label, self._receive)

    def is_due(self, is_wanted: bool, joins: int) -> bool:
        """Return whether this call is the one on which all ranks have agreed.

        Args:
            is_wanted: whether this rank wants one soon.
            joins: how often all ranks have joined.

        Raises:
            HorovodInternalError: when the job ends meanwhile.
        """
        with self._lock:
            self._calls = max(self._calls, joins * JOIN) + 1
            asked, answered = self._asked, self._answered
        if is_wanted and self._wanted <= self.count and asked <= self.count:
            self._wanted = self.count + 1
            self._send(0, _WANTED, self._wanted)
        if answered < asked:
            self._channel.wait(lambda: self._answered >= asked, math.inf)
        if not self._named or self._calls < self._named[0]:
            return False
        with self._lock:
            self._named.popleft()
        self.count += 1
        return True

    def leave(self) -> None:
        """This rank leaves the job."""
        self._send(0, _CALLS, 0, _LEFT)

    def _send(self, to: int | None, kind: int, agreement: int, number: int = 0) -> None:
        receivers = range(self._size) if to is None else [to]
        self._channel.announce(self._label, receivers, _MESSAGE.pack(kind, agreement, number))

    def _receive(self, sender: int, text: bytes) -> None:
        """Take in a message; called by the background thread."""
        kind, agreement, number = _MESSAGE.unpack(text)
        if kind == _WANTED and agreement > self._asked:
            self._answers.clear()
            self._asked = agreement  # rank 0 gets its own question later
            self._send(None, _ASK, agreement)
        elif kind == _ASK:
            with self._lock:
                self._asked, calls = agreement, max(self._calls, *self._named, 0)
            self._send(0, _CALLS, agreement, calls)
        elif kind == _CALLS:
            if number == _LEFT:
                self._left.add(sender)
            else:
                self._answers[sender] = number
            self._name_call()
        elif kind == _NAMED:
            with self._lock:
                self._named.append(number)
                self._answered = agreement

    def _name_call(self) -> None:
        """On rank 0: name the call, when all ranks have told theirs."""
        if self._answers and len(self._left.union(self._answers)) == self._size:
            named = max(self._answers.values()) + 1
            self._answers.clear()
            self._send(None, _NAMED, self._asked, named)
