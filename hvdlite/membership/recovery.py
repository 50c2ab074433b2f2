"""Recovery: whose state counts after a world has ended, and who has which rank in the next one (docs/protocol.md#donors).

Pure functions of what the members report of themselves (`StateReport`), and the record of meetings that failed. Members
whose loop counts bodies can go on at the last boundary without going back to a commit, if one of them has not stepped since.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from hvdlite.membership.members import Member
from hvdlite.membership.messages import SaveState, StateReport, WorldOrder

_TRIES: Final = 2
"""At least so many meetings fail before members are left out: a first failure may pass."""


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What follows from the state reports.

    Attributes:
        donors: the members that can resume at the greatest boundary, or else those with the most commits; by seniority. Each
            of them can be rank 0, from which all others get the state.
        restore: whether members with a state go back to their last commit first.
        commits: how many commits the donors have; 0 without donors.
        boundaries: the most that one of them has passed since.
    """

    donors: tuple[int, ...]
    restore: bool
    commits: int
    boundaries: int


def recover(reports: Mapping[int, StateReport]) -> Recovery:
    """Return whose state counts.

    Args:
        reports: of the members that are left, by seniority: their order in the world that has ended.
    """
    with_state = {member: report for member, report in reports.items() if report.has_state}
    newest = {member: report for member, report in with_state.items() if not report.is_behind} or with_state
    last = max(((report.commits, report.boundaries) for report in newest.values()), default=(0, 0))
    resuming = tuple(member for member, report in newest.items()
                     if report.can_resume and not report.is_behind and (report.commits, report.boundaries) == last)
    if resuming:
        return Recovery(resuming, False, *last)
    commits = max((report.commits for report in newest.values()), default=0)
    donors = tuple(member for member, report in newest.items() if report.commits == commits)
    boundaries = max((newest[member].boundaries for member in donors), default=0)
    restore = not all(report.at_rest and not report.is_behind for report in newest.values())
    return Recovery(donors, restore, commits, boundaries)


def ranks(donor: int, survivors: Sequence[int], joiners: Sequence[int]) -> tuple[int, ...]:
    """Return the members of a new world by rank.

    The survivors keep their order, but the donor is rank 0, because the state is sent from there. The joiners follow in
    the order in which they were started.
    """
    return (donor, *(member for member in survivors if member != donor), *sorted(joiners))


class FailedMeetings:
    """The failed meetings since the last world that has met.

    Rank 0 listens, and the others connect to it. When some cannot, another member with the same state may be rank 0. When
    all hosts with such a member have been tried, the side with fewer members is left out.

    Args:
        members: all members, by their ids.

    Attributes:
        complaints: members of the present world that could not reach a coordinator, with this.
        count: how many meetings in a row have failed.
        reason: why a meeting has failed, as a member reports.
    """

    def __init__(self, members: Mapping[int, Member]) -> None:
        self._members = members
        self.count = 0
        self.reason = ""
        self.complaints: set[tuple[int, int]] = set()
        self._unreached: set[tuple[int, int]] = set()  # who could not reach whom

    def complain(self, members: Collection[int], coordinator: int, reason: str) -> None:
        """Record that members have not reached rank 0 of the world that meets."""
        self.complaints.update((member, coordinator) for member in members)
        self.reason = reason

    def conclude(self, *, explained: bool) -> None:
        """Count the meeting as failed if there were complaints.

        Args:
            explained: a member of the world has died, which explains the complaints.
        """
        if self.complaints and not explained:
            self._unreached |= self.complaints
            self.count += 1
        self.complaints.clear()

    def choose(self, candidates: Sequence[int], members: Collection[int]) -> tuple[int, frozenset[int]] | None:
        """Return who should coordinate, and the members that are left out; None if the members cannot meet at all.

        Args:
            candidates: the members that can be rank 0, by seniority.
            members: the members of the world that is planned.
        """
        reachable = [member for member in candidates if not any(self._missed(other, member) for other in members)]
        if self.count < max(_TRIES, len(set(map(self._host, candidates)))):
            return (reachable or candidates)[0], frozenset()
        coordinators = {coordinator for _, coordinator in self._unreached}
        tried = [member for member in candidates if member in coordinators]
        mended = [member for member in reachable if member in tried]  # who could not reach it is not there any more
        if mended or not tried:
            return (mended or reachable or candidates)[0], frozenset()
        sides = {member: frozenset(other for other in members if other != member and (
            self._missed(other, member) or self._missed(member, other))) for member in tried}
        best = min((member for member in tried if sides[member]), key=lambda member: len(sides[member]), default=None)
        return None if best is None else (best, sides[best])

    def _missed(self, member: int, coordinator: int) -> bool:
        """Return whether a member, or another one of its host, could not reach a coordinator or another one of that host."""
        if self._host(member) == self._host(coordinator):
            return (member, coordinator) in self._unreached
        return any(self._host(one) == self._host(member) and self._host(other) == self._host(coordinator)
                   for one, other in self._unreached)

    def _host(self, member: int) -> str:
        return self._members[member].host


@dataclasses.dataclass(frozen=True)
class NextWorld:
    """A world that can be ordered, if it is large enough.

    Attributes:
        members: by rank. Rank 0 is one of the donors.
        left_out: why others are not in it, by their ids: survivors that leave, and are not needed for their state, and all
            that could not meet the others.
        unreachable: the latter.
        restore: whether members go back to their last commit.
        commits: those of rank 0.
        boundaries: the most that a donor has passed since.
    """

    members: tuple[int, ...]
    left_out: Mapping[int, str]
    unreachable: frozenset[int]
    restore: bool
    commits: int
    boundaries: int

    @property
    def order_to_save(self) -> SaveState:
        """What its rank 0 is told if the world would be too small."""
        return SaveState(self.restore, self.commits, self.boundaries)


def plan(survivors: Sequence[Member], joiners: Sequence[Member], *, leaves: Callable[[Member], str],
         meetings: FailedMeetings, max_np: int | None) -> NextWorld | None:
    """Return the next world; None if its members cannot meet.

    Args:
        survivors: by seniority, at least one of them with a state.
        joiners: those that are ready.
        leaves: why a member is not to be in it; "" if it may be.
        meetings: those that have just failed.
        max_np: the greatest size.
    """
    reports = {member.id: member.state_report or StateReport(has_state=False) for member in survivors}
    recovery = recover(reports)
    leaving = {member.id: why for member in survivors if (why := leaves(member))}
    donors = [member for member in recovery.donors if member not in leaving]
    if not donors:  # the state must not be lost: one of them stays until others have it
        donors = list(recovery.donors[:1])
        del leaving[donors[0]]
    staying = [member.id for member in survivors if member.id not in leaving]
    room = len(joiners) if max_np is None else max(0, max_np - len(staying))
    new = [member.id for member in joiners][:room]
    choice = meetings.choose(donors, staying + new)
    if choice is None:
        return None
    donor, unreachable = choice
    members = ranks(donor, _without(staying, unreachable), _without(new, unreachable))
    restore = recover({member: reports[member] for member in members if member in reports}).restore
    left_out = {id: leaving.get(id, "it could not meet the other ranks") for id in sorted({*leaving, *unreachable})}
    return NextWorld(members, left_out, unreachable, restore, recovery.commits, recovery.boundaries)


def _without(members: Sequence[int], others: Collection[int]) -> list[int]:
    return [member for member in members if member not in others]


def order(plan: NextWorld, epoch: int, hosts: Sequence[str], machine_of: Callable[[str], str], reason: str) -> WorldOrder:
    """Return the order for a planned world, of which the hosts of all ranks are given."""
    machines: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        machines.setdefault(machine_of(host), []).append(rank)
    return WorldOrder(epoch=epoch, members=plan.members, ranks_by_machine=tuple(map(tuple, machines.values())),
                      host_names=tuple(hosts), restore=plan.restore, commits=plan.commits, boundaries=plan.boundaries,
                      reason=reason)
