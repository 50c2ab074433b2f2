"""Meetings of worlds that failed: which hosts cannot reach each other, and who should coordinate next.

Rank 0 listens, and the others connect to it. When some cannot, another member with the same state may be rank 0. When all
hosts with such a member have been tried, the side with fewer members is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_TRIES = 2
"""At least so many meetings fail before members are left out: a first failure may pass."""


class FailedMeetings:
    """The failed meetings since the last world that has met.

    Args:
        host_of: returns the host of a member.
    """

    def __init__(self, host_of: Callable[[int], str]) -> None:
        self._host_of = host_of
        self._complaints: set[tuple[int, int]] = set()  # of the meeting under way
        self._unreached: set[tuple[int, int]] = set()  # who could not reach whom
        self._tried: set[int] = set()  # the coordinators of these meetings
        self._count = 0
        self.reason = ""

    @property
    def count(self) -> int:
        """How many meetings in a row have failed."""
        return self._count

    @property
    def has_complaints(self) -> bool:
        """Whether members of the present world could not meet."""
        return bool(self._complaints)

    def complain(self, members: Collection[int], coordinator: int, reason: str) -> None:
        """Record that members have not reached rank 0 of the world that meets."""
        self._complaints.update((member, coordinator) for member in members)
        self.reason = reason

    def conclude(self, *, explained: bool) -> None:
        """Count the meeting as failed if there were complaints.

        Args:
            explained: a member of the world has died, which explains the complaints.
        """
        if self._complaints and not explained:
            self._unreached |= self._complaints
            self._tried |= {coordinator for _, coordinator in self._complaints}
            self._count += 1
        self._complaints.clear()

    def clear(self) -> None:
        """Forget all, because a world has met."""
        self._complaints.clear()
        self._unreached.clear()
        self._tried.clear()
        self._count = 0

    def choose(self, candidates: Sequence[int], members: Collection[int]) -> tuple[int, frozenset[int]] | None:
        """Return who should coordinate, and the members that are left out; None if the members cannot meet at all.

        Args:
            candidates: the members that can be rank 0, by seniority.
            members: the members of the world that is planned.
        """
        reachable = [member for member in candidates if not any(self._missed(other, member) for other in members)]
        if self._count < max(_TRIES, len({self._host_of(member) for member in candidates})):
            return (reachable or candidates)[0], frozenset()
        tried = [member for member in candidates if member in self._tried]
        mended = [member for member in reachable if member in tried]  # who could not reach it is not there any more
        if mended or not tried:
            return (mended or reachable or candidates)[0], frozenset()
        sides = {member: frozenset(other for other in members if other != member and (
            self._missed(other, member) or self._missed(member, other))) for member in tried}
        best = min((member for member in tried if sides[member]), key=lambda member: len(sides[member]), default=None)
        return None if best is None else (best, sides[best])

    def _missed(self, member: int, coordinator: int) -> bool:
        """Return whether a member, or another one of its host, could not reach a coordinator or another one of that host."""
        if self._host_of(member) == self._host_of(coordinator):
            return (member, coordinator) in self._unreached
        return any(self._host_of(one) == self._host_of(member) and self._host_of(other) == self._host_of(coordinator)
                   for one, other in self._unreached)
