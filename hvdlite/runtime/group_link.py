"""The messages of an ordered group on several hosts, through the runtime on which it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.core.array import Array
from hvdlite.engine.oob import GroupOob
from hvdlite.groups.negotiated_transfers import Done
from hvdlite.runtime.runtime import Runtime


class GroupAnnouncements:
    """Implements `ordered.standings.Announcements`.

    Args:
        oob: nobody else announces anything there.
    """

    def __init__(self, oob: GroupOob) -> None:
        self._oob = oob

    def announce(self, to: Sequence[int], text: bytes) -> None:
        self._oob.announce(to, text)

    def hear(self, hear: Callable[[int, bytes], None]) -> None:
        self._oob.hear(hear)

    def close(self) -> None:
        self._oob.hear(lambda source, text: None)


class GroupLink(GroupAnnouncements):
    """Implements `ordered.negotiated_transfers.Link`.

    Args:
        runtime: its ranks are those of the group.
        oob: of the group's sends and receives.
    """

    def __init__(self, runtime: Runtime, oob: GroupOob) -> None:
        super().__init__(oob)
        self._runtime = runtime

    def send(self, name: str, values: Array, to: int, done: Done) -> None:
        self._runtime.send(self._oob.prefix + name, values, to, done)

    def receive(self, name: str, values: Array, source: int, done: Done) -> None:
        self._runtime.receive(self._oob.prefix + name, values, source, done)
