"""What has changed between two worlds, in lines for people."""

from __future__ import annotations

from collections.abc import Collection

from hvdlite.membership.failures import FailureHistory
from hvdlite.membership.messages import WorldOrder


class Changes:
    """Who has left and who has come since the last world that has met, and for the whole job."""

    def __init__(self) -> None:
        self._left: list[str] = []
        self._joined: list[str] = []
        self._since: float | None = None
        self._left_in_all: list[str] = []

    def began(self, now: float) -> None:
        """Note when a world began to end; of several, the first one counts until another world has met."""
        self._since = now if self._since is None else self._since

    def left(self, who: str, why: str, *, failed: bool = False) -> None:
        """Note that a member of the world has left.

        Args:
            failed: it has failed, and stands among the failures.
        """
        self._left.append(f"{who} ({why})")
        if not failed:
            self._left_in_all.append(f"{who} left: {why}")

    def joined(self, hosts: Collection[str]) -> None:
        """Note the hosts of the members that a new world has more."""
        self._joined += [f"a rank on {host}" for host in hosts]

    def reason(self) -> str:
        """Return what has changed, in a line."""
        both = (("left", self._left), ("joined", self._joined))
        return "; ".join(f"{what}: {', '.join(who)}" for what, who in both if who) or "no rank has left or joined"

    def met(self, order: WorldOrder, now: float) -> str:
        """Return the line about a world that has met, and begin anew."""
        seconds = 0.0 if self._since is None else now - self._since
        where = (f"after commit {order.commits}" if order.commits else "from the beginning") if order.restore else (
            "where training stopped")
        size = _ranks(len(order.members))
        line = f"world {order.epoch}, {size}, goes on {where}; {self.reason()}; it took {seconds:.2f} s"
        self._left, self._joined, self._since = [], [], None
        return line

    def summary(self, epoch: int, size: int, failures: FailureHistory) -> list[str]:
        """Return the lines for the end of a job."""
        return [f"{epoch} {'world' if epoch == 1 else 'worlds'}; the last one had {_ranks(size)}",
                *(f"failed: {failure} (world {failure.epoch})" for failure in failures.all), *self._left_in_all]


def _ranks(count: int) -> str:
    return f"{count} {'rank' if count == 1 else 'ranks'}"
