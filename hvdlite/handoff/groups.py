"""An ordered group that lives on a runtime, as its background thread sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hvdlite.negotiation.messages import GroupCalls


class Group(Protocol):
    """Callable from any thread; nothing here takes a lock."""

    @property
    def is_waiting(self) -> bool:
        """Whether a thread may be blocked in a call of the group."""

    @property
    def troubled(self) -> Callable[[], object]:
        """To be called when rank 0 gathers a report, and before `fail`: once, if several groups have the same function."""

    def silence(self) -> None:
        """The background thread ends: from now on tell the group's other ranks nothing, for theirs end, too.

        Called for all groups before the first one fails. Then the script may go on, and leave another one.
        """

    def fail(self, error: Exception) -> None:
        """The background thread ends: fail all calls under way and all later ones."""

    def calls(self) -> GroupCalls:
        """Return how far this rank is, and in which calls it has waited for long."""

    def blocked_threads(self) -> frozenset[int] | None:
        """Return the threads that cannot go on before a collective in which this rank has waited for long is over.

        None while calls of the group are carried out that are not such a collective, or may be by a callback of a send or
        receive: they may end any time.
        """
