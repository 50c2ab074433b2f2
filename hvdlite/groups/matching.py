"""Matching of messages: which receive gets which message, as MPI and c10d define it.

A receive names a tag, and a source or any source. It gets the first message that fits and that no other receive has got. Of
two receives that a message fits, the one that was called first gets it. Messages of one source arrive in the order in which
they were sent.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, TypeVar

from hvdlite.core.array import Array

if TYPE_CHECKING:
    from hvdlite.groups.transfer import Transfer

ANY: Final = -1
"""Any source."""


class P2PMessage:
    """A message from the rank `source`.

    Attributes:
        number: counts what the source sends to this rank, if its carrier counts.
        is_kept: whether it was kept, because no receive wanted it when it came.
        filled: how many of its `total` bytes have come, if they come in pieces.
        has_come: whether all of them have.
        target: where its bytes are put; None if there is no place for them yet, or if nobody wants them any more.
        receive: the call that gets it; None before there is one, and if that has failed.
    """

    def __init__(self, source: int, tag: int, total: int, number: int = 0) -> None:
        self.source = source
        self.tag = tag
        self.total = total
        self.number = number
        self.filled = 0
        self.is_kept = self.has_come = False
        self.target: Array | None = None
        self.receive: Transfer | None = None


class Matching:
    """Receives without a message, and messages without a receive; of each source and tag only one of the two."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._receives: dict[tuple[int, int], deque[tuple[int, Transfer]]] = {}
        self._messages: dict[tuple[int, int], deque[tuple[int, P2PMessage]]] = {}

    def receive(self, receive: Transfer) -> P2PMessage | None:
        """Return the message that a new receive gets; None if it has to wait for one."""
        if receive.peer == ANY:
            fitting = [(queue[0][0], key) for key, queue in self._messages.items() if key[1] == receive.tag]
        else:
            key = (receive.peer, receive.tag)
            fitting = [(0, key)] if key in self._messages else []
        if fitting:
            return _first(self._messages, min(fitting)[1])
        self._receives.setdefault((receive.peer, receive.tag), deque()).append((next(self._numbers), receive))
        return None

    def arrive(self, source: int, tag: int) -> Transfer | None:
        """Return the receive that gets the message that has just arrived; None if there is none yet: see `keep`."""
        keys = [key for key in ((source, tag), (ANY, tag)) if key in self._receives]
        if not keys:
            return None
        return _first(self._receives, min(keys, key=lambda key: self._receives[key][0][0]))

    def keep(self, message: P2PMessage) -> None:
        """Keep a message that no receive fits."""
        self._messages.setdefault((message.source, message.tag), deque()).append((next(self._numbers), message))

    def withdraw(self, receive: Transfer) -> None:
        """Forget a receive, if it is still without a message."""
        key = (receive.peer, receive.tag)
        kept = deque(pair for pair in self._receives.pop(key, ()) if pair[1] is not receive)
        if kept:
            self._receives[key] = kept

    def wants(self, source: int) -> bool:
        """Return whether a receive waits for a message of a source, whatever its tag."""
        return any(wanted in (source, ANY) for wanted, _ in self._receives)

    def messages(self) -> Iterator[P2PMessage]:
        """Iterate over the messages without a receive."""
        return (message for queue in self._messages.values() for _, message in queue)


T = TypeVar("T")


def _first(queues: dict[tuple[int, int], deque[tuple[int, T]]], key: tuple[int, int]) -> T:
    queue = queues[key]
    _, first = queue.popleft()
    if not queue:
        del queues[key]
    return first
