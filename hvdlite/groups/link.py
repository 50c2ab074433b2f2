"""The way of a group's ranks to each other through the runtime on which the group lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.core.array import Array
from hvdlite.engine.oob import OobChannel
from hvdlite.planes.base import WaitUntil
from hvdlite.runtime.runtime import Runtime

Done = Callable[[Exception | None], None]
"""Called by the background thread when a transfer is over, with its error."""


class GroupLink:
    """Texts between the ranks of a group, and negotiated transfers; ranks are indices in the group.

    Implements `planes.base.OobTexts` for the group's planes. Callable from any thread but the background thread.

    Args:
        prefix: of the group's labels, and of other names in the job that are its own.
        ranks: of the runtime: those of the group.
    """

    def __init__(self, runtime: Runtime, prefix: str, ranks: tuple[int, ...]) -> None:
        channel = runtime.connections.oob
        assert isinstance(channel, OobChannel)
        self._runtime, self._channel, self._prefix, self._ranks = runtime, channel, prefix, ranks
        self._index = {rank: index for index, rank in enumerate(ranks)}

    def part(self, name: str) -> GroupLink:
        """Return the link of a part of the group's code, whose announcements only that part receives."""
        return GroupLink(self._runtime, f"{self._prefix}{name}.", self._ranks)

    # --- what one rank publishes and another one fetches ----------------------------------------------------------------

    def publish(self, label: str, text: bytes) -> None:
        self._channel.publish_from(self._prefix + label, text)

    def withdraw(self, label: str) -> None:
        self._channel.withdraw_from(self._prefix + label)

    def fetch(self, label: str, sender: int, wait_until: WaitUntil,
              is_cancelled: Callable[[], bool] = lambda: False) -> bytes:
        return self._channel.fetch(self._prefix + label, self._ranks[sender], wait_until, is_cancelled)

    def look(self) -> None:
        self._channel.look()

    # --- announcements --------------------------------------------------------------------------------------------------

    def announce(self, to: Sequence[int], text: bytes) -> None:
        """Send a few bytes to other ranks; those of one rank arrive in order."""
        self._channel.announce(self._prefix, [self._ranks[rank] for rank in to], text)

    def listen(self, listener: Callable[[int, bytes], None]) -> None:
        """Let a function be called with the sender and text of each announcement, those included that have come before.

        The background thread calls it, or this one; it returns at once.
        """
        self._channel.subscribe(self._prefix, lambda rank, text: listener(self._index[rank], text))

    def close(self) -> None:
        """Stop listening."""
        self._channel.ignore(self._prefix)

    # --- negotiated transfers -------------------------------------------------------------------------------------------

    def send(self, name: str, values: Array, to: int, done: Done) -> None:
        """Begin to send values to a rank, which receives as many under the same name."""
        self._runtime.send(self._prefix + name, values, self._ranks[to], done)

    def receive(self, name: str, values: Array, source: int, done: Done) -> None:
        """Begin to receive them."""
        self._runtime.receive(self._prefix + name, values, self._ranks[source], done)
