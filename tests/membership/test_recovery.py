"""Whose state counts, exhaustively for four members (docs/protocol.md#donors, #bodies)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import pytest

from hvdlite.membership.messages import StateReport
from hvdlite.membership.recovery import Recovery, ranks, recover

STANDINGS: Final = [StateReport(has_state=False), *(
    StateReport(commits=commits, at_rest=at_rest) for commits in (0, 1, 2) for at_rest in (False, True)), *(
    StateReport(commits=commits, at_rest=True, is_behind=True) for commits in (0, 2)), *(
    StateReport(commits=1, boundaries=boundaries, can_resume=can_resume)
    for boundaries in (3, 4) for can_resume in (False, True)),
    StateReport(commits=1, boundaries=5, can_resume=True, at_rest=True, is_behind=True)]
"""What members can say: of Horovod's loops, of those that wait in `join()`, and of loops that count bodies."""
Rule = Callable[[Mapping[int, StateReport]], Recovery]


def check(rule: Rule, order: Sequence[int], reports: Sequence[StateReport]) -> None:
    """Check what a rule says of members that have reported."""
    told = dict(zip(order, reports, strict=True))
    recovery = rule(told)
    having = [member for member in order if told[member].has_state]
    having = [member for member in having if not told[member].is_behind] or having
    if not having:
        assert recovery.donors == () and recovery.commits == 0
        return
    last = max((told[member].commits, told[member].boundaries) for member in having)
    resuming = [member for member in having if told[member].can_resume and not told[member].is_behind
                and (told[member].commits, told[member].boundaries) == last]
    donor = recovery.donors[0]
    survivors = ranks(donor, order, [12, 11])
    assert survivors[0] == donor and survivors[-2:] == (11, 12)
    assert [member for member in survivors[1:-2]] == [member for member in order if member != donor]
    if resuming:  # one of them has the parameters of the greatest boundary
        assert list(recovery.donors) == resuming and not recovery.restore
        assert (recovery.commits, recovery.boundaries) == last
        return
    assert donor == max(having, key=lambda member: (told[member].commits, -order.index(member)))
    assert list(recovery.donors) == [member for member in having if told[member].commits == told[donor].commits]
    assert recovery.commits == told[donor].commits
    assert recovery.boundaries == max(told[member].boundaries for member in recovery.donors)
    assert recovery.restore == any(not told[member].at_rest or told[member].is_behind for member in having)


def combinations(size: int) -> Iterable[tuple[tuple[int, ...], tuple[StateReport, ...]]]:
    for reports in itertools.product(STANDINGS, repeat=size):
        yield (7, 3, 9, 1)[:size], reports
        yield (1, 3, 7, 9)[:size], reports


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4])
def test_the_greatest_standing_counts_and_the_senior_of_equals_is_the_donor(size: int) -> None:
    for order, reports in combinations(size):
        check(recover, order, reports)


def changed(**fields: object) -> Rule:
    """Return a rule that misreads a field of the reports."""
    return lambda told: recover({member: msgspec.structs.replace(report, **fields) for member, report in told.items()})


def always_back(told: Mapping[int, StateReport]) -> Recovery:
    return dataclasses.replace(recover(told), restore=True)


def never_back(told: Mapping[int, StateReport]) -> Recovery:
    return dataclasses.replace(recover(told), restore=False)


def any_boundary(told: Mapping[int, StateReport]) -> Recovery:
    """Whoever can resume is a donor, at the greatest boundary or not."""
    resuming = tuple(member for member, report in told.items() if report.can_resume and not report.is_behind)
    return dataclasses.replace(recover(told), donors=resuming, restore=False) if resuming else recover(told)


def everyone_there(told: Mapping[int, StateReport]) -> Recovery:
    """Whoever stands at the greatest boundary is a donor, though it has stepped."""
    found = recover(told)
    if found.restore or not any(told[member].can_resume for member in found.donors):
        return found
    last = found.commits, found.boundaries
    return dataclasses.replace(found, donors=tuple(
        member for member, report in told.items() if report.has_state and (report.commits, report.boundaries) == last))


def only_if_all_can(told: Mapping[int, StateReport]) -> Recovery:
    can = all(report.can_resume for report in told.values())
    return recover(told) if can else changed(can_resume=False)(told)


MUTANTS: Final[Mapping[str, Rule]] = {
    "nobody resumes": changed(can_resume=False), "whoever has not said so resumes, too": changed(can_resume=True),
    "boundaries do not count": changed(boundaries=0), "commits do not count": changed(commits=0),
    "nobody waits in join()": changed(is_behind=False), "all rest": changed(at_rest=True),
    "always back": always_back, "never back": never_back, "any boundary": any_boundary,
    "those that have stepped are donors": everyone_there, "only if all can": only_if_all_can}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_other_rules_are_seen_with_two_members(mutant: str) -> None:
    def differs(order: Sequence[int], reports: Sequence[StateReport]) -> bool:
        try:
            check(MUTANTS[mutant], order, reports)
        except AssertionError:
            return True
        return False
    assert any(itertools.starmap(differs, combinations(2)))
