"""The plan of the next world: who is in it, and who is not needed any more. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from hvdlite.membership.meetings import FailedMeetings
from hvdlite.membership.members import Member
from hvdlite.membership.messages import Standing
from hvdlite.membership.recovery import ranks, recover


@dataclasses.dataclass(frozen=True)
class Plan:
    """A world that can be ordered, if it is large enough.

    Attributes:
        members: by rank. Rank 0 has the greatest standing that any survivor has.
        leaving: survivors that leave, and are not needed for their state.
        unreachable: survivors and joiners that could not meet the others.
        restore: whether members go back to their last commit.
        commits: those of rank 0.
    """

    members: tuple[int, ...]
    leaving: frozenset[int]
    unreachable: frozenset[int]
    restore: bool
    commits: int


def plan(survivors: Sequence[Member], joiners: Sequence[Member], *, is_leaving: Callable[[Member], bool],
         meetings: FailedMeetings, max_np: int | None) -> Plan | None:
    """Return the next world; None if its members cannot meet.

    Args:
        survivors: by seniority, at least one of them with a state.
        joiners: those that are ready.
        is_leaving: whether a member is not to be in it.
        meetings: those that have just failed.
        max_np: the greatest size.
    """
    standings = {member.id: member.standing or Standing(has_state=False) for member in survivors}
    recovery = recover(standings)
    leaving = {member.id for member in survivors if is_leaving(member)}
    donors = [member for member in recovery.donors if member not in leaving]
    if not donors:  # the state must not be lost: one of them stays until others have it
        donors = list(recovery.donors[:1])
        leaving -= set(donors)
    staying = [member.id for member in survivors if member.id not in leaving]
    room = len(joiners) if max_np is None else max(0, max_np - len(staying))
    new = [member.id for member in joiners][:room]
    choice = meetings.choose(donors, staying + new)
    if choice is None:
        return None
    donor, unreachable = choice
    members = ranks(donor, _without(staying, unreachable), _without(new, unreachable))
    restore = recover({member: standings[member] for member in members if member in standings}).restore
    return Plan(members, frozenset(leaving), unreachable, restore, recovery.commits)


def _without(members: Sequence[int], others: Collection[int]) -> list[int]:
    return [member for member in members if member not in others]
