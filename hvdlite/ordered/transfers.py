"""Sends and receives of an ordered group."""

from __future__ import annotations

from typing import Protocol

from hvdlite.core.array import Array
from hvdlite.ordered.call import Call


class Transfers(Protocol):
    """One rank's end of the messages between two ranks of a group."""

    def send(self, values: Array, to: int, tag: int) -> Call: ...

    def receive(self, values: Array, source: int | None, tag: int) -> Call: ...

    def fail(self, error: Exception) -> None: ...

    def close(self) -> None: ...
