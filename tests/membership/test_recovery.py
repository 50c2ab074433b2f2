"""Whose state counts, exhaustively for four members (docs/protocol.md#donors)."""

from __future__ import annotations

import itertools

import pytest

from hvdlite.membership.messages import StateReport
from hvdlite.membership.recovery import ranks, recover

STANDINGS = [StateReport(has_state=False), *(
    StateReport(commits=commits, at_rest=at_rest) for commits in (0, 1, 2) for at_rest in (False, True)), *(
    StateReport(commits=commits, at_rest=True, is_behind=True) for commits in (0, 2))]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4])
def test_the_greatest_standing_counts_and_the_senior_of_equals_is_the_donor(size: int) -> None:
    for combination in itertools.product(STANDINGS, repeat=size):
        for order in ([7, 3, 9, 1][:size], [1, 3, 7, 9][:size]):
            state_reports = dict(zip(order, combination, strict=True))
            recovery = recover(state_reports)
            having = [member for member in order if state_reports[member].has_state]
            having = [member for member in having if not state_reports[member].is_behind] or having
            if not having:
                assert recovery.donors == () and recovery.commits == 0
                continue
            donor = recovery.donors[0]
            assert donor == max(having, key=lambda member: (state_reports[member].commits, -order.index(member)))
            assert all(state_reports[member].commits == recovery.commits for member in recovery.donors)
            assert list(recovery.donors) == [
                member for member in having if state_reports[member].commits == state_reports[donor].commits]
            assert recovery.restore == any(
                not state_reports[member].at_rest or state_reports[member].is_behind for member in having)
            survivors = ranks(donor, order, [12, 11])
            assert survivors[0] == donor and survivors[-2:] == (11, 12)
            assert [member for member in survivors[1:-2]] == [member for member in order if member != donor]
