"""What an ordered group tells the runtime on which it lives, for reports, the timeline and the search for stalled ranks."""

from __future__ import annotations

from typing import Protocol

from hvdlite.groups.call import UNCOUNTED, Waits
from hvdlite.negotiation.messages import Response


class Reporter(Protocol):
    """The interface of a runtime for groups. Callable from any thread.

    Attributes:
        progress: counts the time that the script's threads wait.
    """

    @property
    def progress(self) -> Waits: ...

    def clock(self) -> float:
        """Return the time in seconds, the same for all ranks of the group."""

    def called(self) -> None:
        """The script's thread that calls this calls a collective."""

    def began(self, name: str) -> None:
        """A call begins, under its name for reports."""

    def ended(self, name: str, response: Response, begun: float, met: float) -> None:
        """A call is done, which began, and had all ranks, at these times."""

    def waits_changed(self) -> None:
        """Calls in which this rank has waited for long are others than before, or it waits for other ranks."""

    def suspect(self) -> None:
        """This rank has waited for long in the middle of a call that all ranks have made."""

    def failed(self, error: Exception) -> None:
        """A call has failed on this rank alone: tell the others."""


class NoReporter:
    """For a group of one rank, which never waits."""

    progress = UNCOUNTED

    def clock(self) -> float:
        return 0.0

    def called(self) -> None:
        pass

    def began(self, name: str) -> None:
        pass

    def ended(self, name: str, response: Response, begun: float, met: float) -> None:
        pass

    def waits_changed(self) -> None:
        pass

    def suspect(self) -> None:
        pass

    def failed(self, error: Exception) -> None:
        pass
