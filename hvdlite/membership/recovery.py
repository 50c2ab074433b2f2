"""Recovery: whose state counts after a world has ended, and who gets which rank (docs/protocol.md#donors).

A pure function of what the members say of themselves (`Standing`). So far a standing has commits only, as the training loops
of Horovod do. A loop that counts boundaries can say more; then members at the greatest boundary that have not stepped since
can be donors without going back to a commit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hvdlite.membership.messages import Standing


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What follows from the standings.

    Attributes:
        donors: the members with the greatest standing, by seniority. Each of them can be rank 0, from which all others get
            the state.
        restore: whether members with a state go back to their last commit first.
        commits: how many commits the donors have; 0 without donors.
    """

    donors: tuple[int, ...]
    restore: bool
    commits: int

    @property
    def donor(self) -> int | None:
        """The senior one of the donors; None if no member has a state."""
        return self.donors[0] if self.donors else None


def recover(standings: Mapping[int, Standing]) -> Recovery:
    """Return whose state counts.

    Args:
        standings: of the members that are left, by seniority: their order in the world that has ended.
    """
    with_state = {member: standing for member, standing in standings.items() if standing.has_state}
    commits = max((standing.commits for standing in with_state.values()), default=0)
    donors = tuple(member for member, standing in with_state.items() if standing.commits == commits)
    return Recovery(donors, not all(standing.at_rest for standing in with_state.values()), commits)


def ranks(donor: int, survivors: Sequence[int], joiners: Sequence[int]) -> tuple[int, ...]:
    """Return the members of a new world by rank.

    The survivors keep their order, but the donor is rank 0, because the state is sent from there. The joiners follow in
    the order in which they were started.
    """
    return (donor, *(member for member in survivors if member != donor), *sorted(joiners))
